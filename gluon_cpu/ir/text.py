"""Small tools for MLIR's printed form: bracket-aware splitting, attribute dictionaries, locations."""

import re

OPEN, CLOSE = "([{<", ")]}>"


def scan_depth(text: str) -> list[int]:
    """Bracket depth before each character; characters within a string literal have depth 10**6."""
    depths, depth, quoted, i = [], 0, False, 0
    while i < len(text):
        ch = text[i]
        if quoted:
            depths.append(10**6)
            if ch == "\\":
                depths.append(10**6)
                i += 1
            elif ch == '"':
                quoted = False
        elif ch == '"':
            depths.append(depth)
            quoted = True
        elif ch == "-" and text[i + 1 : i + 2] == ">":  # an arrow is no bracket
            depths += [depth, depth]
            i += 1
        elif ch in OPEN:
            depths.append(depth)
            depth += 1
        elif ch in CLOSE:
            depth -= 1
            depths.append(depth)
        else:
            depths.append(depth)
        i += 1
    return depths


def split_top(text: str, separator: str = ",") -> list[str]:
    """Split at separators outside all brackets and strings; parts are stripped, an empty text gives no part."""
    if not text.strip():
        return []
    depths, parts, start = scan_depth(text), [], 0
    i = text.find(separator)
    while i >= 0:
        if depths[i] == 0 and not (separator == ":" and text[i - 1 : i] == ":"):
            parts.append(text[start:i].strip())
            start = i + len(separator)
        i = text.find(separator, i + 1)
    parts.append(text[start:].strip())
    return parts


def matching(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    depths = scan_depth(text[start:])
    for i in range(1, len(depths)):
        if depths[i] == 0 and text[start + i] in CLOSE:
            return start + i
    raise ValueError(f"unclosed bracket in {text!r}")


def parse_dict(text: str) -> dict[str, str]:
    """`{a = 1 : i32, b, "c" = [1]}` (without the braces) as a dictionary; a unit attribute has value ''."""
    entries = {}
    for part in split_top(text):
        key, _, value = part.partition("=")
        entries[key.strip().strip('"')] = value.strip()
    return entries


def int_attr(text: str) -> int:
    """`3 : i32`, `true` or `-1` as an int."""
    text = text.split(":")[0].strip()
    return {"true": 1, "false": 0}[text] if text in ("true", "false") else int(text, 0)


def int_array(text: str) -> list[int]:
    """`array<i32: 1, 0>` or `[1, 0]` as a list."""
    body = text.split(":", 1)[1] if text.startswith("array") and ":" in text else text
    return [int(t) for t in re.findall(r"-?\d+", body.replace("array<i32", "").replace("array<i64", ""))]


def strip_location(line: str) -> tuple[str, str]:
    """(the line without its trailing `loc(...)`, the location's inside)."""
    at = line.rfind(" loc(")
    if at < 0 or not line.endswith(")"):
        return line, ""
    while at >= 0:
        # A location may hold others, `loc("x"(#loc1))` or `loc(callsite(...))`: the outermost one ends the line.
        try:
            if matching(line, at + 4) == len(line) - 1:
                return line[:at], line[at + 5 : -1]
        except ValueError:
            pass
        at = line.rfind(" loc(", 0, at)
    return line, ""


LOCATION_IN_ARGUMENT = re.compile(r" loc\((?:[^()\"]|\"[^\"]*\"|\([^()]*(?:\([^()]*\)[^()]*)*\))*\)")


def strip_argument_locations(text: str) -> str:
    return LOCATION_IN_ARGUMENT.sub("", text)
