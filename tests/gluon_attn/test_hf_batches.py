"""Continuous batching of transformers by our kernels, on the CPU, where they run on gluon_cpu."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.slow import slow_if

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers", exc_type=ModuleNotFoundError
)
from gluon_attn import hf  # noqa: E402  # it imports transformers
from tests.gluon_attn.hf_models import (  # noqa: E402
    ALL,
    CONFIGS,
    LATER,
    NEW_TOKENS,
    TINY,
    Q,
    attend,
    by,
    is_clear,
    logits,
    model_of,
    seen_by,
    tokens,
)


def batch_of(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 64, (n,), generator=made).tolist() for n in lengths]


def in_batches(model: Any, prompts: list[list[int]], **changes: Any) -> list[Any]:
    """Pages of 16 keys, so that requests have several; 32 tokens at once, so that the longest prompt is cut and goes
    along with single tokens of the others. One error would fail every request."""
    pages = transformers.ContinuousBatchingConfig(num_blocks=16, page_size=16, max_batch_tokens=32)
    settings = copy.deepcopy(model.generation_config)
    settings.update(eos_token_id=-1, **changes)
    done = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=pages)
    assert [request.error for request in done.values()] == [None] * len(prompts)
    return list(done.values())


@pytest.mark.parametrize("name", slow_if(lambda name: name == "Qwen 3", CONFIGS))
def test_continuous_batching(name, ran):
    """Each request's tokens are those of `generate` with its prompt alone, by the model's eager attention."""
    model = model_of(name, torch.float16)

    def alone(prompt: list[int]) -> Any:
        return model.generate(
            torch.tensor([prompt]), return_dict_in_generate=True, output_logits=True, eos_token_id=None
        )

    prompts = [
        next(p for seed in range(40) if is_clear(alone(p := batch_of((length,), seed)[0]))) for length in (20, 3, 45)
    ]
    want = [alone(prompt).sequences[0, len(prompt) :].tolist() for prompt in prompts]
    model.set_attn_implementation(hf.NAME)
    ran.clear()
    with hf.continuous_batching(model):
        got = in_batches(model, prompts)
    assert [request.generated_tokens for request in got] == want
    assert {who for who, _ in ran} == {"packed"}
    assert {n for _, n in ran} >= {3, 32}  # three requests with one new token each, and a full batch
    assert model.config._attn_implementation == hf.NAME


@pytest.mark.parametrize("name", ["Mistral"])
def test_probabilities_of_continuous_batching(name, ran):
    """As those of transformers' own attention to pages."""
    model, prompts = model_of(name, torch.float16), batch_of((20, 3, 45), 0)

    def run() -> list[Any]:
        pages = transformers.ContinuousBatchingConfig(
            num_blocks=16, page_size=16, max_batch_tokens=32, return_logprobs=True
        )
        return list(model.generate_batch(prompts, continuous_batching_config=pages).values())

    model.set_attn_implementation("paged|eager")
    want = run()
    model.set_attn_implementation(hf.NAME)
    with hf.continuous_batching(model):
        got = run()
    for ours, plain in zip(got, want, strict=True):
        assert ours.generated_tokens == plain.generated_tokens
        assert torch.tensor(ours.logprobs) == pytest.approx(torch.tensor(plain.logprobs), abs=0.02)


def test_a_model_with_continuous_batching_generates_as_before(ran):
    model = model_of("Mistral")
    padding = torch.ones(2, 20, dtype=torch.long)
    padding[0, :5] = 0
    want = by(hf.NAME, model, logits(tokens(20), attention_mask=padding))[0]
    before = list(ran)
    ran.clear()
    with hf.continuous_batching(model), hf.continuous_batching(model):
        assert "flash" in model.config._attn_implementation
        got = logits(tokens(20), attention_mask=padding)(model)[0]
    assert torch.equal(got, want)
    assert ran == before
    assert model.config._attn_implementation == hf.NAME


def test_what_a_layer_may_not_ask_for_is_an_error_in_each_answer(ran, monkeypatch):
    """And the name is restored."""
    model = model_by_ours("Llama")
    layer = type(model.model.layers[0].self_attn)
    forward = layer.forward
    monkeypatch.setattr(
        layer, "forward", lambda self, *args, **kw: forward(self, *args, **kw, position_bias=torch.zeros(1))
    )
    pages = transformers.ContinuousBatchingConfig(num_blocks=16, page_size=16, max_batch_tokens=32)
    with hf.continuous_batching(model):
        done = model.generate_batch(batch_of((5, 9), 0), continuous_batching_config=pages)
    assert [request.error.split(":")[0] for request in done.values()] == ["position_bias"] * 2
    assert name_of(model) == hf.NAME
    assert ran == []


