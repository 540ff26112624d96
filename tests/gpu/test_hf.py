"""A Llama of random weights by our kernels and by SDPA, on the card; each case in a process of its own, as what is
registered is so for a whole process."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gluon_attn.apart import Apart, Skipped
from tests.gpu.checks import outcomes_of, settle

pytestmark = pytest.mark.timeout(1800)

transformers = pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ModuleNotFoundError)
if not hasattr(transformers, "AttentionMaskInterface"):
    pytest.skip(f"transformers {transformers.__version__} has no AttentionMaskInterface", allow_module_level=True)
from gluon_attn import hf  # noqa: E402  # it imports transformers

DEVICE = torch.device("cuda")
LENGTH = 1000
DEVICE_TO_CHOOSE_FOR = None


def model_of(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, initializer_range=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **changes,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.to(DEVICE, torch.bfloat16).eval()


def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 512, (2, LENGTH), device=DEVICE)


def with_ours(model: Any, run: Callable[[Any], Any], calls: list[int]) -> Any:
    """Ours must be called so often as `calls` says, with so many queries each time."""
    made: list[int] = []

    def counted(q: Tensor, *args: Any, **kw: Any) -> Any:
        made.append(q.shape[2])
        return attention(q, *args, **kw)

    attention = hf.attention
    hf.register(DEVICE_TO_CHOOSE_FOR)
    model.set_attn_implementation(hf.NAME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "attention", counted)
        got = run(model)
    assert made == calls
    return got


def check_near(model: Any, run: Callable[[Any], list[Tensor]], calls: list[int]) -> None:
    """As near to fp32 as SDPA in bf16 is, twice over."""
    want, plain = run(copy.deepcopy(model).float()), run(model)
    got = with_ours(model, run, calls)
    for exact, sdpa, ours in zip(want, plain, got, strict=True):
        assert ours.isfinite().all()
        assert (ours - exact).norm() <= 2 * (sdpa - exact).norm() + 1e-6 * exact.norm()


def check_prefill() -> None:
    def run(model: Any) -> list[Tensor]:
        with torch.no_grad():
            return [model(tokens()).logits]

    check_near(model_of(), run, [LENGTH] * 2)


def check_training_step() -> None:
    def run(model: Any) -> list[Tensor]:
        model.train()
        loss = model(tokens(), labels=tokens(), use_cache=False).loss
        return list(torch.autograd.grad(loss, list(model.parameters())))

    check_near(model_of(), run, [LENGTH] * 2)


def check_more_tokens_at_once() -> None:
    def run(model: Any) -> list[Tensor]:
        with torch.no_grad():
            cache = model(tokens()[:, :-100], use_cache=True).past_key_values
            return [model(tokens()[:, -100:], past_key_values=cache).logits]

    check_near(model_of(), run, [LENGTH - 100] * 2 + [100] * 2)


def check_padding() -> None:
    mask = torch.ones_like(tokens())
    mask[0, :300] = 0

    def run(model: Any) -> list[Tensor]:
        with torch.no_grad():
            return [model(tokens(), attention_mask=mask).logits[mask.bool()]]

    check_near(model_of(), run, [])


def captured(model: Any, attention_mask: Tensor) -> Callable[[], Tensor]:
    """What replays a CUDA graph of the model. A call before it compiles what there is to compile."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        model(tokens(), attention_mask=attention_mask, use_cache=False)
    torch.cuda.current_stream().wait_stream(stream)
    graph, ids = torch.cuda.CUDAGraph(), tokens()
    with torch.no_grad(), torch.cuda.graph(graph):
        logits = model(ids, attention_mask=attention_mask, use_cache=False).logits

    def replay() -> Tensor:
        assert ids.shape == (2, LENGTH)  # which the graph reads, so they must live as long
        graph.replay()
        return logits.clone()

    return replay


