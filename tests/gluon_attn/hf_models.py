"""Small models of transformers, of random weights, on the CPU; what runs them; and what counts who computed what."""

import copy
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from gluon_attn import hf
from gluon_attn.device import Device

HOPPER = Device.hopper()
TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2,  # so that scores are far from equal, and masks show
}  # fmt: skip
WINDOW, NEW_TOKENS = 8, 5
CONFIGS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: transformers.LlamaConfig(**TINY),
    "Qwen 3": lambda: transformers.Qwen3Config(**TINY),
    "Mistral": lambda: transformers.MistralConfig(**TINY, sliding_window=WINDOW),
    "Gemma 2": lambda: transformers.Gemma2Config(
        **TINY, sliding_window=WINDOW, query_pre_attn_scalar=32, attn_logit_softcapping=2.0
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **TINY, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1, rope_parameters=None
    ),
}


def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Who computed attention, and of how many queries, since the list was last cleared."""
    calls: list[tuple[str, int]] = []

    def counted(who: str, attend: Callable[..., Any], q_at: int) -> Callable[..., Any]:
        def run(*args: Any, **kw: Any) -> Any:
            calls.append((who, args[q_at].shape[2]))
            return attend(*args, **kw)

        return run

    attentions: Any = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(attentions, "sdpa", counted("SDPA", attentions["sdpa"], 1))
    for name in (hf.NAME, hf.NAME_IN_BATCHES):  # taken out again afterwards
        monkeypatch.setitem(attentions, name, None)
        monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, name, None)
    monkeypatch.setattr(hf, "attention", counted("ours", hf.attention, 0))
    varlen = hf.attention_varlen

    def packed(q: Tensor, *args: Any, **kw: Any) -> Any:
        calls.append(("packed", len(q)))
        return varlen(q, *args, **kw)

    monkeypatch.setattr(hf, "attention_varlen", packed)
    eager_of = hf.eager_of
    monkeypatch.setattr(hf, "eager_of", lambda *args: counted("eager", eager_of(*args), 1))
    monkeypatch.setattr(hf, "_warned", set())
    hf.register(HOPPER)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="gluon_attn leaves")
        yield calls


def model_of(name: Any, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """By eager attention until told otherwise. name: in CONFIGS, or a config."""
    torch.manual_seed(0)
    config = CONFIGS[name]() if isinstance(name, str) else name
    config.update(changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    model.generation_config.update(
        do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, disable_compile=True
    )
    return model


def tokens(length: int, batch: int = 2) -> Tensor:
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(length))


def by(implementation: str, model: Any, run: Callable[[Any], Any]) -> Any:
    model.set_attn_implementation(implementation)
    return run(model)


def check_near(model: Any, run: Callable[[Any], list[Tensor]], *, by_name: str = hf.NAME) -> None:
    """What the model gives is as near to eager attention in fp32 as eager attention in the model's dtype is."""
    want = run(copy.deepcopy(model).float())
    plain = by("eager", model, run)
    got = by(by_name, model, run)
    for exact, eager, ours in zip(want, plain, got, strict=True):
        budget = (eager - exact).norm()
        assert ours.isfinite().all()
        assert (ours - exact).norm() <= 2 * budget + 1e-6 * exact.norm()


def logits(inputs: Tensor, **options: Any) -> Callable[[Any], list[Tensor]]:
    def run(model: Any) -> list[Tensor]:
        with torch.no_grad():
            return [model(inputs, **options).logits]

    return run


def is_clear(generated: Any) -> bool:
    """Whether the likeliest token is so by more than rounding errors, each time."""
    best = torch.stack(generated.logits).topk(2).values
    return bool((best[..., 0] - best[..., 1]).min() > 0.1)


def attend(
    q: Tensor, k: Tensor, mask: Tensor | None = None, *, is_causal: bool | None = True, **options: Any
) -> Tensor:
    """A layer's call, without a model; v is k. is_causal: what the layer says of itself; None: nothing."""
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False)
    if is_causal is not None:
        module.is_causal = is_causal
    out, weights = transformers.AttentionInterface()[hf.NAME](module, q, k, k, mask, **options)
    assert weights is None
    assert out.is_contiguous()
    return out.transpose(1, 2)


def seen_by(q: Tensor, k: Tensor, sees: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(
        q.double(), k.double(), k.double(), attn_mask=sees, enable_gqa=True, scale=options.get("scaling")
    )


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


Q, K, LATER = randn(2, 2, 24, 64), randn(2, 1, 24, 64), randn(2, 1, 40, 64)
ALL = torch.ones(24, 40, dtype=torch.bool)
