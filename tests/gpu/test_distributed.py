"""Attention over all cards of this machine, over NCCL: the cases of tests/gluon_attn/ranks.py, longer, on a card each.

It needs two cards. A rank that hangs is ended with the others.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gluon_attn.testing import check, check_gradients
from tests.docs.test_integrations_page import CARDS
from tests.gluon_attn.ranks import BACKENDS, BY_TORCH, CASES, longer, options_of, run_ranks, whole_tensors
from tests.gluon_attn.test_distributed import check_by_torch, check_packed, check_switched, check_wrapped

ROOT = Path(__file__).parents[2]
RUN = """
import sys
import torch.distributed as dist
from tests.gluon_attn.ranks import check_script
check_script(open(sys.argv[1], encoding="utf-8").read())
print("the same as on one card")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def size() -> int:
    cards = torch.cuda.device_count()
    if cards < 2:
        pytest.skip("needs two cards")
    return cards


@pytest.fixture(scope="module")
def found(size, tmp_path_factory) -> list[dict[str, Any]]:
    return run_ranks(size, tmp_path_factory.mktemp("ranks"), "on_cards")


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, found):
    """The same function of the same whole sequence as one call, in all ranks."""
    case, size = longer(CASES[name]), len(found)
    q, k, v, dout, dlse = (t.cuda() for t in whole_tensors(case, size))
    options = options_of(case)
    for rank, of_rank in enumerate(found):
        assert torch.equal(of_rank[name]["out"], found[0][name]["out"]), f"rank {rank} has gathered something else"
    out, lse, grads = (found[0][name][what] for what in ("out", "lse", "grads"))
    check(q, k, v, out.cuda(), lse.cuda(), what=name, **options)
    if not case.get("dout", True):
        dout = torch.zeros_like(dout)
    grads = [t.cuda() for t in grads]
    check_gradients(q, k, v, dout, grads, dlse=dlse if case.get("dlse") else None, what=name, **options)


def test_packed_sequences(found):
    check_packed(found, 600 * len(found), "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_context_parallel_of_torch(backend, found):
    check_by_torch(found, longer(BY_TORCH), "cuda", backend)


def test_a_model_that_torch_spreads(found):
    check_wrapped(found)


def test_a_model_with_torchs_attention_that_torch_spreads(found):
    check_switched(found)


@pytest.mark.parametrize("by", ["DDP", "context_parallel, FSDP2"])
def test_what_is_not_ours_falls_through(by, found):
    """With equal numbers, but for the order of sums in fp32."""
    for of_rank in found:
        (loss, grads, calls), (loss_on, grads_on, calls_on) = of_rank["falls_through"][by]
        assert calls == calls_on == []
        assert loss_on == pytest.approx(loss, rel=1e-5)
        for grad, of_on in zip(grads, grads_on, strict=True):
            assert grad.norm() > 0
            assert (of_on - grad).norm() < 1e-5 * grad.norm()


@pytest.mark.parametrize("name", CARDS)
def test_the_scripts_of_the_page(name, size, tmp_path):
    """docs/integrations.md, as torchrun starts them."""
    run, script = tmp_path / "run.py", tmp_path / "script.py"
    run.write_text(RUN, encoding="utf-8")
    script.write_text(CARDS[name], encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = [*torchrun, "--nproc-per-node", str(size), str(run), str(script)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            printed, errors = process.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            process.terminate()  # on which torchrun ends its ranks; killed, it would leave them, and what they hold
            printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert printed.count("the same as on one card") == size
