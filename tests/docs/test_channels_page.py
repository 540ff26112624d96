"""docs/channels.md: its code runs, its message is the one printed, it names everything; and the ladder of five kernels.

After a change of the message: `python -m tests.docs.test_channels_page` writes the real one into the page.
"""

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import channels
import gluon_cpu
from channels import check_ends
from channels.compat import JITFunction

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "channels.md"
LADDER = ROOT / "docs" / "channels"
BLOCK = re.compile(
    r"^```python\n(# examples/(\w+)\.py\n.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL
)
FILES = {match[2]: match[1] for match in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))}
MESSAGES = {match[2]: match[3] for match in BLOCK.finditer(PAGE.read_text(encoding="utf-8")) if match[3] is not None}


@contextlib.contextmanager
def importable(files: dict[str, str], place: Path) -> Iterator[None]:
    """Modules of these names and sources, in the folder `place`."""
    place.mkdir()
    for name, source in files.items():
        (place / f"{name}.py").write_text(source, encoding="utf-8")
    before = {name: sys.modules.pop(name, None) for name in files}
    sys.path.insert(0, str(place))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(place))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The kernels lie in a new folder each time: nothing of them is worth keeping."""
    monkeypatch.setenv("GLUON_CPU_CACHE", str(tmp_path / "cache"))


# --- The page


def printed(files: dict[str, str], folder: Path) -> str:
    """What `check` prints of the broken example."""
    with importable(files, folder / "examples"), contextlib.redirect_stdout(io.StringIO()) as out:
        run = importlib.import_module("broken").run
        out.truncate(0)
        out.seek(0)
        with contextlib.suppress(gluon_cpu.Finding):
            gluon_cpu.check(run)
    return out.getvalue()


def test_the_first_kernel(tmp_path, capsys):
    with importable(FILES, tmp_path / "examples"):
        importlib.import_module("run_first")
        importlib.import_module("test_first").test_ends()
    assert "20 schedules, no finding" in capsys.readouterr().out


def test_the_size_of_the_first_kernel(tmp_path, capsys):
    with importable(FILES, tmp_path / "examples"):
        importlib.import_module("size")
    slots = 3 * 64 * 64 * 4
    assert slots < int(capsys.readouterr().out) < slots + 2048


def test_message_is_as_printed(tmp_path):
    assert printed(FILES, tmp_path) == MESSAGES["broken"]


def test_fix_silences_it(tmp_path):
    fixed = re.sub(r"slot\.release\(\)  # fix: ", "", FILES["broken"])
    assert fixed != FILES["broken"]
    with importable(FILES | {"broken": fixed}, tmp_path / "examples"):
        assert gluon_cpu.check(importlib.import_module("broken").run, schedules=5, quiet=True).ok


def test_slots_of_several_parts(tmp_path):
    a, b = torch.randn(32, 32), torch.randn(16, 128).bfloat16()
    outs = torch.full_like(a, float("nan")), torch.zeros_like(b)
    with importable(FILES | {"host": (LADDER / "host.py").read_text(encoding="utf-8")}, tmp_path / "examples"):
        descriptor = importlib.import_module("host").descriptor
        both = importlib.import_module("parts").both
        a_desc, a_out = (descriptor(t, [32, 32]) for t in (a, outs[0]))
        b_desc, b_out = (descriptor(t, [16, 64]) for t in (b, outs[1]))
        gluon_cpu.launch(both, (1,), a_desc, b_desc, a_out, b_out, outputs=[])
    assert torch.equal(outs[0], a)
    assert torch.equal(outs[1][:, 64:], b[:, 64:])


def test_every_name_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    names = set(channels.__all__) - {"SharedMemoryProducer", "SharedMemoryConsumer"}
    for name in channels.__all__:
        thing = getattr(channels, name)
        if getattr(thing, "__triton_aggregate__", False):
            names |= {member for member, value in vars(thing).items() if isinstance(value, JITFunction)}
    names |= {name for name, value in vars(channels.tma).items() if isinstance(value, JITFunction)}
    internal = {"wait_until_free", "wait_until_filled", "slot_at", "as_tuple", "total_bytes"}
    missing = [name for name in sorted(names - internal) if not re.search(rf"\b{name}\b", page)]
    assert missing == []


def test_every_finding_named_exists():
    page = PAGE.read_text(encoding="utf-8")
    table = page[page.index("| what you did") : page.index("**From the source.**")]
    kinds = [name for name in re.findall(r"`(\w+)`", table) if name[0].isupper()]
    assert [name for name in kinds if not issubclass(getattr(gluon_cpu, name), gluon_cpu.Finding)] == []
    assert len(kinds) > 5


# --- The ladder

TARGETS = {
    "1_copy": "sm_90a",
    "2_ring": "sm_90a",
    "3_gemm_hopper": "sm_90a",
    "4_gemm_blackwell_pair": "sm_100a",
    "5_stages": "sm_90a",
}
# What is wrong if the first text is replaced by the second.
BREAKS = {
    "1_copy": ("    tma.wait_stores_read()\n", "", gluon_cpu.LifetimeError),
    "2_ring": ("slot.release_accessed()", "slot.release()", gluon_cpu.MissingFence),
    "3_gemm_hopper": (
        "        acc = warpgroup_mma_wait(0, deps=[acc])\n        slot.release()",
        "        slot.release()\n        acc = warpgroup_mma_wait(0, deps=[acc])",
        gluon_cpu.DataRace,
    ),
    "4_gemm_blackwell_pair": (
        "        values = acc.memory.load()\n        acc.release()",
        "        acc.release()\n        values = acc.memory.load()",
        gluon_cpu.DataRace,
    ),
    "5_stages": ("        result.publish()", "        result.release()", gluon_cpu.Deadlock),
}


def source(name: str) -> str:
    return (LADDER / f"{name}.py").read_text(encoding="utf-8")


@contextlib.contextmanager
def ladder(name: str, text: str, folder: Path) -> Iterator[ModuleType]:
    with importable({"host": source("host"), name: text}, folder / "ladder"):
        yield importlib.import_module(name)


def test_the_ladder_is_all_there():
    assert sorted(path.stem for path in LADDER.glob("[0-9]*.py")) == sorted(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_a_kernel_of_the_ladder(name, tmp_path):
    assert len(source(name).splitlines()) <= 120
    with ladder(name, source(name), tmp_path) as module:
        assert TARGETS[name] == module.TARGET
        assert gluon_cpu.check(module.main, schedules=5, target=module.TARGET, quiet=True).ok
        assert [m for f in vars(module).values() if isinstance(f, JITFunction) for m in check_ends(f)] == []


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_kernel_of_the_ladder(name, tmp_path):
    right, wrong, kind = BREAKS[name]
    assert source(name).count(right) == 1
    with ladder(name, source(name).replace(right, wrong), tmp_path) as module, pytest.raises(kind):
        gluon_cpu.check(module.main, schedules=10, target=module.TARGET, quiet=True)


def test_the_ladder_runs_as_the_page_says():
    done = subprocess.run(
        [sys.executable, "docs/channels/1_copy.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("right: (256, 64) torch.float32")


def update() -> None:
    """Write the message as it is printed now into the page."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GLUON_CPU_CACHE"] = folder
        message = printed(FILES, Path(folder))
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        BLOCK.sub(lambda m: m[0] if m[3] is None else f"```python\n{m[1]}```\n\n```text\n{message}```\n", page),
        encoding="utf-8",
    )


if __name__ == "__main__":
    update()
