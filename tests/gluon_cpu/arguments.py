"""Types for the arguments of commands."""

import argparse


def shard(text: str) -> tuple[int, int]:
    """ "2/4": the second of four parts."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, got {text!r}")
    return int(part), int(parts)


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)
