"""The bench of several cards: what it times alone is what is sent; what it shows; a run without cards."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import distributed as bench
from gluon_attn.device import Device
from gluon_attn.distributed import ulysses
from gluon_attn.distributed.ranks import Ranks
from gluon_attn.distributed.ulysses import AllToAll

ROOT = Path(__file__).parents[2]
RANKS = Ranks(group=None, rank=1, size=2)


@pytest.fixture
def sent(monkeypatch) -> list[int]:
    """Bytes of each message, of which none leaves."""
    sizes: list[int] = []

    def pass_on(ranks: Ranks, pairs: list[tuple[Tensor, Tensor]]) -> list[Any]:
        for outgoing, incoming in pairs:
            sizes.append(outgoing.nbytes)
            incoming.copy_(outgoing)
        return []

    def exchange(received: Tensor, t: Tensor, group: Any) -> None:
        sizes.append(t.nbytes)
        received.copy_(t)

    monkeypatch.setattr(Ranks, "pass_on", pass_on)
    monkeypatch.setattr(Ranks, "of", lambda group: RANKS)
    monkeypatch.setattr(ulysses.dist, "all_to_all_single", exchange)
    return sizes


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", bench.FUNCTIONS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_transfers_alone_are_those_of_the_function(size, name, backward, sent, monkeypatch):
    """Of two ranks, the ring's backward pass sends nothing in fp32."""
    ranks = Ranks(group=None, rank=1, size=size)
    monkeypatch.setattr(Ranks, "of", lambda group: ranks)
    tensors = [torch.ones(1, 12, 8, 64, dtype=torch.bfloat16, requires_grad=backward) for _ in range(3)]
    out = bench.FUNCTIONS[name](*tensors, causal=True, device=Device.hopper())
    if backward:
        torch.autograd.grad(out.sum(), tensors)
    by_function = sorted(sent)
    sent.clear()
    q, k, v = (t.detach() for t in tensors)
    bench.TRANSFERS[name](q, k, v, ranks, backward)
    assert sorted(sent) == by_function
    if name == "ring":
        messages = {q.nbytes: 2 * (size - 1) + backward * 2 * size}
        if backward and size > 2:
            messages[2 * q.nbytes] = 2 * (size - 2)
        assert Counter(by_function) == messages
    assert by_function


def test_without_transfers_nothing_is_sent(sent):
    q = torch.ones(2, 4)
    before = (Ranks.pass_on, AllToAll.apply)
    with bench.no_transfers():
        coming = torch.empty_like(q)
        RANKS.pass_on([(q, coming)])
        assert coming.data_ptr() == q.data_ptr()
        assert AllToAll.apply(q, RANKS) is q
    assert (Ranks.pass_on, AllToAll.apply) == before
    assert sent == []


def test_without_a_head_start_none_is_given(monkeypatch):
    given = []
    monkeypatch.setattr(bench.ring, "give_head_start", lambda transfers, outgoing: given.append(len(outgoing)))
    monkeypatch.setattr(Ranks, "of", lambda group: RANKS)
    calls = bench.calls_of(
        [torch.ones(1, 2, 16, 64, dtype=torch.bfloat16) for _ in range(4)],
        causal=True,
        backward=False,
        place=bench.Place(RANKS, torch.device("cpu"), {"device": Device.hopper()}),
    )
    with bench.no_transfers():
        calls[bench.AT_ONCE]()
        assert given == []
        calls["ring with"]()
        assert given == [2, 2]  # K and V, in each step


def test_a_row():
    seconds = {
        "one card": [0.5],
        "ring with": [0.6, 0.6, 0.66],
        "ring without": [0.55, 0.5, 0.56],
        "ring alone": [0.2],
    }
    row = bench.row_of({"flops": 600e12, "seconds": seconds}, "ring", 2)
    assert row == ["500", "600", "0.833", "10.0", "600.00", "550.00", "200.00", "50", "50 to 75"]
    assert len(row) == len(bench.HEAD)


def test_a_row_of_the_head_start():
    seconds = {"ring with": [0.5, 0.9, 0.3, 0.4, 0.2], "ring at once": [1.0, 1.0, 0.5, 0.5, 1.0]}
    assert bench.head_start_row(seconds) == ["400.00", "1000.00", "0.600", "0.350 to 0.850"]


@pytest.mark.slow
def test_a_run_without_cards(tmp_path):
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "bench.distributed"]
    ran = subprocess.run(
        [*command, "--quick", "--out", str(file)], cwd=ROOT, capture_output=True, text=True, timeout=580
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["cards"] == 2
    assert len(found["timed"]) == 4
    assert found["wrong"] == []
    assert {row["function"]: max(row["off"].values()) for row in found["compared"]}["ulysses"] == 0
    assert found["provenance"]["card"] == "none" or torch.cuda.is_available()
    shown = subprocess.run([*command, "--show", str(file)], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert shown.stdout in ran.stdout
    assert "| ring, 2 cards | TFLOP/s per card |" in shown.stdout
    assert "| transfers of the ring, ms |" in shown.stdout
