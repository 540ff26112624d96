"""docs/integrations.md: its scripts run as they stand on a card. Elsewhere the same text runs on smaller tensors on the
CPU, and `attention` is told to execute the kernel as on an H200."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

import gluon_attn
from bench.distributed import HEAD, row_of
from bench.switched import ratio
from gluon_attn import flash, reference_attention
from gluon_attn.device import Device
from tests.gluon_attn.ranks import run_ranks
from tests.slow import slow_if

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
*SCRIPTS, RING, FSDP, CONTEXT = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
DDP = FSDP.replace(
    "torch.distributed.fsdp import fully_shard", "torch.nn.parallel import DistributedDataParallel"
).replace("fully_shard(", "DistributedDataParallel(")
CARDS = {"ring_attention": RING, "FSDP2": FSDP, "DDP": DDP, "context_parallel": CONTEXT}
SUPPORTS, SDPA, BY_HAND, FLASH, HUGGING_FACE, BATCHES, COMPILED = SCRIPTS
ATTENTION = [script for script in SCRIPTS if script not in (HUGGING_FACE, BATCHES)]
LONGEST, FEWER = 130, 2


def check(script: str) -> None:
    """Runs it, and holds what it leaves behind against float64."""
    torch.manual_seed(0)  # torch's own gradients, which are these without a card, have been off by 0.06 under another
    names: dict[str, Any] = {}
    exec(script, names)
    layout = "bshd" if script == FLASH else "bhsd"
    q, k, v = (names.get(name, names["q"]).detach().double().cpu().requires_grad_() for name in "qkv")
    want, want_lse = reference_attention(q, k, v, causal=script != BY_HAND, layout=layout)
    assert (names["out"].cpu() - want).abs().max() < 0.03
    if script == FLASH:
        assert (names["lse"].cpu() - want_lse).abs().max() < 1e-3
    if script in (SDPA, COMPILED):
        grads = torch.autograd.grad(want.sum(), (q, k, v))
        for name, grad in zip("qkv", grads, strict=True):
            assert (names[name].grad.cpu() - grad).abs().max() < 0.05
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize("script", [*SCRIPTS, *CARDS.values()])
def test_a_script_has_about_ten_lines(script):
    assert len(script.splitlines()) <= 11


@pytest.mark.parametrize("script", ATTENTION)
def test_scripts_under_the_stand_in(script, monkeypatch, capsys):
    randn = torch.randn

    def smaller(*shape: int, device: str, **options: Any) -> Tensor:
        assert device == "cuda"
        batch, *middle, head_dim = (min(n, LONGEST) if n > 100 else n for n in shape)
        middle = [n // FEWER if n < 100 else n for n in middle]
        return randn(batch, *middle, head_dim, **options)

    monkeypatch.setattr(torch, "randn", smaller)
    for module, name in ((gluon_attn, "attention"), (gluon_attn, "supports"), (flash, "attention")):
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), device=Device.hopper()))
    check(script)
    printed = capsys.readouterr().out
    shown = re.findall(r"print\(.*\)  # (.*?)\.\.\.$", script, re.MULTILINE)
    assert [printed.startswith(line) for line in shown] == ([True] if script == SUPPORTS else [])


@pytest.mark.gpu
@pytest.mark.parametrize("script", ATTENTION)
def test_scripts_on_a_card(script):
    check(script)


def check_hugging_face(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's answers are eager attention's, and ours computed all but the single tokens."""
    from gluon_attn import hf

    made: list[int] = []

    def counted(q: Tensor, *args: Any, **kw: Any) -> Any:
        made.append(q.shape[2])
        return gluon_attn.attention(q, *args, **kw)

    monkeypatch.setattr(hf, "attention", counted)
    names: dict[str, Any] = {}
    exec(HUGGING_FACE, names)
    assert made == [length] * 4
    model, tokens = names["model"], names["tokens"]
    assert names["text"].shape == (1, length + 5)
    got, grads = model(tokens).logits.float(), [p.grad.float() for p in model.parameters()]
    model.set_attn_implementation("eager")
    model.zero_grad()
    want = model(tokens, labels=tokens)
    want.loss.backward()
    assert (got - want.logits).norm() < 0.05 * want.logits.norm()
    for grad, p in zip(grads, model.parameters(), strict=True):
        assert (grad - p.grad).norm() < 0.1 * p.grad.norm()


