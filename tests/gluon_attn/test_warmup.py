"""`python -m gluon_attn warmup`: which kernels it compiles, that a call then finds them, what it refuses and prints."""

import concurrent.futures
import dataclasses
import pickle
import random
import shutil
import sys
from functools import partial
from typing import Any

import pytest
import torch

from gluon_attn import __main__ as command
from gluon_attn import tuning, warmup
from gluon_attn.backward import table as backward
from gluon_attn.backward.configs import label
from gluon_attn.backward.launch import Choices, builds_of, sinks_build
from gluon_attn.backward.plan import BackwardPlan, can_share
from gluon_attn.backward.table import HOPPER, BackwardRow
from gluon_attn.backward.table import pick_config as pick_backward
from gluon_attn.bias import Bias
from gluon_attn.device import Device
from gluon_attn.documents import documents_build
from gluon_attn.forward.launch import build_of, launches_of, transpose_build
from gluon_attn.forward.plan import Plan
from gluon_attn.forward.table import PACKAGED, Row, hopper_config, pick_config
from gluon_attn.kernels.common.mask import Mask
from gluon_attn.mask_mod import DOCUMENTS
from gluon_attn.problem import Problem
from gluon_attn.runtime.kernel import Build
from gluon_attn.score_mod import alibi, softcap
from gluon_attn.tensors import NAMED_DTYPES, empty_output
from tests.gluon_attn.table_files import H100, content

pytestmark = pytest.mark.usefixtures("packaged_alone")  # rows of a card serve few of the sizes that are tried here
DEVICES = {90: Device.hopper(), 100: Device.blackwell(), 103: Device.blackwell_ultra()}


def jobs(*arguments: str, arch: int = 90) -> list[warmup.Job]:
    _, options = warmup.parsed(arguments)
    return warmup.unlike(warmup.jobs_of(options, arch))


def random_problem(rng: random.Random, dtype: torch.dtype, head_dim: int, causal: bool) -> Problem:
    kv_heads = rng.choice([1, 2, 8])
    return Problem(
        dtype=dtype,
        batch=rng.choice([1, 2, 16]),
        heads=kv_heads * rng.choice([1, 4]),
        kv_heads=kv_heads,
        q_len=round(2 ** rng.uniform(0, 15)),
        kv_len=round(2 ** rng.uniform(0, 15)),
        head_dim=head_dim,
        causal=causal,
        scale=0.1,
        layout="bhsd",
    )


def builds_of_a_call(problem: Problem, device: Device) -> list[Build]:
    plan = Plan.of(problem, pick_config(problem, device), device)
    of_kv, d, d_v = (problem.batch, problem.kv_heads, problem.kv_len), problem.head_dim, problem.head_dim_v
    q = torch.empty((problem.batch, problem.heads, problem.q_len, d), dtype=problem.dtype, device="meta")
    k, v = (torch.empty((*of_kv, columns), dtype=problem.dtype, device="meta") for columns in (d, d_v))
    return [launch.build for launch in launches_of(plan, q, k, v, empty_output(q, v))]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "arch"),
    [("bf16", 64, 90), ("fp16", 96, 90), ("bf16", 256, 90), ("e4m3", 64, 90), ("e5m2", 128, 90), ("bf16", 128, 100)]
    + [("e4m3", 64, 103)],
)
@pytest.mark.slow_but(
    "e4m3-64-103-causal",
    "bf16-128-100-full",
    "e5m2-128-90-causal",
    "fp16-96-90-causal",
    "bf16-256-90-causal",
    "bf16-64-90-full",
)
def test_every_call_finds_its_kernels(dtype, head_dim, arch, causal):
    """Whatever its lengths and heads; and none is compiled that no call needs."""
    mask = "--causal" if causal else "--full"
    compiled = [job.make() for job in jobs("--head-dim", str(head_dim), "--dtype", dtype, mask, arch=arch)]
    rng, used = random.Random(head_dim), []
    for _ in range(400):
        problem = random_problem(rng, NAMED_DTYPES[dtype], head_dim, causal)
        used += [build for build in builds_of_a_call(problem, DEVICES[arch]) if build not in used]
    assert [build for build in used if build not in compiled] == []
    assert [build for build in compiled if build not in used] == []


