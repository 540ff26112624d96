"""Which way a launch takes: straight to the driver, or by Triton's launcher, which serves hooks and checkers."""

import contextlib
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from gluon_attn.runtime import launcher


def launched(monkeypatch, *, scratch: int = 0, hooks: Sequence[object] = ()) -> list[tuple]:
    """The calls that one launch of 7 programs on device 5, of stream 3, makes: ("direct" or "triton", *arguments)."""
    calls: list[tuple] = []
    utils = SimpleNamespace(launch=lambda *args: calls.append(("direct", *args)))
    active = SimpleNamespace(utils=utils, get_current_stream=lambda device: {5: 3}[device])
    monkeypatch.setattr(launcher, "driver", SimpleNamespace(active=active))
    cuda = SimpleNamespace(device=lambda index: contextlib.nullcontext())
    monkeypatch.setattr(launcher, "torch", SimpleNamespace(cuda=cuda))
    chains = SimpleNamespace(calls=list(hooks)), SimpleNamespace(calls=[])
    runtime = SimpleNamespace(launch_enter_hook=chains[0], launch_exit_hook=chains[1])
    monkeypatch.setattr(launcher, "knobs", SimpleNamespace(runtime=runtime))

    class Triton:
        global_scratch_size, profile_scratch_size, gsan_enabled = scratch, 0, False
        launch_cooperative_grid, launch_pdl, arg_annotations, kernel_signature = False, True, ("types",), b"s"

        def __call__(self, *args):
            calls.append(("triton", *args))

    kernel = SimpleNamespace(
        run=Triton(), function=11, packed_metadata="packed", launch_metadata=lambda grid, stream: ("of", grid, stream)
    )
    launcher.Launcher(kernel, 7, 5)(("a", "b"), launcher.current_stream(5))
    return calls


def test_straight_to_the_driver(monkeypatch):
    nothing = (None,) * 5
    expected = ("direct", 7, 1, 1, 3, 11, False, True, "packed", *nothing, ("types",), b"s", ("a", "b"))
    assert launched(monkeypatch) == [expected]


@pytest.mark.parametrize("kind", [{"scratch": 64}, {"hooks": [print]}], ids=["scratch memory", "a hook"])
def test_by_tritons_launcher(monkeypatch, kind):
    (call,) = launched(monkeypatch, **kind)
    assert call[:5] == ("triton", 7, 1, 1, 3)
    assert call[7] == ("of", (7, 1, 1), 3)  # what hooks are given
    assert call[-2:] == ("a", "b")


def test_every_thread_enters_a_context_once(monkeypatch):
    asked: list[tuple[str, int]] = []

    def mem_get_info(device):
        asked.append((threading.current_thread().name, device))

    capturing = [False, True]
    cuda = SimpleNamespace(mem_get_info=mem_get_info, is_current_stream_capturing=lambda: capturing.pop(0))
    monkeypatch.setattr(launcher, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(launcher, "THREAD", threading.local())

    def enter_twice():
        for device in (5, 2):
            launcher.enter_context(device)

    for name in ("one", "other"):
        thread = threading.Thread(target=enter_twice, name=name)
        thread.start()
        thread.join()
    assert asked == [("one", 5)], "what a capture may not allow is not called in one"
    assert not capturing
