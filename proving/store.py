"""What was proved, kept as one file per proof: `proving/results/NAME.json`.

A proof holds for one kernel and one launch, named by a hash of the code and of the verifier's input. As long as neither
changes, and the verifier is the same, it need not be run again.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .ptx import fingerprint

RESULTS = Path(__file__).parent / "results"


def key_of(ptx: str, inputs: Iterable[Any], verifier: str | None) -> str:
    """ptx: as rewritten. inputs: the input.json, and for an equivalence the reference and its binding."""
    text = json.dumps([fingerprint(ptx), *inputs, verifier], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Record:
    """A proof that was found. same_as: the proof of the very same kernel and launch that was run in its stead.

    key: of what was proved, see `key_of`. source: of what that was made from, see source.py: the same as long as the
    key is, and sooner found. It may change where the key does not.
    rewrites: how often each exact rewrite applied. seconds, memory_mib: of the verifier.
    """

    name: str
    key: str
    source: str
    result: str
    seconds: float
    memory_mib: float
    verifier: str
    triton: str
    date: str
    launch: dict[str, Any]
    rewrites: dict[str, int]
    same_as: str | None = None


def path_of(name: str, folder: Path | None = None) -> Path:
    return (folder or RESULTS) / f"{name}.json"


def save(record: Record, folder: Path | None = None) -> None:
    path = path_of(record.name, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")


class Damaged(ValueError):
    """The file of a record does not hold one."""


def load(name: str, folder: Path | None = None) -> Record | None:
    """The record of a proof, None if there is none. Raises Damaged if its file cannot be read as one."""
    path = path_of(name, folder)
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        record = Record(**values)
    except (ValueError, TypeError) as error:  # not JSON, not text; other fields
        raise Damaged(f"{path}: expected the record of a proof, which python -m proving writes: {error}") from error
    if record.name != name:
        raise Damaged(f"{path}: expected the record of {name}, got that of {record.name}")
    return record


def find(key: str, folder: Path | None = None) -> Record | None:
    """The record of a proof with this key that was run, whatever its name."""
    names = sorted(path.stem for path in (folder or RESULTS).glob("*.json"))
    records = (readable(name, folder) for name in names)
    return next((r for r in records if r and r.key == key and r.same_as is None), None)


def readable(name: str, folder: Path | None = None) -> Record | None:
    """As load, but a damaged record is none: the proof is to be made again."""
    try:
        return load(name, folder)
    except Damaged:
        return None


def drop(name: str, folder: Path | None = None) -> None:
    """Forget a proof that no longer holds."""
    path_of(name, folder).unlink(missing_ok=True)
