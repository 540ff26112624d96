"""What is known of a mask that transformers had made here."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers", exc_type=ModuleNotFoundError
)
from gluon_attn import hf_masks  # noqa: E402  # it imports transformers

SDPA_MASK = transformers.AttentionMaskInterface()["sdpa"]
make: Any = functools.partial(hf_masks.mask_of, SDPA_MASK)


def test_mask_that_is_only_causal():
    causal = {
        "batch_size": 1, "q_length": 4, "kv_length": 9, "q_offset": 5, "attention_mask": None,
        "mask_function": hf_masks.causal_mask_function,
    }  # fmt: skip
    assert hf_masks.known_window(make(**causal)) == (None, 0)
    assert hf_masks.known_window(make(**causal).clone()) is None
    written = make(**causal)
    written[..., 3] = False
    assert hf_masks.known_window(written) is None
    with torch.inference_mode():  # where nobody counts what is written
        assert hf_masks.known_window(make(**causal)) is None
    padding = torch.ones(1, 9, dtype=torch.bool)
    assert hf_masks.known_window(make(**causal | {"attention_mask": padding})) == (None, 0)
    padding[0, 0] = False
    for other in (
        {"attention_mask": padding},
        {"mask_function": lambda *at: hf_masks.causal_mask_function(*at)},
        {"mask_function": hf_masks.sliding_window_causal_mask_function(4), "local_size": 5},
        {"mask_function": hf_masks.sliding_window_causal_mask_function(4)},
        {"allow_is_causal_skip": False},  # as for packed sequences
        {"q_offset": 4},
        {"q_offset": torch.tensor(5)},
    ):
        assert hf_masks.known_window(make(**causal | other)) is None


def test_mask_that_is_a_sliding_window():
    window: dict[str, Any] = {
        "batch_size": 1, "q_length": 4, "kv_length": 9, "q_offset": 5, "attention_mask": None, "local_size": 4,
        "mask_function": hf_masks.sliding_window_causal_mask_function(4),
    }  # fmt: skip
    mask = make(**window)
    assert hf_masks.known_window(mask) == (3, 0)
    assert torch.equal(mask, torch.ones(1, 1, 4, 9).tril(5).triu(2).bool())
    assert hf_masks.known_window(make(**window | {"attention_mask": torch.arange(9)[None] > 0})) is None


def test_empty_static_cache():
    """SDPA makes no mask for it, and aligns None to the top left; a model may drop queries after that."""
    options = {"batch_size": 1, "q_length": 4, "kv_length": 9, "q_offset": 0, "attention_mask": None}
    assert SDPA_MASK(**options) is None
    mask = make(**options)
    assert torch.equal(mask, torch.ones(1, 1, 4, 9).tril().bool())
    assert hf_masks.known_window(mask) is None


SEEN = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()


def changed(**places: bool) -> Tensor:
    mask = SEEN.clone()
    for place, value in places.items():
        _, batch, row, column = place.split("_")
        mask[int(batch), 0, int(row), int(column)] = value
    return mask


@pytest.mark.parametrize("how", ["captured", "traced", "fake", "compiled"])
def test_what_a_mask_holds_is_not_asked_while_a_graph_is_made(how, monkeypatch):
    """It would be asked of the host, which breaks a capture; or there is nothing to ask."""
    options: dict[str, Any] = {
        "q_length": 6, "kv_length": 6, "q_offset": 0, "attention_mask": torch.ones(2, 6, dtype=torch.bool),
        "mask_function": hf_masks.causal_mask_function,
    }  # fmt: skip

    def known(mask: Tensor, options: dict[str, Any]) -> bool:
        found = hf_masks.noted(lambda **_: mask, options)
        assert found is mask
        return any(hasattr(found, name) for name in (hf_masks.KNOWN, hf_masks.KNOWN_SEQUENCES))

    assert known(SEEN.clone(), options)
    if how == "captured":
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    elif how == "traced":
        monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    elif how == "compiled":
        monkeypatch.setattr(hf_masks, "is_compiling", lambda: True)
    else:
        with FakeTensorMode() as mode:
            options["attention_mask"] = mode.from_tensor(options["attention_mask"])
            assert not known(mode.from_tensor(SEEN), options)
        return
    assert not known(SEEN.clone(), options)
    assert not known(SEEN.clone(), options | {"attention_mask": None})


def test_sequences_that_a_mask_is_made_of():
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0] * 6])
    found = hf_masks.sequences_of(SEEN & (ids[:, None, :, None] == ids[:, None, None, :]), None)
    assert found is not None
    assert found.starts_q.tolist() == found.starts_k.tolist() == [0, 2, 5, 6, 12]
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    found = hf_masks.sequences_of(SEEN & padding.bool()[:, None, None], padding)
    assert found is not None
    assert found.starts_q.tolist() == [0, 2, 6, 9, 12]
    holes = torch.tensor([[1, 0, 1, 1, 1, 1], [1] * 6])  # the last ones see the first one beyond the hole
    for other in (changed(_0_1_2=True), changed(_1_4_3=False), SEEN.float(), SEEN.tril(-1), SEEN.triu(-2)):
        assert hf_masks.sequences_of(other, None) is None
    assert hf_masks.sequences_of(SEEN & holes.bool()[:, None, None], holes) is None


def test_sequences_with_a_window():
    windowed = SEEN & ~SEEN.tril(-3)  # three keys each, its own among them
    padding = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    seen = windowed & padding.bool()[:, None, None]
    found = hf_masks.sequences_of(seen, padding, 3)
    assert found is not None
    assert found.window == (2, 0)
    assert found.starts_q.tolist() == [0, 1, 6, 11, 12]
    for size in (2, 4, None):
        assert hf_masks.sequences_of(seen, padding, size) is None
    assert hf_masks.sequences_of(changed(_0_3_0=False), None, 3) is None
    within = hf_masks.sequences_of(SEEN, None, 6)  # it hides no key
    assert within is not None
    assert within.window == (None, None)
    alone = hf_masks.sequences_of(SEEN & ~SEEN.tril(-1), None, 1)  # each query sees itself
    assert alone is not None
    assert alone.starts_q.tolist() == list(range(13))


def test_chunks_are_sequences():
    chunks = {
        "batch_size": 1, "q_length": 6, "kv_length": 6, "q_offset": 0, "attention_mask": None, "local_size": 4,
        "mask_function": lambda b, h, q, k: (q >= k) & (q // 4 == k // 4), "allow_is_causal_skip": False,
    }  # fmt: skip
    for options in (chunks, chunks | {"allow_is_causal_skip": True}):
        version, sequences = getattr(make(**options), hf_masks.KNOWN_SEQUENCES)
        assert version == 0
        assert sequences.starts_q.tolist() == [0, 4, 6]
        assert sequences.window == (None, None)
