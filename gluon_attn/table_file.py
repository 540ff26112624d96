"""What a table file has, read with all its checks, and written."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from .backward import table as backward
from .backward.configs import HopperBackward
from .backward.table import BackwardRow
from .bias import Bias
from .device import Device
from .forward.configs import BlackwellConfig, ForwardConfig, HopperConfig
from .forward.fits import require_fits
from .forward.table import Row
from .problem import Problem
from .score_mod import alibi, softcap
from .sizes import SCORES, SCORES_OF_GRADIENTS
from .tensors import PADDED_HEAD_DIMS

SCHEMA = 1
CONFIGS: dict[str, type[ForwardConfig]] = {"hopper": HopperConfig, "blackwell": BlackwellConfig}
OF_GRADIENTS = {"hopper": HopperBackward}
# Of a row, what it is for: required, then as a row has them by default.
KIND_OF_GRADIENTS = ("padded_head_dim", "padded_head_dim_v", "causal")
KIND = (*KIND_OF_GRADIENTS, "element_bytes")
SIZES = (
    "min_kv_len",
    "max_kv_len",
    "in_limits",
    "min_reuse",
    "q_lens",
    "sequence_heads",
    "heads_per_kv_head",
    "scores",
)
LIMITS = (*SIZES, "one_round")
PROVENANCE = ("date", "commit", "card", "torch", "triton")
LARGEST = 2**63  # of any number; rows of the tuner reach beyond 2^31
# Of a row for changed scores, a function that changes them so.
LIKE = {"softcap": softcap(1.0), "softcap with maxima": softcap(100.0), "alibi": alibi(torch.empty(1))}
T = TypeVar("T")
Config = TypeVar("Config", ForwardConfig, HopperBackward)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a row was chosen from. shape: the problem that was timed. ms: milliseconds of each config, by name. chosen,
    in_use: those of the row, and of the table that was in use. gain: by how much the former was faster, 0.05 for 5 %;
    spread: what it may be off by, on either side."""

    shape: Mapping[str, Any]
    ms: Mapping[str, float]
    chosen: str
    in_use: str
    gain: float
    spread: float


@dataclass(frozen=True, eq=False)
class TableFile:
    """What a table file has.

    source: the file. devices: that it is for. measured: of each row. backward_rows, backward_measured: of gradients.
    """

    source: str
    devices: tuple[Device, ...]
    provenance: Mapping[str, Any]
    rows: tuple[Row, ...]
    measured: tuple[Measured | None, ...]
    backward_rows: tuple[BackwardRow, ...] = ()
    backward_measured: tuple[Measured | None, ...] = ()

    def serves(self, device: Device) -> bool:
        """Whether it is for this card: of the same name, as many processors, and the same architecture."""
        return any(
            (d.name, d.sm_count, d.capability) == (device.name, device.sm_count, device.capability)
            for d in self.devices
        )

    @property
    def cards(self) -> str:
        """Those that it is for, in words."""
        return ", ".join(d.title for d in self.devices)