# What calls have then.
FEATURES: dict[str, tuple[list[str], list[dict[str, Any]]]] = {
    "a causal window": (["--window", "300,0", "--causal"], [{"left": 300}, {}]),
    "a small causal window": (["--window", "99,0", "--causal"], [{"left": 99}, {}]),
    "small chunks": (["--chunk", "600", "--causal"], [{"chunk": 600}, {}]),
    "a causal window, and no mask": (["--window", "300,0"], [{"left": 300}, {}, {"causal": False}]),
    "a window of two sides": (
        ["--window", "300,200", "--full"],
        [{"causal": False, "left": 300, "right": 200}, {"causal": False}],
    ),
    "chunks": (["--chunk", "2000", "--causal"], [{"chunk": 2000}, {}]),
    "chunks and a window": (["--chunk", "600", "--window", "300,0", "--causal"], [{"chunk": 600, "left": 300}, {}]),
    "chunks and a window, and no mask": (
        ["--chunk", "300", "--window", "600,200", "--full"],
        [{"causal": False, "chunk": 300, "left": 600, "right": 200}, {"causal": False}],
    ),
    "documents": (["--documents", "--causal"], [{"mask_function": DOCUMENTS}]),
    "documents of a window": (
        ["--documents", "--window", "300,", "--causal"],
        [{"mask_function": DOCUMENTS, "left": 300}, {"mask_function": DOCUMENTS}],
    ),
    "a cap on scores": (["--softcap", "30", "--causal"], [{"score_mod": softcap(30.0)}]),
    "slopes": (["--alibi", "--full"], [{"causal": False, "score_mod": alibi(torch.empty(8))}]),
    "sinks": (["--sinks", "bf16", "--causal"], [{"sinks": torch.bfloat16}]),
}


@pytest.mark.parametrize("name", FEATURES)
def test_calls_with_masks_and_scores_find_theirs(name):
    arguments, changes = FEATURES[name]
    listed = jobs("--head-dim", "64", "--backward", *arguments)
    compiled = [job.make() for job in listed]
    rng, used = random.Random(2), []
    lengths = [near + by for near in (200, 300, 600, 2000) for by in (-1, 0, 1, 2)]  # where limits begin to hide
    for _ in range(1000):
        problem = dataclasses.replace(random_problem(rng, torch.bfloat16, 64, causal=True), **rng.choice(changes))
        at = [rng.choice([length, rng.choice(lengths)]) for length in (problem.q_len, problem.kv_len)]
        problem = dataclasses.replace(problem, q_len=at[0], kv_len=at[1])
        plan = BackwardPlan.of(problem, pick_backward(problem), Device.hopper())
        builds = [*builds_of(Choices.of(plan))]
        builds += [sinks_build(torch.bfloat16)] * (problem.sinks is not None)
        builds += [documents_build(of_keys=True)] * problem.has_documents
        used += [b for b in builds_of_a_call(problem, Device.hopper()) + builds if b not in used]
    assert [build for build in used if build not in compiled] == []
    unused = [job.name for job, build in zip(listed, compiled, strict=True) if build not in used]
    # Of several limits some are left out at few lengths only, of which random ones may have none.
    assert all("before" in name or "after" in name or "chunks" in name for name in unused)
    assert len(unused) <= len(listed) / 5
    pickle.dumps(listed)


def test_rows_of_other_cards_are_left_out_on_a_card(written, monkeypatch):
    """Where it is not known which card it will be, they are not."""
    monkeypatch.setattr(tuning, "OF_CARDS", (tuning.Table(**vars(tuning.read(written(content(devices=[H100]))))),))
    _, options = warmup.parsed(["--head-dim", "128", "--full"])
    found = {device: list(warmup.jobs_of(options, 90, device)) for device in (None, H100, Device.hopper())}
    of_row = {device: [job.name for job in jobs if "from 512 keys" in job.name] for device, jobs in found.items()}
    assert [len(names) for names in of_row.values()] == [1, 1, 0]
    assert len(found[None]) == len(found[Device.hopper()]) + 1


