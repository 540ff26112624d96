"""docs/epilogues.md: its kernel computes the right numbers without races, and its code is the kernel's.

Its drawings and tables are what layouts, machine code and result files say.

After a change of any of these: `python -m tests.docs.test_epilogues_page` writes the real ones into the page.
"""

import importlib.util
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gluon_cpu
from bench import epilogues
from bench.epilogues import HEAD_DIMS, ROWS, WAYS, Way, accumulator_layout, compiled, machine_counts, rows_layout, run
from gluon_cpu.ir.attributes import builder
from tests.compat import CompilationError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "epilogues.md"
RESULTS = ROOT / "bench" / "results"
KERNEL = ROOT / "bench" / "epilogues.py"
REGION = re.compile(r"(<!-- written by tests/docs/test_epilogues_page.py: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTOR, LINE = 32, 128  # bytes


# What the page shows.


def held(layout: Any, head_dim: int, warp: int = 0) -> list[list[tuple[int, int]]]:
    """[lane][register] -> (row, column), in elements of 16 bits, of one warp."""
    b = builder()
    linear = b.to_linear_layout(getattr(layout, "value", layout)._to_ir(b), [ROWS, head_dim])

    def at(bases: list[list[int]], i: int) -> tuple[int, int]:
        row = column = 0
        for bit, (r, c) in enumerate(bases):
            if i >> bit & 1:
                row, column = row ^ r, column ^ c
        return row, column

    start = at(linear.warp_bases, warp)
    lanes = [at(linear.lane_bases, lane) for lane in range(32)]
    registers = [at(linear.reg_bases, r) for r in range(2 ** len(linear.reg_bases))]
    return [[(start[0] ^ a[0] ^ r[0], start[1] ^ a[1] ^ r[1]) for r in registers] for a in lanes]


def first_store(layout: Any, head_dim: int, elements: int) -> list[list[tuple[int, int]]]:
    """The elements that each lane of a warp stores with its first instruction of `elements` elements."""
    return [lane[:elements] for lane in held(layout, head_dim)]


def drawing(layout: Any, head_dim: int, elements: int, columns: int, step: int) -> str:
    """Which thread stores what with the first instruction: a line for each row, a cell for `step` columns."""
    owner = {at: lane for lane, part in enumerate(first_store(layout, head_dim, elements)) for at in part}
    rows = sorted({row for row, _ in owner})
    lines = ["column  " + " ".join(f"{c:>4}" for c in range(0, columns, step))]
    for row in rows:
        cells = (f"t{owner[row, c]}" if (row, c) in owner else "." for c in range(0, columns, step))
        lines.append(f"row {row:<3} " + " ".join(f"{cell:>4}" for cell in cells))
    return "```text\n" + "\n".join(lines) + "\n```\n"


def touched(layout: Any, head_dim: int, elements: int, unit: int) -> int:
    """How many pieces of `unit` bytes one store of a warp writes to."""
    at = itertools.chain(*first_store(layout, head_dim, elements))
    return len({(row * head_dim + column) * 2 // unit for row, column in at})


def table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def machine_code() -> str:
    names = ["products", "staging_stores", "staging_loads", "stores_4_bytes", "stores_16_bytes", "copies"]
    found = {(d, way): machine_counts(d, way) for d in HEAD_DIMS for way in reversed(WAYS)}
    assert all(counts["spills"] == 0 for counts in found.values())
    rows = [[f"D={d}, {way}", *(counts[name] for name in names)] for (d, way), counts in found.items()]
    return table(["", "products", "`STSM`", "`LDS.128`", "`STG`, 4 bytes", "`STG`, 16 bytes", "copies"], rows)


def thousands(count: int) -> str:
    return f"{count / 1000:.0f}"


def measured() -> str:
    report = json.loads((RESULTS / "h200_epilogues.json").read_text(encoding="utf-8"))
    made = report["provenance"]
    rows = [
        [
            f"D={v['head_dim']}, {v['way']}",
            "–" if v["microseconds"] is None else f"{v['microseconds']:.1f}",
            thousands(v["global_store_requests"]),
            f"{v['sectors_per_output_sector']:.2f}",
            f"{v['sectors_per_l2_request']:.1f}",
            thousands(v["shared_store_conflicts"]),
            thousands(v["shared_load_conflicts"]),
            thousands(v["global_store_conflicts"]),
            thousands(v["arbitration"]),
        ]
        for v in report["variants"]
    ]
    head = [
        "",
        "µs",
        "warps' stores",
        "sectors",
        "to a request",
        "lost: to shared",
        "from shared",
        "to global",
        "engines",
    ]
    note = f"\n{report['note']}\n" if "note" in report else ""
    where = f"Counted on an {made['card'].removeprefix('NVIDIA ')}, {made['date']}:"
    return f"{where}\n{report['kernel']}.\n\n{table(head, rows)}{note}"


def attention() -> str:
    report = json.loads((RESULTS / "h200_epilogues_attention.json").read_text(encoding="utf-8"))
    points = {(p["head_dim"], p["mask"], p["length"]): p for p in report["points"]}
    lengths = sorted({length for *_, length in points})

    def per_cent(point: dict[str, Any], way: str) -> str:
        return f"{100 * (point[f'{way}_tflops'] / point['tma_tflops'] - 1):+.0f}".replace("-0", "0").replace("+0", "0")

    rows = [
        [f"D={d} {mask}, {way}", *(per_cent(points[d, mask, n], way).replace("-", "−") for n in lengths)]
        for d, mask in dict.fromkeys((d, mask) for d, mask, _ in points)
        for way in ("rows", "registers")
    ]
    return table(["", *map(str, lengths)], rows)


def regions() -> dict[str, str]:
    return {
        "drawing_registers": drawing(accumulator_layout(64), 64, elements=2, columns=16, step=2),
        "drawing_rows": drawing(rows_layout(64), 64, elements=8, columns=64, step=8),
        "machine_code": machine_code(),
        "measured": measured(),
        "attention": attention(),
    }


@pytest.mark.slow
def test_every_drawing_and_table_is_the_real_one():
    found = {match[2]: match[3] for match in REGION.finditer(PAGE.read_text(encoding="utf-8"))}
    assert found == regions()


def test_the_code_on_the_page_is_the_kernels():
    kernel, shown = KERNEL.read_text(encoding="utf-8"), CODE.findall(PAGE.read_text(encoding="utf-8"))
    assert len(shown) == 4
    assert [block for block in shown if block not in kernel] == []


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("layout", [accumulator_layout, rows_layout])
def test_four_warps_hold_every_element_once(layout, head_dim):
    everywhere = sorted(at for warp in range(4) for lane in held(layout(head_dim), head_dim, warp) for at in lane)
    assert everywhere == [(row, column) for row in range(ROWS) for column in range(head_dim)]


def test_a_store_touches_as_many_sectors_and_lines_as_the_page_says():
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    for head_dim in HEAD_DIMS:
        assert touched(accumulator_layout(head_dim), head_dim, 2, SECTOR) == 8
        assert touched(accumulator_layout(head_dim), head_dim, 2, LINE) == 8
        assert touched(rows_layout(head_dim), head_dim, 8, SECTOR) == 16
        assert touched(rows_layout(head_dim), head_dim, 8, LINE) == 4
    assert "8 sectors, in 8 lines" in page
    assert "16 sectors, in 4 lines" in page


def test_what_the_page_says_of_the_counts_is_so():
    """How to read the table, whichever run it is of."""
    for v in json.loads((RESULTS / "h200_epilogues.json").read_text(encoding="utf-8"))["variants"]:
        sectors, to_a_request = v["sectors_per_output_sector"], v["sectors_per_l2_request"]
        if v["way"] == "registers":
            assert sectors > 1.8, v  # each in two halves
            assert to_a_request < 1.1, v
            assert v["global_store_conflicts"] > 5 * v["global_store_requests"], v
        else:
            assert v["sectors_to_l2"] - v["local_store_sectors"] <= 1.01 * v["sectors_to_l2"] / sectors, v
            assert to_a_request > 3.8, v
            conflicts = ("shared_store_conflicts", "shared_load_conflicts", "global_store_conflicts")
            assert sum(v[name] for name in conflicts) <= 1.1 * v["arbitration"] + 20_000, v


# What the kernel does.


def inputs(head_dim: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, w and a poisoned o. Small integers: every sum is exact."""
    made = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (length, head_dim), generator=made).to(dtype)
    w = torch.randint(-2, 3, (2, head_dim, head_dim), generator=made).to(dtype)
    return x, w, torch.full((2, length, head_dim), float("nan"), dtype=dtype)


@pytest.mark.parametrize("length", [1, ROWS, 3 * ROWS + 1, 17 * ROWS - 1])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("way", WAYS)
def test_the_numbers(way, head_dim, length):
    x, w, o = inputs(head_dim, length, torch.float16 if length == ROWS else torch.bfloat16)
    with gluon_cpu.machine():
        run(x, w, o, way)
    assert torch.equal(o, (x.float() @ w.float()).to(o.dtype))


LAPS = 17 * ROWS - 1  # three tiles for one of the programs: its slots are filled again


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("way", WAYS)
def test_no_race_under_any_of_several_schedules(way, head_dim):
    x, w, _ = inputs(head_dim, LAPS, torch.bfloat16)
    o = inputs(head_dim, LAPS, torch.bfloat16)[2]
    gluon_cpu.check(lambda: run(x, w, o.fill_(float("nan")), way), schedules=6)


def broken(folder: Path, old: str, new: str) -> Any:
    """The kernel's module with `new` in place of `old`."""
    text = KERNEL.read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    path = folder / "broken_epilogues.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


MASK = ", mask=(row < o_desc.shape[1])[:, None]"
BEFORE = "    tma.wait_stores_read()  # of the tile before\n"
AT_END = "        tma.wait_stores_read()  # the tile must not go away while it is read"
DONE = "        acc = warpgroup_mma_wait(0, deps=[acc])\n"
FREED = "        x.release()\n"
BROKEN: dict[str, tuple[Way, str, str, Any]] = {
    "no mask, registers": ("registers", MASK, "", (gluon_cpu.OutputRace, gluon_cpu.OutOfBounds)),
    "no mask, rows": ("rows", MASK, "", (gluon_cpu.OutputRace, gluon_cpu.OutOfBounds)),
    "the tile written while the copy reads it": ("tma", BEFORE, "", gluon_cpu.ReuseRace),
    "the end while the copy reads": ("tma", AT_END, "        pass", gluon_cpu.LifetimeError),
    "a slot freed before the product is done": ("rows", DONE + FREED, FREED + DONE, gluon_cpu.DataRace),
    "a slot never freed": ("registers", FREED, "", gluon_cpu.Deadlock),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_left_out_is_found(name, tmp_path):
    way, old, new, finding = BROKEN[name]
    module = broken(tmp_path, old, new)
    x, w, o = inputs(64, LAPS, torch.bfloat16)
    with pytest.raises(finding):
        gluon_cpu.check(lambda: module.run(x, w, o, way), schedules=2)


@pytest.mark.parametrize("fenced", ["by hand", "by the compiler"])
def test_a_fence_is_between_the_staging_and_the_copy(fenced, tmp_path):
    if fenced == "by hand":
        text = compiled(64, "tma").asm["ptx"]
    else:
        text = broken(tmp_path, "tma.store_own(", "tma.store(").compiled(64, "tma").asm["ptx"]
    staged, fence, copy = (
        text.rindex("stmatrix"), text.index("fence.proxy.async"), text.index("cp.async.bulk.tensor.3d.global.shared")
    )  # fmt: skip
    assert staged < fence < copy


def test_rows_that_would_have_bank_conflicts_are_refused(tmp_path):
    rows = "[32 // threads, threads]"
    module = broken(tmp_path, rows, "[16, 2]")
    with pytest.raises(CompilationError) as found:
        module.compiled(64, "rows")
    reasons = []
    error: BaseException | None = found.value
    while error:
        reasons.append(str(error))
        error = error.__cause__
    assert "static_assert(gl.bank_conflicts" in reasons[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.empty(8, 96)}, r"x: expected the shape \(S, D\), D of \(64, 128\), got \(8, 96\)"),
        ({"w": torch.empty(2, 64, 32)}, r"w: expected a contiguous tensor \(2, 64, 64\) in fp16 or bf16, all alike"),
        ({"x": torch.empty(8, 64)}, r"x: expected .* got \(8, 64\) torch.float32$"),
        ({"o": torch.empty(8, 2, 64).half().transpose(0, 1)}, r"o: expected .* torch.float16, not contiguous"),
        ({"way": "dma"}, r"way: expected one of \('registers', 'rows', 'tma'\), got 'dma'"),
    ],
)
def test_what_it_refuses(change, message):
    good: dict[str, Any] = {"x": torch.empty(8, 64), "w": torch.empty(2, 64, 64), "o": torch.empty(2, 8, 64)}
    good = {name: t.half() for name, t in good.items()} | {"way": "tma"} | change
    with pytest.raises(ValueError, match=message):
        epilogues.run(**good)


if __name__ == "__main__":
    real = regions()
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(REGION.sub(lambda m: m[1] + real[m[2]] + m[4], text), encoding="utf-8")
