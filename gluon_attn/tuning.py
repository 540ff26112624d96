"""Table files: rows of the tuning tables that were timed on a card at hand, put in front of the packaged ones.

`python -m bench tune` writes them, `table_file.py` reads them. docs/tuning.md says how they are used.
"""

import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .backward import table as backward
from .backward.table import BackwardRow
from .device import Device
from .forward.table import PACKAGED, Row
from .table_file import Measured as Measured
from .table_file import TableFile
from .table_file import as_json as as_json
from .table_file import read as read

TABLES = Path(__file__).parent / "tables"
VARIABLE = "GLUON_ATTN_TABLE"  # of the environment: a table file that is loaded at import


@dataclass(frozen=True, eq=False)  # two are the same only if they are one: launches are kept by table
class Table(TableFile):
    """A table file in use. As a context manager it serves until the end of the block."""

    def __enter__(self) -> "Table":
        return self

    def __exit__(self, *_: object) -> None:
        unload(self)


def of_package() -> tuple[Table, ...]:
    """The files that come with the package."""
    return tuple(
        Table(**vars(read(path)) | {"source": f"gluon_attn/tables/{path.name}"})
        for path in sorted(TABLES.glob("*.json"))
    )


OF_CARDS = of_package()  # read at import: what asks for them may be traced by torch.compile
_active: tuple[Table, ...] = ()
_changing = threading.Lock()


def load(path: str | os.PathLike[str]) -> Table:
    """Put the rows of a table file in front of those in use, for the devices that it names, in the whole process.

    Warns if it is for none of the cards here. Raises OSError if there is no such file, and ValueError, with the place
    in the file, for what is wrong in it.
    """
    global _active
    table = Table(**vars(read(path)))
    with _changing:
        _active = (table, *_active)
    # Now, or when something first uses a card: to ask for cards before would start CUDA, at import too.
    torch.cuda._lazy_call(lambda: warn_of_other_cards(table))
    return table


def warn_of_other_cards(table: Table) -> None:
    here = cards_here()
    if table in _active and here and not any(table.serves(device) for device in here):
        cards = " or ".join(dict.fromkeys(device.title for device in here))
        try:
            warnings.warn(
                f"{table.source}: expected a table file for {cards}, which is here, got one for {table.cards}; it "
                f"serves nothing here: leave it out of tuning.load or {VARIABLE}, or write one for this card with "
                "python -m bench tune",
                stacklevel=5,  # who called `load`, if a card is in use already
            )
        except UserWarning:  # an error by a filter: `load` returns nothing to unload then
            unload(table)
            raise


def cards_here() -> list[Device]:
    return [Device.of(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]


def unload(table: Table) -> None:
    """Take it back."""
    global _active
    with _changing:
        _active = tuple(t for t in _active if t is not table)


def reset() -> None:
    """Take back all that was loaded: what comes with the package serves alone."""
    global _active
    with _changing:
        _active = ()


def active() -> tuple[Table, ...]:
    """The tables that were loaded, those asked first coming first. Other threads load too: who keeps what came of them
    reads them once, and gives them to all that asks for them."""
    return _active


def serving(device: Device, loaded: tuple[Table, ...] | None = None) -> tuple[Table, ...]:
    """The tables that serve a device: of `loaded`, by default those that are now, and then those that come with the
    package. After them comes the packaged table for all cards."""
    return (*(t for t in (_active if loaded is None else loaded) if t.serves(device)), *of_card(device))


def of_card(device: Device) -> tuple[Table, ...]:
    """The table files of the package that were measured on a card of the same model. With more processors or fewer, it
    is still nearer than another model; the nearest come first."""
    distances: dict[int, list[Table]] = {}
    for table in OF_CARDS:
        alike = [d for d in table.devices if (d.model, d.capability) == (device.model, device.capability)]
        if alike:
            distance = min(abs(d.sm_count - device.sm_count) for d in alike)
            distances.setdefault(distance, []).append(table)
    return tuple(table for distance in sorted(distances) for table in distances[distance])


def rows_for(device: Device, loaded: tuple[Table, ...] | None = None) -> Sequence[Row]:
    """The rows that are in use for a device, in the order in which they are asked. loaded: as for `serving`."""
    rows: tuple[Row, ...] = PACKAGED
    for table in reversed(serving(device, loaded)):
        rows = table.rows + rows
    return rows


def backward_rows_for(device: Device, loaded: tuple[Table, ...] | None = None) -> Sequence[BackwardRow]:
    """Likewise, of gradients."""
    rows: tuple[BackwardRow, ...] = backward.PACKAGED
    for table in reversed(serving(device, loaded)):
        rows = table.backward_rows + rows
    return rows


def rows_of_arch(arch: int) -> Sequence[Row]:
    """The rows that are in use for any device of that architecture."""
    tables = (*_active, *OF_CARDS)
    loaded = (row for table in tables for row in table.rows if any(d.arch == arch for d in table.devices))
    return (*loaded, *PACKAGED)


def backward_rows_of_arch(arch: int) -> Sequence[BackwardRow]:
    """Likewise, of gradients."""
    tables = (*_active, *OF_CARDS)
    loaded = (row for table in tables for row in table.backward_rows if any(d.arch == arch for d in table.devices))
    return (*loaded, *backward.PACKAGED)


def kernels_of_cards() -> dict[str, Row]:
    """The rows of the package's files whose kernels no row in code has, by file and number: what is checked of every
    row in code is checked of these too."""
    known = {(row.head_dims, row.causal, row.element_bytes, row.config) for row in PACKAGED}
    found: dict[str, Row] = {}
    for table in OF_CARDS:
        for i, row in enumerate(table.rows):
            kernel = (row.head_dims, row.causal, row.element_bytes, row.config)
            if kernel not in known:
                known.add(kernel)
                found[f"{Path(table.source).stem} row {i}"] = row
    return found


def gradient_kernels_of_cards() -> dict[str, BackwardRow]:
    """Likewise, of gradients."""
    known = {(row.head_dims, row.config) for row in backward.PACKAGED}
    found: dict[str, BackwardRow] = {}
    for table in OF_CARDS:
        for i, row in enumerate(table.backward_rows):
            if (row.head_dims, row.config) not in known:
                known.add((row.head_dims, row.config))
                found[f"{Path(table.source).stem} row {i}"] = row
    return found


def load_from_environment() -> None:
    """Raises as `load` does, with the variable's name: who sees it has asked for no file in code."""
    path = os.environ.get(VARIABLE)
    if path:
        try:
            load(path)
        except (OSError, ValueError) as error:
            raise type(error)(f"{VARIABLE}: {error}; or unset the variable") from None


load_from_environment()