@pytest.mark.parametrize("scores", ["softcap", "softcap with maxima", "bias", "alibi"])
def test_rows_for_changed_scores_are_compiled_for_those(monkeypatch, scores):
    """Whatever else is asked for. Of gradients likewise, which have none for a bias."""
    row = Row(64, True, hopper_config(1, 64, 1, 2, 232), scores=scores)
    of_gradients = BackwardRow((64, 64), dataclasses.replace(HOPPER[64], query_slots=2, dout_slots=2), scores=scores)
    monkeypatch.setattr(tuning, "rows_of_arch", lambda _: (row, *PACKAGED))
    monkeypatch.setattr(tuning, "backward_rows_of_arch", lambda _: (of_gradients, *backward.PACKAGED))
    asked = {
        "softcap": ["--softcap", "30"],
        "softcap with maxima": ["--softcap", "30", "--dtype", "fp16"],
        "bias": ["--bias", "bf16"],
        "alibi": ["--alibi"],
        "plain": [],
    }
    for kind, arguments in asked.items():
        names = [job.name for job in jobs("--head-dim", "64", "--causal", "--backward", *arguments)]
        assert any(" 64 x 64" in name for name in names) == (kind == scores)
        assert any(label(of_gradients.config) in name for name in names) == (kind == scores != "bias")


def test_rows_for_changed_scores_come_before_a_general_one(monkeypatch):
    """As calls ask them, wherever they are in a file."""
    general = Row(64, True, hopper_config(1, 128, 1, 2, 232))
    row = Row(64, True, hopper_config(1, 64, 1, 2, 232), scores="alibi")
    monkeypatch.setattr(tuning, "rows_of_arch", lambda _: (general, row, *PACKAGED))
    assert any(" 64 x 64" in job.name for job in jobs("--head-dim", "64", "--causal", "--alibi"))


@pytest.mark.parametrize(("left", "compiled"), [(98, False), (99, True)], ids=["fewer keys", "as many"])
def test_rows_of_more_keys_than_a_window_has_are_not_compiled(monkeypatch, left, compiled):
    """But for the kernels without a window, which serve what is no longer than that."""
    config = dataclasses.replace(HOPPER[64], query_slots=2, dout_slots=2)
    row = BackwardRow((64, 64), config, True, min_kv_len=100, max_kv_len=200)
    monkeypatch.setattr(tuning, "backward_rows_of_arch", lambda _: (row, *backward.PACKAGED))
    names = [job.name for job in jobs("--head-dim", "64", "--causal", "--backward", "--window", f"{left},0")]
    of_row = [name for name in names if label(config) in name]
    assert any("before" not in name for name in of_row)
    assert any(f"{left} before" in name for name in of_row) == compiled


@pytest.mark.parametrize("limit", ["left", "chunk"])
@pytest.mark.parametrize(
    ("head_dim", "keys", "expected"), [(64, 600, False), (64, 1000, True), (128, 250, False), (128, 500, True)]
)
def test_key_blocks_are_shared_where_enough_row_blocks_see_them_only(head_dim, keys, expected, limit):
    mask, config, found = Mask(causal=True, **{limit: keys}), HOPPER[head_dim], False
    for length in range(keys + 2, keys + 900, 7):
        problem = dataclasses.replace(
            random_problem(random.Random(0), torch.bfloat16, head_dim, causal=True),
            batch=1, heads=8, kv_heads=1, q_len=length, kv_len=length, **{limit: keys},
        )  # fmt: skip
        assert problem.mask == mask
        found |= BackwardPlan.of(problem, config, Device.hopper()).shared > 0
    assert (found, can_share(mask, config)) == (expected, expected)


PACKED_DTYPES = [("bf16", 128, 90), ("e4m3", 64, 90), ("bf16", 64, 100)]


PACKED_LIMITS: dict[str, tuple[list[str], list[dict[str, Any]]]] = {
    "no limit": ([], [{}]),
    "window": (["--window", "300,0", "--causal"], [{"causal": True}, {"causal": True, "left": 300}]),
    "window of two sides": (
        ["--window", "300,200", "--full"],
        [{"causal": False}, {"causal": False, "left": 300, "right": 200}],
    ),
    "chunk": (["--chunk", "600", "--causal"], [{"causal": True}, {"causal": True, "chunk": 600}]),
}


