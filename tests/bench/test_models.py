"""The bench of models: who computes what, on a tiny model on the CPU, and what is shown of a result."""

import contextlib
import json
import math
import statistics
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from bench.timing import Timing
from gluon_attn.device import Device
from gluon_attn.training import WINDOW, Shape

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers", exc_type=ModuleNotFoundError
)
from bench import models  # noqa: E402  # it imports transformers
from gluon_attn import hf  # noqa: E402  # likewise

TINY = Shape(layers=1, heads=2, kv_heads=1, head_dim=32, vocabulary=32, batch=1, length=48)
LENGTHS = [20, 40]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """So small products gain nothing by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ran(monkeypatch) -> list[tuple[int, bool, bool]]:
    """Length, with gradients or not, deterministic or not, of each call of ours; gluon_cpu is there for the card."""
    calls = []

    def counted(q: Any, *args: Any, **kw: Any) -> Any:
        calls.append((q.shape[2], torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()))
        return attention(q, *args, **kw)

    def timed(timed_calls, **options):
        return {name: Timing(0.5, (call() is None and 0.5, 0.6)) for name, call in timed_calls.items()}

    attention = hf.attention
    monkeypatch.setattr(hf, "attention", counted)
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, hf.NAME, None)  # taken out again afterwards
    monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, hf.NAME, None)
    hf.register(Device.hopper())
    monkeypatch.setattr(models, "TOKENS", 40)
    monkeypatch.setattr(models, "time_interleaved", timed)
    monkeypatch.setattr(models, "peak_gib", lambda call: 1.0)
    monkeypatch.setattr(models, "attention_ms", lambda call: {"kernel": 2.0})
    return calls


@pytest.fixture
def model(ran) -> Any:
    return models.model_of(TINY, torch.bfloat16, "cpu")


def test_training_steps(model, ran):
    before = model.lm_head.weight.clone()
    points = json.loads(json.dumps(models.measure_training(model, LENGTHS, 1)))
    assert [point["length"] for point in points] == LENGTHS
    assert all(list(point["results"]) == models.TRAINS and not point["refused"] for point in points)
    assert points[0]["results"]["sdpa"]["tokens_per_second"] == 80.0
    each_twice = [(True, False), (True, True)] * 2
    assert ran == [(length, *flags) for length in LENGTHS for flags in each_twice]
    assert not torch.equal(model.lm_head.weight, before)
    assert not torch.are_deterministic_algorithms_enabled()


def test_prefills(model, ran):
    points = models.measure_prefill(model, LENGTHS, 1)
    assert all(list(point["results"]) == models.PREFILLS and not point["refused"] for point in points)
    assert ran == [(length, False, False) for length in LENGTHS for _ in range(2)]


REQUESTS = models.Requests(count=3, shortest=5, longest=45, new_tokens=3)


def skip_without_batches() -> None:
    if not hf.layers_gather_keys():
        pytest.skip(f"transformers {transformers.__version__} has no continuous batching that these kernels can serve")


def batches(model: Any, rounds: int) -> dict[str, Any]:
    (point,) = json.loads(json.dumps(models.measure_batches(model, REQUESTS, rounds)))
    return point


@pytest.fixture
def served(monkeypatch) -> list[str]:
    """By which attention a manager served, one after the other."""
    names, serving = [], models.serving

    def counted(model: Any, name: str, *args: Any) -> Any:
        names.append(name)
        return serving(model, name, *args)

    monkeypatch.setattr(models, "serving", counted)
    return names


def test_continuous_batching(model, served, monkeypatch, capsys):
    """The new tokens are those of SDPA, and each round turns the order around."""
    skip_without_batches()
    found, answers = [], models.answers

    def kept(*args: Any) -> list[list[int]]:
        found.append(answers(*args))
        return found[-1]

    monkeypatch.setattr(models, "answers", kept)
    point = batches(model, 2)
    assert not point["refused"]
    assert list(point["results"]) == ["sdpa", "gluon_attn"]
    assert served == ["sdpa", "gluon_attn", "gluon_attn", "sdpa"]
    assert len(found) == 2 * 2 * (1 + models.RUNS)
    assert all(tokens == found[0] for tokens in found)
    assert [len(tokens) for tokens in found[0]] == [3] * 3
    assert point["tokens"] == sum(REQUESTS.lengths()) + 3 * 3
    rounds = point["results"]["gluon_attn"]["ms_of_rounds"]
    assert len(rounds) == 2
    assert all(ms > 0 for ms in rounds)
    models.show({"batches": [point]})
    assert f"| continuous batching: tokens/s | {point['length']} |" in capsys.readouterr().out


def test_continuous_batching_that_fails_is_told(model, served, monkeypatch):
    """Once, with a request's own error; others are timed."""
    skip_without_batches()
    monkeypatch.setattr(hf, "attend_to_pages", lambda *args: 1 / 0)
    point = batches(model, 2)
    assert list(point["results"]) == ["sdpa"]
    assert point["refused"] == {"gluon_attn": "RuntimeError: a request failed: division by zero"}
    assert served == ["sdpa", "gluon_attn", "sdpa"]