def test_a_manager_made_within_is_used_afterwards(ran):
    """Its requests come when the name is back, and the answers are those of within."""
    model, prompts = model_by_ours("Mistral"), batch_of((20, 3), 0)
    with hf.continuous_batching(model):
        want = [request.generated_tokens for request in in_batches(model, prompts)]
    ran.clear()
    pages = transformers.ContinuousBatchingConfig(num_blocks=16, page_size=16, max_batch_tokens=32)
    with hf.continuous_batching(model):
        manager = model.init_continuous_batching(continuous_batching_config=pages)
    assert name_of(model) == hf.NAME
    manager.start()
    try:
        ids = [manager.add_request(prompt, max_new_tokens=NEW_TOKENS, eos_token_id=-1) for prompt in prompts]
        done = {answer.request_id: answer for answer in (manager.get_result(timeout=60) for _ in ids)}
    finally:
        manager.stop(block=True)
    assert [done[at].error for at in ids] == [None, None]
    assert [done[at].generated_tokens for at in ids] == want
    assert {who for who, _ in ran} == {"packed"}


def name_of(model: Any) -> str:
    """In its config, by which transformers chooses attention and masks."""
    return model.config._attn_implementation


@pytest.mark.parametrize("first", [0, 1])
def test_continuous_batching_entered_twice(first, ran):
    """The name is back when the last is left, whichever that is."""
    model = model_by_ours("Llama")
    entered = [hf.continuous_batching(model) for _ in range(2)]
    for within in entered:
        within.__enter__()
    entered[first].__exit__(None, None, None)
    assert name_of(model) == hf.NAME_IN_BATCHES
    assert [r.error for r in in_batches(model, batch_of((5,), 0))] == [None]
    entered[1 - first].__exit__(None, None, None)
    assert name_of(model) == hf.NAME
    assert not hf._entered


def test_continuous_batching_left_by_an_exception(ran):
    model = model_by_ours("Llama")
    with hf.continuous_batching(model):
        with pytest.raises(ZeroDivisionError), hf.continuous_batching(model):
            raise ZeroDivisionError
        assert name_of(model) == hf.NAME_IN_BATCHES
    with pytest.raises(ZeroDivisionError), hf.continuous_batching(model):
        raise ZeroDivisionError
    assert name_of(model) == hf.NAME
    assert not hf._entered


def test_another_implementation_that_is_set_within_stays(ran):
    model = model_by_ours("Llama")
    with hf.continuous_batching(model):
        model.set_attn_implementation("eager")
    assert name_of(model) == "eager"


def test_a_copy_made_within_takes_its_name_by_hand(ran):
    model = model_by_ours("Llama")
    with hf.continuous_batching(model):
        copied = copy.deepcopy(model)
    assert name_of(copied) == hf.NAME_IN_BATCHES
    copied.set_attn_implementation(hf.NAME)
    assert name_of(copied) == hf.NAME


OF_BATCHES: dict[str, Any] = {
    "cu_seq_lens_q": torch.tensor([0, 5, 6, 6, 6], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, 9, 29, 29, 29], dtype=torch.int32),
    "max_length_q": 24, "max_length_k": 1024,
    "write_index": torch.zeros(24, dtype=torch.long), "read_index": torch.zeros(40, dtype=torch.long),
    "logits_indices": torch.zeros(4, dtype=torch.int32), "logits_processor_args": torch.zeros(0, 4),
}  # fmt: skip


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("requests", [1, 2])
def test_padding_of_continuous_batching(requests, window, ran):
    """What a CUDA graph pads: requests without tokens, rows after the last request, and lengths that are too long."""
    k = LATER[:1].clone()
    options = dict(OF_BATCHES, sliding_window=window, is_causal=True)
    if requests == 1:  # and no empty ones, as with room for one request
        options["cu_seq_lens_q"], options["cu_seq_lens_k"] = (
            options[name][:2].clone() for name in ("cu_seq_lens_q", "cu_seq_lens_k")
        )
    rows, keys = int(options["cu_seq_lens_q"][-1]), int(options["cu_seq_lens_k"][-1])
    k[:, :, keys:] = torch.nan
    out = attend(Q[:1], k, **options)
    assert out.shape == (1, 2, 24, 64)
    sees = torch.zeros(rows, keys, dtype=torch.bool)
    sees[:5, :9] = ALL[:5, :9].tril(4)
    sees[5:, 9:] = True
    if window is not None:
        sees[:5, :9] &= ALL[:5, :9].triu(4 - window + 1)
        sees[5:, 9:-window] = False
    want = seen_by(Q[:1, :, :rows], k[:, :, :keys], sees)
    assert (out[:, :, :rows] - want).abs().max() < 0.03
    assert ran == [("packed", 24)]


