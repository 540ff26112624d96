"""Do the proofs on record still hold? On all cores, whose processes cannot import what is run as a command."""

import gc
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from . import store
from .attention import catalogue
from .prove import Proof, Task
from .verifier import version

DAMAGED = "damaged"
PROOFS_A_CORE = 8  # fewer are not worth the start of a process
IN_A_ROW = 4  # given to a process at once: neighbours are often of one kernel, which its front end then makes once


def checked(proofs: Sequence[Proof], *, compiling: bool) -> Iterator[str]:
    """What is wrong with each record, or ""; in order, and found on all cores."""
    cores = min(os.cpu_count() or 1, len(proofs) // PROOFS_A_CORE)
    if cores < 2:
        yield from (fault(proof, compiling=compiling) for proof in proofs)
        return
    # The front end makes objects by the million, few of them in cycles: to look for cycles is a sixth of its time.
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn"), initializer=gc.disable) as pool:
        names = [proof.name for proof in proofs]
        yield from pool.map(partial(fault_of, compiling=compiling), names, chunksize=IN_A_ROW)


def fault_of(name: str, *, compiling: bool) -> str:
    return fault(next(proof for proof in catalogue() if proof.name == name), compiling=compiling)


def fault(proof: Proof, *, compiling: bool) -> str:
    """What is wrong with the record of a proof, or "". compiling: compile where that alone can tell."""
    try:
        record = store.load(proof.name)
    except store.Damaged:
        return DAMAGED
    if record is None:
        return "no record"
    package, _, used = record.verifier.partition(" ")
    if version() not in (None, used):
        return f"made with {package} {used}, installed is {version()}"
    if record.source == proof.source_key():
        return ""
    if not compiling:
        return "its kernel, launch or rewrites changed"
    return "" if record.key == Task.of(proof).key_with(used) else "of other PTX, or of another launch"