def test_hugging_face_under_the_stand_in(monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ModuleNotFoundError)
    from gluon_attn import hf

    randint = torch.randint
    monkeypatch.setattr(
        torch, "randint", lambda low, high, shape, device: randint(low, high, (1, min(LONGEST, shape[1])))
    )
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda model: model)
    monkeypatch.setattr(hf, "register", functools.partial(hf.register, Device.hopper()))
    check_hugging_face(LONGEST, monkeypatch)


@pytest.mark.gpu
def test_hugging_face_on_a_card(monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ModuleNotFoundError)
    check_hugging_face(1000, monkeypatch)


def check_batches(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request's tokens are as likely by eager attention as the likeliest, but for rounding errors."""
    from gluon_attn import hf

    made: list[int] = []

    def counted(q: Tensor, *args: Any, **kw: Any) -> Any:
        made.append(len(q))
        return gluon_attn.attention_varlen(q, *args, **kw)

    monkeypatch.setattr(hf, "attention_varlen", counted)
    names: dict[str, Any] = {}
    exec(BATCHES, names)
    model, prompts, answers = names["model"], names["prompts"], list(names["answers"].values())
    assert [len(prompt) for prompt in prompts] == lengths
    assert [answer.error for answer in answers] == [None] * 3
    assert len(made) >= 2 * 5
    model.set_attn_implementation("eager")
    for prompt, answer in zip(prompts, answers, strict=True):
        new = torch.tensor(answer.generated_tokens)
        assert 0 < len(new) <= 5
        with torch.no_grad():
            row = torch.tensor([[*prompt, *answer.generated_tokens]], device=model.device)
            logits = model(row).logits[0, len(prompt) - 1 : -1].float().cpu()
        chosen = logits.gather(1, new[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() < 0.05 * logits.abs().max()


def skip_without_batches() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ModuleNotFoundError)
    from gluon_attn import hf

    if not hf.layers_gather_keys():
        pytest.skip(f"transformers {hf.transformers_version} has no continuous batching that these kernels can serve")


def test_continuous_batching_under_the_stand_in(monkeypatch):
    skip_without_batches()
    import transformers

    from gluon_attn import hf

    randint = torch.randint
    monkeypatch.setattr(
        torch, "randint", lambda low, high, shape, **kw: randint(low, high, (min(LONGEST, shape[0]),), **kw)
    )
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda model: model)
    monkeypatch.setattr(hf, "register", functools.partial(hf.register, Device.hopper()))
    few = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=512)  # not most of the host's memory
    mixin = transformers.generation.ContinuousMixin
    generate = functools.partialmethod(mixin.generate_batch, continuous_batching_config=few)
    monkeypatch.setattr(mixin, "generate_batch", generate)
    check_batches([LONGEST, 7, LONGEST], monkeypatch)


@pytest.mark.gpu
def test_continuous_batching_on_a_card(monkeypatch):
    skip_without_batches()
    check_batches([300, 7, 1000], monkeypatch)


@pytest.mark.parametrize("name", slow_if(lambda name: name != "ring_attention", CARDS))
def test_the_scripts_for_several_cards(name, tmp_path):
    """In two processes, over gloo, on a shorter sequence. On cards: tests/gpu/test_distributed.py."""
    (tmp_path / "script.py").write_text(CARDS[name], encoding="utf-8")
    run_ranks(2, tmp_path, "script")


