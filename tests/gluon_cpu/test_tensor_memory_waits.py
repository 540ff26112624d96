"""Why the machine takes loads and stores of tensor memory as done at once: the compiler waits for them in time.

tcgen05.ld and tcgen05.st are asynchronous: a tcgen05.wait must come before anybody is told that they are over. The pass
that puts it there runs in lowered mode as it does for a card; these tests read what it made.
"""

import re
import sys
import unittest.mock

import pytest

import gluon_cpu
from gluon_cpu.compat import GluonASTSource
from gluon_cpu.front import build_text
from tests.compat import TensorMemoryLayout, allocate_tensor_memory, gl, jit, mbarrier, tcgen05_commit
from tests.gluon_cpu.support import new_barrier, poisoned, store_matrix
from tests.gluon_cpu.test_findings_blackwell import launch as launch_attention

# What tells others, or lets the tensor core go on.
SIGNALS = ("arrive_barrier", "tc_gen5_mma", "tc_gen5_commit", "cluster_barrier", "barrier_expect")
WATCHED = re.compile(rf"ttng\.(tmem_load|tmem_store|tmem_wait (?:load|store)|{'|'.join(SIGNALS)})\b")


def lowered_text(run) -> str:
    """What the compiler makes of the kernel that `run` launches."""
    launch_module, texts = sys.modules["gluon_cpu.launch"], []
    compile_source = launch_module.compile_source

    def record(kernel, signature, constants, attrs, options, arch, mode):
        texts.append(build_text(GluonASTSource(kernel, signature, constants, attrs), arch, options, True))
        return compile_source(kernel, signature, constants, attrs, options, arch, mode)

    with unittest.mock.patch.object(launch_module, "compile_source", record):
        run()
    return texts[0]


def signals_without_a_wait(text: str) -> tuple[int, list[str]]:
    """(signals seen, those between an access to tensor memory and the wait for it)."""
    pending: set[str] = set()
    signals, wrong = 0, []
    for line in text.splitlines():
        found = WATCHED.search(line)
        if not found:
            continue
        name = found[1]
        if name.startswith("tmem_wait"):
            pending.discard(name.split()[1])
        elif name in ("tmem_load", "tmem_store"):
            pending.add(name.removeprefix("tmem_"))
        else:
            signals += 1
            if pending:
                wrong.append(line)
    return signals, wrong


@jit
def signals_at_once(out_ptr, n, HOW: gl.constexpr):
    """Nothing but a signal between an access to tensor memory and the use of what was loaded."""
    tile = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout((128, 64), col_stride=1))
    other = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout((128, 64), col_stride=1))
    bar, last = new_barrier(1), new_barrier(1)
    gl.barrier()
    tile.store(gl.zeros([128, 64], gl.float32, tile.get_reg_layout()))
    if HOW == "arrive":
        value = tile.load()
        mbarrier.arrive(bar)
    elif HOW == "commit":
        value = tile.load()
        tcgen05_commit(bar)
        mbarrier.wait(bar, 0)
    elif HOW == "loop":
        value = tile.load()
        for i in range(n):
            mbarrier.arrive(bar)
            mbarrier.wait(bar, i & 1)
            value = tile.load()
        mbarrier.arrive(last)
    elif HOW == "condition":
        value = tile.load()
        if n > 1:
            mbarrier.arrive(bar)
    else:
        value = tile.load()
        other.store(value + 1.0)
        mbarrier.arrive(bar)
        value = other.load()
    store_matrix(out_ptr, value)


@pytest.mark.parametrize("how", ["arrive", "commit", "loop", "condition", "store"])
def test_the_compiler_waits_before_it_signals(how):
    def run() -> None:
        gluon_cpu.launch(signals_at_once, (1,), poisoned(128, 64), 3, HOW=how, mode="lowered", target="sm_100a")

    signals, wrong = signals_without_a_wait(lowered_text(run))
    assert signals >= 1
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("num_ctas", [1, 2, 4])
def test_the_compiler_waits_in_attention(num_ctas):
    text = lowered_text(lambda: launch_attention(num_ctas, mode="lowered"))
    signals, wrong = signals_without_a_wait(text)
    assert signals >= 6
    assert not wrong
    stripped = re.sub(r".*ttng\.tmem_wait.*\n", "", text)
    assert signals_without_a_wait(stripped)[1], "this test would not see a missing wait"
