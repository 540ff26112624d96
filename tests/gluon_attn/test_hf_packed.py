"""Packed sequences in models of transformers: `cu_seq_lens_q` with windows, padding, several rows and caches."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers", exc_type=ModuleNotFoundError
)
from gluon_attn import hf  # noqa: E402  # it imports transformers
from tests.gluon_attn.hf_models import by, logits, model_of, tokens  # noqa: E402

STARTS = torch.tensor([0, 10, 24, 32], dtype=torch.int32)
PACKED = {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "max_length_q": 14, "max_length_k": 14}


def each_apart(model: Any, inputs: Tensor) -> Tensor:
    exact = copy.deepcopy(model).float()
    return torch.cat([logits(inputs[:, a:b])(exact)[0] for a, b in ((0, 10), (10, 24), (24, 32))], 1)


@pytest.mark.parametrize("name", ["Mistral", "Gemma 2", "gpt-oss"])
def test_packed_sequences_in_windows(name, ran):
    inputs, model = tokens(32, batch=1), model_of(name)
    want = each_apart(model, inputs)
    got = by(hf.NAME, model, logits(inputs, **PACKED))[0]
    assert (got - want).norm() < 0.05 * want.norm()
    assert ran == [("packed", 32)] * 2


@pytest.mark.parametrize("how", ["ours", "inference mode", "compiled", "starts without a longest"])
def test_packed_sequences_and_padding(how, ran):
    """What a mask hides and what `cu_seq_lens_q` keeps apart, whoever computes it."""
    inputs, model = tokens(36, batch=1), model_of("Llama")
    starts = torch.tensor([0, 10, 24, 32, 36], dtype=torch.int32)
    given = PACKED | {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    if how == "starts without a longest":
        given = {"cu_seq_lens_q": starts}
    mask = torch.ones_like(inputs)
    mask[0, 32:] = 0
    want = each_apart(model, inputs)
    model.set_attn_implementation(hf.NAME)
    run = torch.compile(model, backend="eager") if how == "compiled" else model
    with torch.inference_mode(how == "inference mode"):
        got = logits(inputs, attention_mask=mask, use_cache=False, **given)(run)[0][:, :32]
    assert (got - want).norm() < 0.05 * want.norm()
    assert {who for who, _ in ran} == {"packed" if how in ("ours", "starts without a longest") else "SDPA"}


ROWS = torch.tensor([0, 6, 12], dtype=torch.int32)  # each a sequence of its own
OF_ROWS = {"cu_seq_lens_q": ROWS, "cu_seq_lens_k": ROWS, "max_length_q": 6, "max_length_k": 6}


def static(model: Any) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=32)


def dynamic(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config)


def next_turn(model: Any, cache: Any, **given: Any) -> list[Tensor]:
    with torch.no_grad():
        model(tokens(12)[:, :6], past_key_values=cache, **OF_ROWS)
    return logits(tokens(12)[:, 6:], past_key_values=cache, **given)(model)


def generated(model: Any) -> list[Tensor]:
    told = model.generate(
        tokens(12)[:, :6], max_new_tokens=3, min_new_tokens=3, do_sample=False, return_dict_in_generate=True,
        output_logits=True, **OF_ROWS,
    )  # fmt: skip
    return [torch.stack(told.logits, 1)]


def compiled_with_room(model: Any) -> list[Tensor]:
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    starts = {"cu_seq_lens_k": ROWS.clone()}
    return logits(tokens(12)[:, :6], past_key_values=static(model), **OF_ROWS | starts)(compiled)


LONGER = OF_ROWS | {"cu_seq_lens_k": 2 * ROWS, "max_length_k": 12}
SEVERAL_ROWS: dict[str, tuple[str, Callable[[Any], list[Tensor]]]] = {
    "static cache": ("Llama", lambda model: logits(tokens(12)[:, :6], past_key_values=static(model), **OF_ROWS)(model)),
    "static cache, compiled": ("Llama", compiled_with_room),
    "static cache, next turn": ("Llama", lambda model: next_turn(model, static(model), **LONGER)),
    "window, next turn": ("Mistral", lambda model: next_turn(model, dynamic(model), **LONGER)),
    "window, static cache, next turn": ("Mistral", lambda model: next_turn(model, static(model), **LONGER)),
    "next turn, starts of queries": ("Llama", lambda model: next_turn(model, dynamic(model), cu_seq_lens_q=ROWS)),
    "generate": ("Llama", generated),
    "starts of other tokens, padding": (
        "Llama", lambda model: logits(tokens(12), attention_mask=torch.ones(2, 12).triu(-9), **OF_ROWS)(model),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL_ROWS)
def test_starts_of_several_rows_and_a_cache(name, ran):
    """Where they tell of other tokens than the keys, they are not looked at, as SDPA does not."""
    kind, run = SEVERAL_ROWS[name]
    model = model_of(kind, torch.float32)
    (want,), (got,) = by("sdpa", model, run), by(hf.NAME, model, run)
    assert (got - want).norm() < 1e-4 * want.norm()