def rows_of(table: str) -> dict[str, list[float]]:
    """By the first cell, the numbers of the table under that heading."""
    lines = PAGE.partition(f"| {table} |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name: [float(number) for number in numbers] for name, *numbers in cells}


@pytest.fixture
def models() -> ModuleType:
    return pytest.importorskip("bench.models", reason="transformers is not installed", exc_type=ModuleNotFoundError)


def measured(part: str, name: str, value: Callable[[dict[str, Any], str], Any]) -> list[float]:
    """At each length."""
    file = "h200_prefill.json" if part == "prefill" else "h200_models.json"
    found = json.loads((ROOT / "bench/results" / file).read_text(encoding="utf-8"))
    return [float(value(point["results"], name)) for point in found[part]]


def test_the_gains_are_those_of_the_result_file(models):
    """Of the ratios themselves: the bench shows them with three decimals, and what is rounded twice may be off."""
    named = {
        "a training step, SDPA with `enabled()`": ("train", "sdpa, enabled()"),
        "a training step, `gluon_attn` in transformers": ("train", "gluon_attn"),
        "a prefill, SDPA with `enabled()`": ("prefill", "sdpa, enabled()"),
        "a prefill, `gluon_attn` in transformers": ("prefill", "gluon_attn"),
        "a training step, both deterministic, `gluon_attn` in transformers": ("train", "gluon_attn, deterministic"),
    }
    want = {row: [round(x, 2) for x in measured(*of, models.ratio)] for row, of in named.items()}
    assert rows_of("× SDPA") == want


def test_the_speed_of_several_cards_is_that_of_the_result_file():
    found = json.loads((ROOT / "bench/results/h200x2_distributed.json").read_text(encoding="utf-8"))
    columns = [("ring", 32768), ("ring", 131072), ("ulysses", 32768), ("ulysses", 131072)]
    points = {(f"{point['mask']}, {point['pass']}", point["length"]): point for point in found["timed"]}
    tables = re.findall(r"^\| \| ring, 32768 \| .*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    for table, column in zip(tables, (HEAD.index("TFLOP/s per card"), HEAD.index("×")), strict=True):
        for line in table.splitlines():
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows = [row_of(points[name, length], function, found["cards"]) for function, length in columns]
            assert [float(cell) for cell in cells] == pytest.approx([float(row[column]) for row in rows], abs=0.0051)
    rounds = {len(times) for point in found["timed"] for times in point["seconds"].values()}
    assert rounds == {4}
    assert "the median of four rounds" in PAGE
    (hidden,) = re.findall(r"^\| \| ring, 32768, hidden .*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    for line in hidden.splitlines():
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows = [row_of(points[name, length], "ring", found["cards"]) for length in (32768, 131072)]
        assert cells == [cell for row in rows for cell in row[HEAD.index("hidden, %") :]]


def test_the_times_are_those_of_the_result_file(models):
    named = {
        "training, SDPA": ("train", "sdpa"),
        "training, `gluon_attn`": ("train", "gluon_attn"),
        "training, SDPA, deterministic: FlashAttention-2": ("train", "sdpa, deterministic"),
        "training, `gluon_attn`, deterministic": ("train", "gluon_attn, deterministic"),
        "prefill, SDPA": ("prefill", "sdpa"),
        "prefill, `gluon_attn`": ("prefill", "gluon_attn"),
    }
    want = {row: measured(*of, models.COLUMNS["in kernels of attention, ms"]) for row, of in named.items()}
    assert rows_of("milliseconds of a step in them") == want


def test_what_calls_gain_by_the_switch():
    """The page's ranges are those of the result file."""
    found = json.loads((ROOT / "bench/results/h200_switched.json").read_text(encoding="utf-8"))["points"]
    kinds: dict[str, Callable[[dict[str, Any]], bool]] = {
        "head dims 32 to 112, 1024 and 4096 tokens": lambda s: s["set"] == "head dims" and s["head_dim"] < 128,
        "head dim 224": lambda s: s["head_dim"] == 224,
        "D=128, 2 to 1024 queries against 8192 keys": lambda s: (s["set"], s["head_dim"]) == ("few queries", 128),
        "D=64, the same": lambda s: (s["set"], s["head_dim"]) == ("few queries", 64),
        "little work, 128 to 1024 tokens": lambda s: s["set"] == "small",
    }
    for name, is_of in kinds.items():
        cells = []
        for which in ("forward", "backward"):
            ratios = [ratio(point["passes"][which]) for point in found if is_of(point["shape"])]
            cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}")
        assert f"\n| {name} | {' | '.join(cells)} |\n" in PAGE
    in_a_row = [p["in_a_row"] for p in found if "in_a_row" in p and p["shape"]["q_len"] % 128 == 0]
    assert f"| µs of each of {len(in_a_row)} small calls, in a row | torch | with `enabled()` | torch, through" in PAGE
    for which in ("forward", "backward"):
        times = [[point[which][by]["us"] for point in in_a_row] for by in ("torch", "enabled", "handed on")]
        assert f"| {which} pass | {' | '.join(f'{min(of):.0f} to {max(of):.0f}' for of in times)} |\n" in PAGE
    for point in found:
        shape = point["shape"]
        if "in_a_row" in point and shape["q_len"] % 128:  # models of images
            for which in ("forward", "backward"):
                cells = [f"{point['in_a_row'][which][by]['us']:.0f}" for by in ("torch", "enabled", "handed on")]
                row = f"\n| {shape['q_len']} tokens, B={shape['batch']}, {which} | {' | '.join(cells)} |\n"
                assert row in PAGE
    of_160 = [point for point in found if point["shape"]["head_dim"] == 160]
    assert len(of_160) == 4
    assert not any(ours for point in of_160 for ours in point["ours"].values())  # left to torch, as the page says