@pytest.mark.parametrize("limits", PACKED_LIMITS)
@pytest.mark.parametrize("used", [False, True], ids=["all keys", "some keys"])
@pytest.mark.parametrize(("dtype", "head_dim", "arch"), PACKED_DTYPES)
def test_calls_with_packed_sequences_find_theirs(dtype, head_dim, arch, used, limits):
    backward = arch == 90 and dtype == "bf16"
    arguments = ["--head-dim", str(head_dim), "--dtype", dtype, "--packed", *["--backward"] * backward]
    arguments += PACKED_LIMITS[limits][0]
    listed = jobs(*arguments, arch=arch)
    compiled = [job.make() for job in listed]
    rng, seen, device = random.Random(3), [], DEVICES[arch]
    for _ in range(150):
        batch = random_problem(rng, NAMED_DTYPES[dtype], head_dim, rng.choice([False, True]))
        count = rng.choice([1, 3, 40])
        problem = dataclasses.replace(
            batch,
            batch=1,
            sequences=count,
            layout="thd",
            q_len=count * batch.q_len,
            kv_len=count * batch.kv_len,
            **rng.choice(PACKED_LIMITS[limits][1]),
        )
        plan = Plan.of(problem, pick_config(problem, device), device)
        q = torch.empty((problem.q_len, problem.heads, head_dim), dtype=problem.dtype, device="meta")
        k = torch.empty((problem.kv_len, problem.kv_heads, head_dim), dtype=problem.dtype, device="meta")
        builds = [launch.build for launch in launches_of(plan, q, k, k, empty_output(q, k), used)]
        if backward:
            of = BackwardPlan.of(problem, pick_backward(problem), device)
            builds += builds_of(Choices.of(of, used=used))
        seen += [build for build in builds if build not in seen]
    assert [build for build in seen if build not in compiled] == []
    unused = [job.name for job, build in zip(listed, compiled, strict=True) if build not in seen]
    # Of the other `used`; and of a window of both sides rows of more keys, for few queries of each sequence.
    assert all(name.startswith(("list", "transpose", "backward, list")) or "after" in name for name in unused)
    pickle.dumps(listed)


BIASES: dict[str, tuple[list[str], list[Bias], bool]] = {
    "of each query": (
        ["bf16"],
        [Bias(dtype=torch.bfloat16, each_row=True, shared=shared) for shared in (False, True)],
        False,
    ),
    "of keys": (["fp32", "--bias-of-keys"], [Bias(dtype=torch.float32, each_row=False, shared=True)], False),
    "with gradients": (
        ["fp32", "--bias-gradient"],
        [Bias(dtype=torch.float32, each_row=True, shared=shared) for shared in (False, True)],
        True,
    ),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", BIASES)
def test_calls_with_a_bias_find_theirs(name, head_dim):
    arguments, biases, of_bias = BIASES[name]
    listed = jobs("--head-dim", str(head_dim), "--backward", "--bias", *arguments)
    compiled = [job.make() for job in listed]
    rng, used, device = random.Random(4), [], Device.hopper()
    for _ in range(600):
        problem = random_problem(rng, torch.bfloat16, head_dim, rng.choice([False, True]))
        problem = dataclasses.replace(problem, bias=rng.choice(biases))
        config = pick_config(problem, device)
        plan = BackwardPlan.of(problem, pick_backward(problem), device)
        bf16 = (torch.bfloat16, head_dim, problem.mask)
        builds = [build_of(*bf16, config, bias=problem.bias)]
        builds += builds_of(Choices.of(plan, of_bias=of_bias))
        used += [build for build in builds if build not in used]
    assert [build for build in used if build not in compiled] == []
    assert [job.name for job, build in zip(listed, compiled, strict=True) if build not in used] == []
    names = [job.name for job in listed]
    assert len(set(names)) == len(names)
    pickle.dumps(listed)


@pytest.mark.parametrize("head_dim", [128, 192])
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
def test_every_backward_call_finds_its_kernels(deterministic, head_dim):
    how = ["--deterministic"] * deterministic
    listed = jobs("--head-dim", str(head_dim), "--causal", "--backward", *how)
    compiled = [job.make() for job in listed if job.name.startswith("backward")]
    rng, used = random.Random(1), []
    for _ in range(200):
        problem = random_problem(rng, torch.bfloat16, head_dim, causal=True)
        plan = BackwardPlan.of(problem, pick_backward(problem), Device.hopper(), deterministic=deterministic)
        builds = builds_of(Choices.of(plan))
        used += [build for build in builds if build not in used]
    assert [build for build in used if build not in compiled] == []
    assert [build for build in compiled if build not in used] == []


def test_each_kernel_has_a_name_of_its_own_and_comes_once():
    dtypes = ("--dtype", *NAMED_DTYPES, "--backward")
    names = [job.name for job in jobs("--head-dim", "64", "96", "128", "256", *dtypes)]
    assert len(set(names)) == len(names)
    assert names == [job.name for job in jobs("--head-dim", "64", "128", "256", *dtypes)]


SMALL = warmup.Job("transpose D=64", partial(transpose_build, torch.float8_e4m3fn, 64))
OTHER = warmup.Job("transpose D=128", partial(transpose_build, torch.float8_e5m2, 128))


def test_a_cache_is_found_again_at_its_own_path_only(monkeypatch, tmp_path):
    """As docs/install.md says: Triton keeps absolute paths in it."""
    monkeypatch.setattr(warmup.knobs.compilation, "listener", None)
    here, there, kept = tmp_path / "here", tmp_path / "there", tmp_path / "kept"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(here))
    assert not warmup.compile_job(SMALL, 90)
    assert warmup.compile_job(SMALL, 90)
    shutil.copytree(here, there)
    here.rename(kept)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(there))
    assert not warmup.compile_job(SMALL, 90)
    shutil.rmtree(there)
    shutil.copytree(kept, here)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(here))
    assert warmup.compile_job(SMALL, 90)