REFUSED_IN_BATCHES: dict[str, dict[str, Any]] = {
    "attention_mask": {"mask": torch.ones(1, 1, 24, 40, dtype=torch.bool)},
    "dropout": {"dropout": 0.1},
    "block_table": {"block_table": torch.zeros(2, 2, dtype=torch.int32)},
    "position_bias": {"position_bias": torch.zeros(1)},
    "sliding_window": {"sliding_window": 6, "is_causal": False},
    "cu_seq_lens_k": {"cu_seq_lens_k": {"full_attention": torch.zeros(2, dtype=torch.int32)}},
}


@pytest.mark.parametrize("name", REFUSED_IN_BATCHES)
def test_refused_with_continuous_batching(name, ran):
    with pytest.raises(NotImplementedError, match=f"^{name}: .*continuous batching"):
        attend(Q[:1], LATER[:1], **{**OF_BATCHES, **REFUSED_IN_BATCHES[name]})
    assert ran == []


def test_refused_with_continuous_batching_by_supports(ran):
    """What `supports` refuses goes to nobody else, as others would leave the requests' masks out."""
    with pytest.raises(NotImplementedError, match=r"^q: .*float32.*continuous batching; .*\(\"sdpa\"\)$"):
        attend(Q[:1].float(), LATER[:1].float(), **OF_BATCHES)
    assert ran == []


def model_by_ours(name: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    model = model_of(name, dtype)
    model.set_attn_implementation(hf.NAME)
    return model


def check_refused(model: Any, error: type[Exception], message: str) -> None:
    before = model.config._attn_implementation
    with pytest.raises(error, match=message), hf.continuous_batching(model):
        pass
    assert model.config._attn_implementation == before


def test_models_refused_with_continuous_batching(ran, monkeypatch):
    check_refused(model_of("Llama"), ValueError, r"^model: expected .*, got 'eager'; call gluon_attn.hf.register\(\)")
    check_refused(model_by_ours("Llama", torch.float32), NotImplementedError, r"^q: .*float32.*\(\"sdpa\"\)")
    model = model_by_ours("Llama")
    monkeypatch.setattr(type(model), "_supports_flash_attn", False)
    check_refused(model, NotImplementedError, r"^model: expected .* no mask tensor, got LlamaForCausalLM.*\(\"sdpa\"\)")


# Configs that do not give one number for all layers, in transformers' own way and in those of custom models.
UNSAID: dict[str, Callable[[], Any]] = {
    "head dim": lambda: transformers.Gemma4TextConfig(
        **TINY, global_head_dim=64, layer_types=["sliding_attention", "full_attention"]
    ),
    "list of KV heads": lambda: SimpleNamespace(num_attention_heads=2, num_key_value_heads=[1, 2], head_dim=32),
    "list of heads": lambda: SimpleNamespace(num_attention_heads=[2, 4], hidden_size=64),
    "other names": lambda: SimpleNamespace(n_head=2, n_embd=64),
}


@pytest.mark.parametrize("unsaid", UNSAID)
def test_a_config_that_does_not_say_it_is_left_to_the_layers(unsaid, ran, monkeypatch):
    """In fp32, which is refused if the config says the numbers."""
    model, config = model_by_ours("Llama", torch.float32), UNSAID[unsaid]()
    assert hf.supports_heads_of(model) is not None
    monkeypatch.setattr(type(model.config), "get_text_config", lambda self: config)
    assert hf.supports_heads_of(model) is None


def test_prefix_lm_is_refused_for_continuous_batching(ran):
    """Transformers refuses a name with "flash" in it, too, but not set so."""
    config = transformers.HrmTextConfig(**TINY, num_layers_per_stack=1, prefix_lm=True)
    check_refused(model_by_ours(config), NotImplementedError, r"^prefix_lm: .*, got HrmText.*\(\"sdpa\"\)")


def test_older_transformers_are_refused_for_continuous_batching(ran, monkeypatch):
    monkeypatch.setattr(hf, "transformers_version", "5.23.0")
    check_refused(model_by_ours("Llama"), NotImplementedError, r"expected transformers 5\.24 or newer.*, got 5\.23\.0")


def test_a_cache_of_pages_that_hands_over_no_lengths_is_refused(ran, monkeypatch):
    from transformers.generation.continuous_batching import PagedAttentionCache

    monkeypatch.setattr(PagedAttentionCache, "update", lambda self, key, value, layer_idx: (key, value))
    check_refused(model_by_ours("Llama"), NotImplementedError, r"^continuous_batching: expected transformers 5\.24")


def test_continuous_batching_without_being_asked_is_refused(ran):
    """By transformers, which takes no attention whose name it does not know."""
    model = model_by_ours("Llama")
    with pytest.raises(ValueError, match=r"gluon_attn\W* is not supported"):
        model.generate_batch([[5, 6, 7]], progress_bar=False)
