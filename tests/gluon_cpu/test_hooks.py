"""What a kernel prints, and where it stops."""

import sys
from pathlib import Path

import torch

import gluon_cpu
from tests.compat import gl, jit
from tests.gluon_cpu.layouts import ROW
from tests.gluon_cpu.support import poisoned


@jit
def printing(x_ptr, out_ptr, scale):
    x = gl.load(x_ptr + gl.arange(0, 128, ROW))
    print("scaled by", scale)
    y = x * scale
    print("y", y)
    gl.store(out_ptr + gl.arange(0, 128, ROW), y)


def test_print_shows_scalars_and_tensors(capsys):
    out = poisoned(128, dtype=torch.int32)
    gluon_cpu.launch(printing, (1,), torch.arange(128, dtype=torch.int32), out, 17)
    printed = capsys.readouterr().out
    assert "scaled by" in printed
    assert "17" in printed
    assert str(127 * 17) in printed


@jit
def stopping(x_ptr, out_ptr, scale):
    total = 0
    for step in range(3):
        x = gl.load(x_ptr + step)
        total += x * scale
        breakpoint()  # <- stops here
    gl.store(out_ptr, total)


def test_breakpoint_stops_at_the_kernels_line_with_its_names(monkeypatch):
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(source, 1) if text.endswith("# <- stops" + " here"))
    seen = []

    def hook(*_args: object, **_options: object) -> None:
        frame = sys._getframe()
        while frame is not None and not (frame.f_code.co_filename == __file__ and frame.f_code.co_name != "hook"):
            frame = frame.f_back  # type: ignore[assignment]
        assert frame is not None, "no frame of the kernel's file on the stack"
        values = {name: int(frame.f_locals[name]) for name in ("step", "x", "total", "scale")}
        seen.append((frame.f_lineno, values))

    monkeypatch.setattr(sys, "breakpointhook", hook)
    out = poisoned(1, dtype=torch.int32)
    gluon_cpu.launch(stopping, (1,), torch.tensor([5, 7, 9], dtype=torch.int32), out, 10)
    assert out.item() == 210
    assert [at for at, _ in seen] == [line] * 3
    assert [values["total"] for _, values in seen] == [50, 120, 210]
    assert [values["step"] for _, values in seen] == [0, 1, 2]
    assert seen[1][1]["x"] == 7
    assert seen[1][1]["scale"] == 10