@pytest.fixture
def stand_ins(monkeypatch):
    """Threads for processes, and nothing compiled: every second kernel is in the cache."""
    asked = []

    class Threads(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, max_workers, **options):
            super().__init__(max_workers=1)

    def compile_job(job, arch):
        asked.append((job.name, arch))
        return len(asked) % 2 == 0

    monkeypatch.setattr(warmup, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(warmup, "compile_job", compile_job)
    monkeypatch.setattr(warmup, "quiet_exit", lambda: None)
    monkeypatch.setattr(warmup, "card", lambda: None)
    return asked


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["gluon_attn", "warmup", *arguments])
    command.main()


def test_a_line_for_each_kernel_where_there_is_no_terminal(monkeypatch, capsys, stand_ins):
    run(monkeypatch, "--head-dim", "128", "--causal", "--backward", "--arch", "sm_90", "--jobs", "2")
    lines = capsys.readouterr().out.splitlines()
    count = len(stand_ins)
    assert count == 8  # four rows, and the backward's kernels, each twice
    assert lines[0].startswith(f"Compiling {count} kernels for sm_90a into ")
    assert [line.split()[:3] for line in lines[1:-1]] == [[str(i), "of", str(count)] for i in range(1, count + 1)]
    assert lines[-1] == f"Compiled {count - count // 2}, in the cache before: {count // 2}; 0 s"
    assert {arch for _, arch in stand_ins} == {90}