def test_continuous_batching_of_an_older_transformers_is_told(model, monkeypatch):
    monkeypatch.setattr(hf, "layers_gather_keys", lambda: False)
    refused = batches(model, 1)["refused"]
    assert list(refused) == ["sdpa", "gluon_attn"]
    assert all("batches: expected transformers 5.24 or newer, got" in why for why in refused.values())


@pytest.mark.parametrize("there", [False, True])
def test_flash_attention_2_is_beside_it_where_its_package_is(there, model, monkeypatch):
    @contextlib.contextmanager
    def serving(model: Any, name: str, *args: Any) -> Any:
        yield lambda: None

    monkeypatch.setattr(models, "is_flash_attn_2_available", lambda: there)
    monkeypatch.setattr(models, "serving", serving)
    assert ("flash_attention_2" in batches(model, 1)["results"]) == there


def test_a_manager_that_ends_by_itself_is_told():
    manager = SimpleNamespace(
        add_requests=lambda prompts: ["a", "b"], get_result=lambda timeout: None, is_running=lambda: False
    )
    with pytest.raises(RuntimeError, match="manager ended with 0 of 2 requests answered"):
        models.answers(manager, [[1], [2]])


def test_prompts_are_of_unlike_lengths_and_the_same_each_time():
    lengths = models.REQUESTS.lengths()
    assert lengths == models.REQUESTS.lengths()
    assert len(lengths) == 64
    assert 100 <= min(lengths) < 200
    assert 1500 < max(lengths) <= 2000
    assert 350 < statistics.median(lengths) < 550


def test_what_fails_is_told_and_the_rest_is_timed(model):
    def run(tokens: Any) -> None:
        if torch.are_deterministic_algorithms_enabled():
            raise torch.OutOfMemoryError("too large")

    point = models.measure(model, run, models.TRAINS, 20, 1)
    assert list(point["results"]) == models.PREFILLS
    assert point["refused"] == {
        name: "OutOfMemoryError: too large" for name in models.TRAINS if "deterministic" in name
    }


def test_losses(ran):
    """From the same start, on the same text."""
    losses = models.measure_losses(TINY, 2, "cpu", runs=2)
    assert list(losses) == [*models.PEERS, *models.JUDGED]
    first, second = losses["sdpa"]
    assert all(run == pytest.approx(first, abs=0.01) for runs in losses.values() for run in runs)
    assert first == second, "the same start"
    assert first[0] != first[1]
    assert ran == [(TINY.length, True, False)] * 4


@pytest.mark.usefixtures("ran")
def test_a_learning_rate_changes_the_losses():
    """But not the first, which is of the weights that both start from."""
    slow, fast = (models.measure_losses(TINY, 2, "cpu", 1, rate)["sdpa, plain torch"][0] for rate in (1e-4, 1e-2))
    assert slow[0] == fast[0]
    assert slow[1] != fast[1]


def test_the_wide_model_has_the_layers_that_are_timed():
    assert replace(models.LEARNS_WIDE, batch=models.SHAPE.batch, length=models.SHAPE.length) == models.SHAPE


def result(rates: dict[str, float], refused: dict[str, str]) -> dict[str, Any]:
    of_each = {"ms": 1.0, "spread": 0.01, "peak_gib": 30.25, "attention_ms": {"attention_forward": 1.0, "other": 2.5}}
    return {"results": {n: {**of_each, "tokens_per_second": rate} for n, rate in rates.items()}, "refused": refused}


POINTS = [
    {"length": 2048, **result({"sdpa": 1000.0, "gluon_attn": 1250.0}, {})},
    {"length": 4096, **result({"sdpa": 500.0}, {"gluon_attn": "OutOfMemoryError: too large"})},
]