def check_padding_in_a_graph() -> None:
    """What the mask holds while the graph is captured must not stay in it. So the padding changes between replays."""
    paddings = (300, 0), (0, 450)
    mask = torch.ones_like(tokens())

    def pad(lengths: tuple[int, int]) -> None:
        mask.fill_(1)
        for row, length in enumerate(lengths):
            mask[row, :length] = 0

    def run_in_graph(model: Any) -> list[Tensor]:
        pad(paddings[0])
        replay, made = captured(model, mask), []
        for lengths in paddings:
            pad(lengths)
            made.append(replay()[mask.bool()])
        return made

    def run(model: Any) -> list[Tensor]:
        made = []
        with torch.no_grad():
            for lengths in paddings:
                pad(lengths)
                made.append(model(tokens(), attention_mask=mask, use_cache=False).logits[mask.bool()])
        return made

    model = model_of()
    want, plain = run(copy.deepcopy(model).float()), run(model)
    try:
        run_in_graph(model)
    except RuntimeError as e:  # versions of transformers whose own masks read what padding holds
        if "captur" not in str(e):
            raise
        raise Skipped(f"transformers {transformers.__version__} with SDPA: {e}") from None
    got = with_ours(model, run_in_graph, [])
    for exact, sdpa, ours in zip(want, plain, got, strict=True):
        assert (ours - exact).norm() <= 2 * (sdpa - exact).norm() + 1e-6 * exact.norm()


def check_generation() -> None:
    """The same tokens, up to the first two that are as likely."""
    model = model_of()

    def run(model: Any) -> Any:
        return model.generate(
            tokens(), max_new_tokens=16, min_new_tokens=16, do_sample=False, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip

    want = run(model)
    got = with_ours(model, run, [LENGTH] * 2)
    for row in range(2):
        for step, logits in enumerate(want.logits):
            at = LENGTH + step
            best = logits[row].topk(2)
            if want.sequences[row, at] != got.sequences[row, at]:
                assert step > 0 or best.indices[1] == got.sequences[row, at]
                assert best.values[0] - best.values[1] < 0.02 * logits[row].abs().max()
                break


def check_continuous_batching() -> None:
    """Twice as many requests as there is room for, each with the tokens of `generate` for its prompt alone, up to the
    first two that are as likely. On a card transformers takes CUDA graphs, and pads batches for them."""
    if not hf.layers_gather_keys():
        raise Skipped(
            f"transformers {transformers.__version__} has no continuous batching that these kernels can serve"
        )
    model, made = model_of(), []
    rows = [tokens()[i % 2, : LENGTH - 60 * i].tolist() for i in range(8)]
    want = [
        model.generate(
            torch.tensor([row], device=DEVICE), max_new_tokens=16, min_new_tokens=16, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )
        for row in rows
    ]  # fmt: skip
    settings = transformers.GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = transformers.ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=1024, max_requests_per_batch=4)

    def counted(q: Tensor, *args: Any, **kw: Any) -> Any:
        made.append(len(q))
        return attention(q, *args, **kw)

    attention = hf.attention_varlen
    hf.register(DEVICE_TO_CHOOSE_FOR)
    model.set_attn_implementation(hf.NAME)
    with pytest.MonkeyPatch.context() as patch, hf.continuous_batching(model):
        patch.setattr(hf, "attention_varlen", counted)
        done = model.generate_batch(rows, generation_config=settings, continuous_batching_config=pages)
    assert [request.error for request in done.values()] == [None] * len(rows)
    assert made
    for alone, request in zip(want, done.values(), strict=True):
        got, sequence = request.generated_tokens, alone.sequences[0, -16:].tolist()
        assert len(got) == 16
        for step, logits in enumerate(alone.logits):
            if got[step] != sequence[step]:
                best = logits[0].topk(2)
                assert best.indices[1] == got[step]
                assert best.values[0] - best.values[1] < 0.02 * logits[0].abs().max()
                break


CASES: dict[str, Callable[[], None]] = {
    "prefill": check_prefill,
    "training step": check_training_step,
    "more tokens at once": check_more_tokens_at_once,
    "padding": check_padding,
    "padding in a graph": check_padding_in_a_graph,
    "generation": check_generation,
    "continuous batching": check_continuous_batching,
}


def run(name: str) -> None:
    CASES[name]()


APART = Apart(function="tests.gpu.test_hf:run", processes=4)


@pytest.fixture(scope="module")
def outcome(request):
    yield from outcomes_of(APART, request)


@pytest.mark.parametrize("name", CASES)
def test_llama(name, outcome):
    settle(outcome(name))