def test_a_bar_on_a_terminal(monkeypatch, capsys, stand_ins):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    run(monkeypatch, "--head-dim", "128", "--full", "--arch", "sm_90")
    bars = capsys.readouterr().out.split("\r")[1:]
    assert len(bars) == len(stand_ins)
    assert bars[-1].startswith(f"[{'#' * warmup.BAR_WIDTH}] {len(bars)} of {len(bars)}  ")
    assert [bar.count("#") for bar in bars] == sorted(bar.count("#") for bar in bars)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--arch: expected one of sm_90, sm_100, sm_103, as there is no card"),
        (["--arch", "sm_80"], "argument --arch: invalid choice"),
        (["--arch", "sm_90", "--head-dim", "60"], "--head-dim: expected a multiple of 8 up to 256 for sm_90, got 60"),
        (["--arch", "sm_100", "--head-dim", "256"], "--head-dim: expected a multiple of 8 up to 128 for sm_100, got"),
        (["--arch", "sm_90", "--dtype", "e4m3", "--head-dim", "72"], "expected a multiple of 16 up to 256"),
        (["--arch", "sm_100", "--backward"], "--backward: expected --arch sm_90"),
        (["--arch", "sm_90", "--dtype", "e4m3", "--backward"], "--backward: expected fp16 or bf16 among --dtype"),
        (["--arch", "sm_90", "--deterministic"], "--deterministic: expected with --backward only"),
        (["--arch", "sm_90", "--jobs", "0"], "--jobs: expected 1 or more, got 0"),
        (["--causal", "--full"], "not allowed with"),
        (["--arch", "sm_90", "--full", "--window", "7,0"], "--window: with no key after a query it is causal; leave"),
        (["--arch", "sm_90", "--window", "7"], "argument --window: expected LEFT,RIGHT, as '1023,0'"),
        (["--arch", "sm_90", "--chunk", "0"], "--chunk: expected at least 1 key, got 0"),
        (["--arch", "sm_90", "--softcap", "0", "--alibi"], "--alibi: not supported together with --softcap"),
        (["--arch", "sm_90", "--bias-of-keys"], "--bias-of-keys: expected with --bias only; give its dtype"),
        (["--arch", "sm_90", "--bias", "bf16", "--bias-gradient"], "--bias-gradient: expected with --backward only"),
        (["--arch", "sm_90", "--bias", "bf16", "--packed"], "--bias: not supported together with --packed"),
        (["--arch", "sm_90", "--bias", "bf16", "--softcap", "9"], "--bias: not supported together with --softcap"),
        (["--arch", "sm_90", "--softcap", "9", "--alibi"], "--alibi: not supported together with --softcap"),
        (["--arch", "sm_90", "--packed", "--documents"], "--documents: not supported together with --packed"),
        (["--arch", "sm_90", "--bias", "fp16"], "--bias: expected fp32, or the dtype of q"),
        (["--arch", "sm_90", "--bias", "fp32", "--dtype", "e4m3"], "--bias: expected fp32, or the dtype of q"),
        (
            ["--arch", "sm_90", "--backward", "--deterministic", "--bias", "fp32", "--bias-of-keys", "--bias-gradient"],
            "--deterministic: not supported with the gradient of a bias that queries have in common",
        ),
        (["--arch", "sm_90", "--softcap", "-1"], "softcap: expected a positive number from"),
    ],
)
def test_nonsense_is_refused(monkeypatch, capsys, stand_ins, arguments, says):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *arguments)
    assert says in capsys.readouterr().err
    assert stand_ins == []


def test_an_older_triton_compiles_for_hopper_only(monkeypatch, capsys, stand_ins):
    monkeypatch.setattr("triton.__version__", "3.8.0")
    run(monkeypatch, "--arch", "sm_90")
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--arch", "sm_100")
    assert "triton: expected version 3.9 for kernels for sm_100a, got 3.8.0" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_compiles_in_processes_of_its_own(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for done in ("Compiled 2, in the cache before: 0", "Compiled 0, in the cache before: 2"):
        warmup.compile_all([SMALL, OTHER], 90, 2)
        assert done in capfd.readouterr().out


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_kernels_of_a_v_head_dim_of_its_own(causal):
    rng = random.Random(0)
    found = [job.make() for job in jobs("--head-dim", "192", "--head-dim-v", "128", "--dtype", "bf16", "e4m3")]
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for _ in range(20):
            asked = dataclasses.replace(random_problem(rng, dtype, 192, causal), head_dim_v=128)
            assert all(build in found for build in builds_of_a_call(asked, DEVICES[90]))
    names = [job.name for job in jobs("--head-dim", "136", "--head-dim-v", "128", "--backward", "--causal")]
    assert any(name.startswith("backward D=192/128 causal bf16, main") for name in names)


@pytest.mark.parametrize(
    ("head_dims", "message"),
    [
        (("64", "136"), "--head-dim-v: expected a multiple of 8 up to 128 for sm_100, got 136"),
        (("64", "60"), "got 60"),
    ],
)
def test_a_v_head_dim_without_kernels_is_refused(head_dims, message):
    with pytest.raises(ValueError, match=message):
        jobs("--head-dim", head_dims[0], "--head-dim-v", head_dims[1], arch=100)