def test_tables(capsys):
    models.show({"prefill": POINTS})
    shown = capsys.readouterr().out
    assert "| prefill: tokens/s | 2048 | 4096 |\n| --- | --- | --- |\n| sdpa | 1000 | 500 |" in shown
    for row in (
        "| gluon_attn | 1250 | - |",
        "| gluon_attn | 1.250 | - |",
        "| sdpa | 3.5 | 3.5 |",
        "| sdpa | nan | nan |",
    ):
        assert row in shown
    assert "sdpa: attention_forward, other\n" in shown
    assert "gluon_attn, 4096: OutOfMemoryError: too large\n" in shown


def test_deterministic_is_compared_with_deterministic():
    rates = {"sdpa": 1000.0, "sdpa, deterministic": 500.0, "gluon_attn, deterministic": 750.0}
    assert models.ratio(result(rates, {})["results"], "gluon_attn, deterministic") == 1.5


def test_what_a_ratio_may_be_off_by_is_of_rounds_side_by_side():
    """A drift that both see is none of it, and four times as many rounds halve it."""

    def of(rounds: int, noise: float) -> dict[str, Any]:
        drift = [50.0 + i for i in range(rounds)]
        own = [0.8 * ms * (1 + noise * (-1) ** i) for i, ms in enumerate(drift)]
        return {"sdpa": {"ms_of_rounds": drift}, "gluon_attn": {"ms_of_rounds": own}}

    assert models.off_by(of(8, 0.0), "gluon_attn") == pytest.approx(0, abs=1e-9)
    few, many = (models.off_by(of(rounds, 0.02), "gluon_attn") for rounds in (100, 400))
    assert few == pytest.approx(1.96 * 0.02 / 10, rel=0.02)
    assert many == pytest.approx(few / 2, rel=0.02)
    assert math.isnan(models.off_by(of(4, 0.02), "gluon_attn"))


@pytest.mark.parametrize(("off", "verdict"), [(0.002, "ours is within"), (0.1, "gluon_attn: expected losses within")])
def test_the_verdict_on_losses(off, verdict, capsys):
    run = torch.linspace(5, 1, 2 * WINDOW)
    losses = {name: [(run + 0.001 * i).tolist()] for i, name in enumerate([*models.PEERS, *models.JUDGED])}
    losses["gluon_attn"] = [(run + off).tolist()]
    models.show({"losses": losses})
    assert capsys.readouterr().out.splitlines()[-1].startswith(verdict)


def test_kernels_of_attention_are_told_from_others():
    def event(key: str, device: DeviceType = DeviceType.CUDA) -> Any:
        return SimpleNamespace(key=key, device_type=device, self_device_time_total=1500.0)

    kernels = (
        "attention_forward", "finish_backward", "void pytorch_flash::flash_fwd_kernel<1>", "cudnn_native_sdpa_1",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
    )  # fmt: skip
    others = (event("embedding_backward_kernel"), event("sm90_gemm"), event("aten::attention", DeviceType.CPU))
    assert models.of_attention([*map(event, kernels), *others]) == dict.fromkeys(kernels, 1.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "2048", "3000"], "--lengths: expected divisors of 16384, got 3000"),
        (["--lengths", "0"], "--lengths: expected divisors of 16384, got 0"),
        (["--only", "decode"], "invalid choice: 'decode'"),
    ],
)
def test_arguments(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.models", *arguments])
    with pytest.raises(SystemExit):
        models.main()
    assert message in capsys.readouterr().err


def test_a_result_file_is_shown_and_without_a_card_nothing_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "found.json").write_text(json.dumps({"train": POINTS}), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["bench.models", "--show", str(tmp_path / "found.json")])
    models.main()
    assert "| training step: tokens/s | 2048 | 4096 |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["bench.models"])
    with pytest.raises(SystemExit, match="expected a Hopper card, got none"):
        models.main()


def test_the_parts_that_are_asked_for_are_measured_and_saved(ran, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(models.hf, "register", lambda: None)
    monkeypatch.setattr(models, "provenance", lambda commit: {"commit": commit})
    monkeypatch.setattr(models, "SHAPE", TINY)
    model_of = models.model_of
    monkeypatch.setattr(models, "model_of", lambda shape, dtype, device: model_of(shape, dtype, "cpu"))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    out = tmp_path / "found.json"
    monkeypatch.setattr(
        sys, "argv", f"bench.models --only prefill --lengths 20 --layers 2 --commit abc --out {out}".split()
    )
    models.main()
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["provenance"] == {"commit": "abc", "transformers": transformers.__version__}
    assert found["model"] == asdict(replace(TINY, layers=2))
    assert "train" not in found
    assert len(ran) == 2 * 2
    assert "| prefill: peak memory, GiB | 20 |" in capsys.readouterr().out
