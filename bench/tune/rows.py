"""Rows for several problems, which do not take each other's place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gluon_attn.backward.table import BackwardRow
from gluon_attn.forward.table import Row
from gluon_attn.tuning import Measured


@dataclass(frozen=True)
class Chosen:
    """A row, and what it was chosen from."""

    row: Row | BackwardRow
    measured: Measured


def rows_for_all(found: Sequence[tuple[Any, Any, Measured]], reach: float) -> list[Chosen]:
    """found: of each problem its choices, the config that is to serve it, and what was measured. There is a row if that
    config is not in use, or if it would not serve without the table file that the new one replaces: so nothing is lost
    for these problems. A row reaches less far than `reach` if it would serve a problem for which another config was
    chosen; down to its own problem alone, and where even that is the other's too, there is no row."""
    chosen = []
    for choices, config, measured in found:
        if config == choices.in_use == choices.without:
            continue
        others = [o.problem for o, of_other, _ in found if of_other != config]
        for shorter in (reach, reach**0.5, reach**0.25, 1.0):
            row = choices.row(config, shorter)
            if not any(choices.serves(row, problem) for problem in others):
                chosen.append(Chosen(row, measured))
                break
    return chosen