class At:
    """A place in a table file, which the errors name."""

    def __init__(self, path: str, place: str = "") -> None:
        self.path, self.place = path, place

    def __truediv__(self, part: str | int) -> "At":
        inner = f"[{part}]" if isinstance(part, int) else f".{part}" if self.place else part
        return At(self.path, self.place + inner)

    def error(self, text: str) -> ValueError:
        return ValueError(f"{self.path}: {self.place or 'table'}: {text}")

    def typed(self, value: Any, kind: type[T], words: str) -> T:
        """The value, if it is of that type, no bool where a number is wanted, and no number beyond the largest."""
        without_end = isinstance(value, float) and not math.isfinite(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or without_end:
            raise self.error(f"expected {words}, got {value!r}")
        if isinstance(value, int | float) and abs(value) > LARGEST:
            raise self.error(f"expected {words} of at most 2^63, got a larger one; give one that is less")
        return value

    def object_of(self, value: Any, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
        """The value, if it is an object that has these members and no others."""
        found = self.typed(value, dict, "an object")
        for name in found:
            if name not in (*required, *optional):
                raise self.error(f"expected {', '.join((*required, *optional))}, got an unknown {name!r}; leave it out")
        for name in required:
            if name not in found:
                raise self.error(f"expected {name!r}, got none; write the file anew with python -m bench tune")
        return found

    def list_of(self, value: Any, of: Callable[["At", Any], T]) -> tuple[T, ...]:
        return tuple(of(self / i, v) for i, v in enumerate(self.typed(value, list, "a list")))


def read(path: str | os.PathLike[str]) -> TableFile:
    """A table file, checked, which is not put in use."""
    at = At(os.fspath(path))
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise type(error)(
            f"{at.path}: expected a table file, got none that can be read ({error.strerror}); give the path of one, as "
            "python -m bench tune writes it"
        ) from None
    except (RecursionError, ValueError) as error:
        raise at.error(f"expected JSON, got what is none: {error}") from None
    schema = given.get("schema", SCHEMA) if isinstance(given, dict) else SCHEMA
    if type(schema) is not int or schema != SCHEMA:
        raise (at / "schema").error(
            f"expected {SCHEMA}, got {schema!r}, as another version of gluon_attn writes it; write it anew "
            "with python -m bench tune"
        )
    top = at.object_of(given, ("schema", "devices", "provenance", "forward"), ("backward",))
    devices = (at / "devices").list_of(top["devices"], device_at)
    if not devices:
        raise (at / "devices").error("expected at least one device, got none")
    provenance = (at / "provenance").typed(top["provenance"], dict, "an object")
    for name in PROVENANCE:
        (at / "provenance" / name).typed(provenance.get(name), str, "a text")
    pairs = (at / "forward").list_of(top["forward"], lambda a, value: row_at(a, value, devices, provenance))
    gradients = (at / "backward").list_of(
        top.get("backward", []), lambda a, value: backward_row_at(a, value, devices, provenance)
    )
    return TableFile(
        source=at.path,
        devices=devices,
        provenance=provenance,
        rows=tuple(row for row, _ in pairs),
        measured=tuple(measured for _, measured in pairs),
        backward_rows=tuple(row for row, _ in gradients),
        backward_measured=tuple(measured for _, measured in gradients),
    )


def device_at(at: At, value: Any) -> Device:
    given = at.object_of(value, ("name", "capability", "sm_count", "smem_bytes", "l2_bytes"))
    for name in ("sm_count", "smem_bytes", "l2_bytes"):
        if (at / name).typed(given[name], int, "a number") < 1:
            raise (at / name).error(f"expected at least 1, got {given[name]}")
    if not (at / "name").typed(given["name"], str, "a text").strip():
        raise (at / "name").error(f"expected the name of a card, got {given['name']!r}; give it as torch has it")
    capability = pair_at(at / "capability", given["capability"])
    device = Device(**given | {"capability": capability})
    try:
        device.require_supported()
    except RuntimeError as error:
        raise at.error(str(error)) from None
    return device


def pair_at(at: At, value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(v) is int for v in value):
        raise at.error(f"expected two whole numbers, got {value!r}")
    return (at / 0).typed(value[0], int, "a whole number"), (at / 1).typed(value[1], int, "a whole number")


def one_of(at: At, value: Any, names: Collection[str], words: str = "one of ") -> str:
    expected = words + ", ".join(names)
    if at.typed(value, str, expected) not in names:
        raise at.error(f"expected {expected}, got {value!r}")
    return value


def row_at(at: At, value: Any, devices: Sequence[Device], provenance: Mapping[str, Any]) -> tuple[Row, Measured | None]:
    given = at.object_of(value, ("conditions", "config"), ("measured",))
    config = config_at(at / "config", given["config"], CONFIGS)
    conditions = conditions_at(at / "conditions", given["conditions"], KIND, LIMITS)
    row = Row(config=config, card=provenance["card"], date=provenance["date"], **conditions)
    for device in devices:
        if device.arch not in config.archs:
            raise (at / "config").error(
                f"expected one for {device.name} (sm_{device.arch}), which the file names, got a "
                f"{type(config).__name__} for sm_{' and sm_'.join(map(str, config.archs))}; a table file has one "
                "architecture"
            )
        try:
            require_fits(config, problem_like(row), device)
        except (ValueError, NotImplementedError) as error:
            raise (at / "config").error(f"not for a row of these conditions: {error}") from None
    return row, measured_at(at / "measured", given["measured"]) if "measured" in given else None


def backward_row_at(
    at: At, value: Any, devices: Sequence[Device], provenance: Mapping[str, Any]
) -> tuple[BackwardRow, Measured | None]:
    given = at.object_of(value, ("conditions", "config"), ("measured",))
    config = config_at(at / "config", given["config"], OF_GRADIENTS)
    conditions = conditions_at(at / "conditions", given["conditions"], KIND_OF_GRADIENTS, SIZES, of_any_mask=True)
    head_dims = conditions.pop("padded_head_dim"), conditions.pop("padded_head_dim_v")
    for device in devices:
        try:
            backward.require_fits(config, head_dims, device)
        except ValueError as error:
            raise (at / "config").error(f"not for a row of these conditions: {error}") from None
    row = BackwardRow(head_dims, config, card=provenance["card"], date=provenance["date"], **conditions)
    return row, measured_at(at / "measured", given["measured"]) if "measured" in given else None


def problem_like(row: Row) -> Problem:
    """One that such a row is for, but for its sizes."""
    return Problem(
        dtype=torch.bfloat16 if row.element_bytes == 2 else torch.float8_e4m3fn,
        batch=1,
        heads=1,
        kv_heads=1,
        q_len=4096,
        kv_len=4096,
        head_dim=row.head_dims[0],
        head_dim_v=row.head_dims[1],
        causal=row.causal,
        scale=1.0,
        layout="bhsd",
        score_mod=LIKE.get(row.scores or ""),
        bias=Bias(dtype=torch.bfloat16, each_row=True, shared=True) if row.scores == "bias" else None,
    )


def conditions_at(
    at: At, value: Any, kind: Sequence[str], limits: Sequence[str], *, of_any_mask: bool = False
) -> dict[str, Any]:
    """Fields of a row: those of `kind`, and some of `limits`. of_any_mask: whether causal may be null, which is for
    both."""
    given = dict(at.object_of(value, kind, limits))
    for name, possible in {
        "padded_head_dim": PADDED_HEAD_DIMS,
        "padded_head_dim_v": PADDED_HEAD_DIMS,
        "element_bytes": (1, 2),
    }.items():
        if name in given and (at / name).typed(given[name], int, "a whole number") not in possible:
            raise (at / name).error(f"expected one of {', '.join(map(str, possible))}, got {given[name]}")
    if not (of_any_mask and given["causal"] is None):
        (at / "causal").typed(given["causal"], bool, "true or false" + ", or null for both" * of_any_mask)
    for name in ("in_limits", "one_round"):
        (at / name).typed(given.get(name, False), bool, "true or false")
    for name in ("min_kv_len", "min_reuse", "max_kv_len", "heads_per_kv_head"):
        if name in given and (at / name).typed(given[name], int, "a whole number") < 1:
            raise (at / name).error(f"expected at least 1, got {given[name]}")
    if "scores" in given:
        one_of(at / "scores", given["scores"], SCORES_OF_GRADIENTS if of_any_mask else SCORES)
    for name in ("q_lens", "sequence_heads"):
        if name in given:
            given[name] = pair_at(at / name, given[name])
            if not 1 <= given[name][0] <= given[name][1]:
                raise (at / name).error(f"expected the least and the most, from 1 on, got {list(given[name])}")
    if given.get("max_kv_len", LARGEST) < given.get("min_kv_len", 1):
        raise (at / "max_kv_len").error(
            f"expected at least min_kv_len, {given['min_kv_len']}, got {given['max_kv_len']}"
        )
    return given


def config_at(at: At, value: Any, classes: Mapping[str, type[Config]]) -> Config:
    """Its "kind" is the architecture, the rest are the fields of the class."""
    kind = one_of(at / "kind", at.typed(value, dict, "an object").get("kind"), classes)
    of: Any = classes[kind]
    fields = {f.name: f for f in dataclasses.fields(of)}
    required: list[str] = [name for name, f in fields.items() if f.default is dataclasses.MISSING]
    given = dict(at.object_of(value, ("kind", *required), [name for name in fields if name not in required]))
    del given["kind"]
    for name in given:
        wanted: Any = fields[name].type
        if name == "cga_layout":
            given[name] = (at / name).list_of(given[name], pair_at)
        elif wanted is float:
            given[name] = float((at / name).typed(given[name], int | float, "a number"))  # type: ignore[arg-type]
        else:
            words = {bool: "true or false", str: "a text"}.get(wanted, "a whole number")
            (at / name).typed(given[name], wanted, words)
    try:
        return classes[kind](**given)
    except ValueError as error:
        raise at.error(str(error)) from None


def measured_at(at: At, value: Any) -> Measured:
    given = at.object_of(value, [f.name for f in dataclasses.fields(Measured)])
    (at / "shape").typed(given["shape"], dict, "an object")
    times = (at / "ms").typed(given["ms"], dict, "an object")
    for name, ms in times.items():
        if (at / "ms" / name).typed(ms, int | float, "milliseconds") <= 0:
            raise (at / "ms" / name).error(f"expected more than 0, got {ms}")
    for name in ("chosen", "in_use"):
        one_of(at / name, given[name], times, "one of those in ms, ")
    for name in ("gain", "spread"):
        (at / name).typed(given[name], int | float, "a number")  # type: ignore[arg-type]
    return Measured(**given)


def as_json(
    devices: Sequence[Device],
    provenance: Mapping[str, Any],
    rows: Sequence[Row],
    measured: Sequence[Measured | None],
    backward_rows: Sequence[BackwardRow] = (),
    backward_measured: Sequence[Measured | None] = (),
) -> dict[str, Any]:
    """What a table file has. It is read as what it was made of."""
    return {
        "schema": SCHEMA,
        "devices": [dataclasses.asdict(d) for d in devices],
        "provenance": dict(provenance),
        "forward": entries(rows, measured),
        "backward": entries(backward_rows, backward_measured),
    }


def entries(rows: Sequence[Row | BackwardRow], measured: Sequence[Measured | None]) -> list[dict[str, Any]]:
    found = []
    for row, of_row in zip(rows, measured, strict=True):
        entry = {"conditions": conditions_of(row), "config": config_fields(row.config)}
        found.append(entry | ({} if of_row is None else {"measured": dataclasses.asdict(of_row)}))
    return found


def conditions_of(row: Row | BackwardRow) -> dict[str, Any]:
    """But for what is as by default."""
    by_default = {f.name: f.default for f in dataclasses.fields(row)}
    names = LIMITS if isinstance(row, Row) else SIZES
    limits = {name: getattr(row, name) for name in names if getattr(row, name) != by_default[name]}
    d, d_v = row.head_dims
    kind: dict[str, Any] = {"padded_head_dim": d, "padded_head_dim_v": d_v, "causal": row.causal}
    if isinstance(row, Row):
        kind["element_bytes"] = row.element_bytes
    return kind | {name: as_list(value) for name, value in limits.items()}


def config_fields(config: ForwardConfig | HopperBackward) -> dict[str, Any]:
    """As `config_at` reads them."""
    kind = "blackwell" if isinstance(config, BlackwellConfig) else "hopper"
    return {"kind": kind} | {name: as_list(value) for name, value in dataclasses.asdict(config).items()}


def as_list(value: Any) -> Any:
    return [as_list(v) for v in value] if isinstance(value, tuple) else value
