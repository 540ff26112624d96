"""A printed TTGIR module to operations, blocks and regions."""

import re
from dataclasses import dataclass, field

from .locations import NOWHERE, LocationTable, Site, at_call
from .text import (
    matching,
    parse_dict,
    scan_depth,
    split_top,
    strip_argument_locations,
    strip_location,
)
from .types import Type, TypeParser

VALUE = re.compile(r"%[\w.$\-]+(?:#\d+)?")
STRING = re.compile(r'"[^"]*"')  # a quote within one is printed as \22
RESULTS = re.compile(r"^(%[\w.$\-]+(?::\d+)?(?:, %[\w.$\-]+(?::\d+)?)*) = ")


@dataclass
class Op:
    """One operation. `body` is its text between the name and the types, attribute dictionaries taken out."""

    name: str
    results: list[str]
    operands: list[str]
    types: str
    result_types: list[Type]
    operand_types: list[Type]
    attrs: dict[str, str]
    body: str
    site: Site
    text: str
    regions: list["Region"] = field(default_factory=list)
    successors: list[tuple[str, list[str]]] = field(default_factory=list)


@dataclass
class Block:
    label: str
    args: list[str] = field(default_factory=list)
    arg_types: list[Type] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


@dataclass
class Region:
    """label: `default`, `partition0`, ... in a warp_specialize."""

    blocks: list[Block]
    label: str = ""
    num_warps: int = 0


@dataclass
class Function:
    name: str
    args: list[str]
    arg_types: list[Type]
    result_types: list[Type]
    body: Region
    site: Site
    public: bool


@dataclass
class Module:
    attrs: dict[str, str]
    functions: dict[str, Function]
    types: TypeParser

    @property
    def kernel(self) -> Function:
        return next(f for f in self.functions.values() if f.public)


class Parser:
    """Reads the printed form line by line; an operation is one line, or a line that opens regions."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.at = 0
        self.types = TypeParser()
        self.locations = LocationTable()

    def module(self) -> Module:
        body: list[int] = []
        for i, line in enumerate(self.lines):
            alias = re.match(r"(#\w+) = (.*)$", line)
            if not alias:
                body.append(i)
            elif alias[2].startswith("loc("):
                self.locations.raw[alias[1]] = alias[2][4:-1]
            else:
                self.types.aliases[alias[1]] = alias[2]
        self.lines = [self.lines[i] for i in body if self.lines[i].strip()]
        attrs: dict[str, str] = {}
        functions = {}
        while self.at < len(self.lines):
            line = self.lines[self.at].strip()
            if line.startswith("module"):
                if "{" in line[:-1]:
                    start = line.index("{")
                    attrs = parse_dict(line[start + 1 : matching(line, start)])
                self.at += 1
            elif line.startswith("tt.func"):
                f = self.function()
                functions[f.name] = f
            else:
                self.at += 1
        return Module(attrs, functions, self.types)

    def function(self) -> Function:
        header, location = self.lines[self.at].strip(), ""
        self.at += 1
        header = strip_argument_locations(header)
        m = re.match(r"tt\.func (\w+ )?@([\w.\-$\"]+)\(", header)
        assert m, header
        end = matching(header, m.end() - 1)
        args, types = self.arguments(header[m.end() : end])
        rest = header[end + 1 :]
        results = self.type_list(rest.split("->", 1)[1].split("attributes")[0].rstrip("{ ")) if "->" in rest else []
        region, tail = self.region()
        _, location = strip_location(tail)
        return Function(m[2].strip('"'), args, types, results, region, self.locations.site(location), m[1] == "public ")

    def arguments(self, text: str) -> tuple[list[str], list[Type]]:
        """`%a: i32 {tt.divisibility = 16 : i32}, %b: ...`"""
        names, types = [], []
        for part in split_top(strip_argument_locations(text)):
            name, _, kind = part.partition(":")
            depth = scan_depth(kind)
            brace = next((i for i, ch in enumerate(kind) if ch == "{" and depth[i] == 0), len(kind))
            names.append(name.strip())
            types.append(self.types.parse(kind[:brace]))
        return names, types

    def type_list(self, text: str) -> list[Type]:
        text = text.strip()
        if text.startswith("(") and matching(text, 0) == len(text) - 1:
            text = text[1:-1]
        return [self.types.parse(t) for t in split_top(text)]

    def region(self, label: str = "", num_warps: int = 0) -> tuple[Region, str]:
        """The region whose opening brace ended the line before; returns it and the line that closes it."""
        blocks = [Block("^entry")]
        while True:
            line = self.lines[self.at].strip()
            if line.startswith("}"):
                self.at += 1
                return Region(blocks, label, num_warps), line
            if line.startswith("^"):
                self.at += 1
                line = strip_argument_locations(line.split("  //")[0].strip())
                m = re.match(r"(\^\w+)(?:\((.*)\))?:", line)
                assert m, line
                names, types = self.arguments(m[2] or "")
                if blocks[-1].label == "^entry" and not blocks[-1].ops and len(blocks) == 1:
                    blocks[0] = Block(m[1], names, types)
                else:
                    blocks.append(Block(m[1], names, types))
                continue
            blocks[-1].ops.append(self.op())

    def op(self) -> Op:
        raw = self.lines[self.at].strip()
        self.at += 1
        # The regions of a warp_specialize start on lines of their own.
        opens_region = raw.endswith("{") or raw.startswith("ttg.warp_specialize") or " = ttg.warp_specialize" in raw
        text, location = (raw, "") if opens_region else strip_location(raw)
        results: list[str] = []
        m = RESULTS.match(text)
        rest = text
        if m:
            for part in m[1].split(", "):
                name, _, count = part.partition(":")
                results += [f"{name}#{i}" for i in range(int(count))] if count else [name]
            rest = text[m.end() :]
        name_match = re.match(r'"?([a-z_]\w*(?:\.\w+)+)"?', rest)
        assert name_match, raw
        name = name_match[1]
        rest = rest[name_match.end() :]
        site = self.locations.site(location) if location else NOWHERE
        if opens_region:
            return self.op_with_regions(name, results, rest, text)
        return self.simple(name, results, rest, site, text)

    def simple(self, name: str, results: list[str], rest: str, site: Site, text: str) -> Op:
        body, types = self.split_types(rest)
        body, attrs = self.take_attrs(body)
        operand_types, result_types = self.types_of(types)
        successors = []
        for m in re.finditer(r"\^\w+(\()?", body):
            args = []
            if m[1]:
                inside = body[m.end() : matching(body, m.end() - 1)]
                args = VALUE.findall(split_top(inside, ":")[0])
            successors.append((m[0].rstrip("("), args))
        operands = VALUE.findall(STRING.sub("", body))  # assembly may name %clock
        return Op(
            name, results, operands, types, result_types, operand_types, attrs, body.strip(), site, text,
            [], successors,
        )  # fmt: skip

    @staticmethod
    def split_types(rest: str) -> tuple[str, str]:
        """(text before the last top-level ` : `, the types after it)."""
        depths = scan_depth(rest)
        at = rest.rfind(" : ")
        while at >= 0:
            if depths[at] == 0:
                return rest[:at], rest[at + 3 :]
            at = rest.rfind(" : ", 0, at)
        return rest, ""

    @staticmethod
    def take_attrs(body: str) -> tuple[str, dict[str, str]]:
        """Take `{...}` and `<{...}>` out of a body."""
        attrs: dict[str, str] = {}
        while True:
            depths = scan_depth(body)
            at = next((i for i, ch in enumerate(body) if ch == "{" and depths[i] in (0, 1) and (
                depths[i] == 0 or body[i - 1] == "<")), -1)  # fmt: skip
            if at < 0:
                return body, attrs
            end = matching(body, at)
            attrs |= parse_dict(body[at + 1 : end])
            start = at
            if body[at - 1 : at] == "<":
                start, end = at - 1, end + 1
            body = body[:start] + " " + body[end + 1 :]

    def types_of(self, types: str) -> tuple[list[Type], list[Type]]:
        """(operand types, result types) as far as the printed form tells: before and after the arrow."""
        parts = split_arrow(types)
        if len(parts) == 2:
            return self.mixed(parts[0]), self.type_list(parts[1])
        if " to " in types:
            source, target = types.split(" to ")
            return [self.types.parse(source)], [self.types.parse(target)]
        return self.mixed(parts[0]) if parts[0] else [], []

    def mixed(self, text: str) -> list[Type]:
        """Types separated by `,` or `*`, perhaps in parentheses."""
        text = text.strip()
        if text.startswith("(") and matching(text, 0) == len(text) - 1:
            text = text[1:-1]
        return [self.types.parse(t) for part in split_top(text) for t in split_top(part, "*")]

    def op_with_regions(self, name: str, results: list[str], rest: str, text: str) -> Op:
        header = strip_argument_locations(rest.rstrip().removesuffix("{").rstrip())
        regions: list[Region] = []
        if name == "ttg.warp_specialize":
            tail = self.warp_specialize_regions(regions)
        else:
            region, tail = self.region()
            regions.append(region)
            while tail.endswith("{"):
                region, tail = self.region()
                regions.append(region)
        tail, location = strip_location(tail)
        site = self.locations.site(location)
        tail = tail.lstrip("}) ").strip()
        if name in ("scf.for", "scf.if", "scf.while"):
            op = self.control(name, results, header, tail, site, text)
        else:
            whole = header.rstrip("(").rstrip() + " " + tail if name != "ttg.warp_specialize" else header + " " + tail
            op = self.simple(name, results, whole.replace(" attributes ", " "), site, text)
        op.regions = regions
        if name == "ttg.warp_specialize":
            op.site = at_call(site, "warp_specialize")
            op.operands = VALUE.findall(header[: matching(header, header.index("(")) + 1])
        return op

    def warp_specialize_regions(self, regions: list[Region]) -> str:
        """`default {` ... `}` `partition0(...) num_warps(4) {` ... `} : (...) -> ()`"""
        while True:
            line = self.lines[self.at].strip()
            self.at += 1
            if line.startswith("default"):
                region, tail = self.region("default")
            elif line.startswith("partition"):
                clean = strip_argument_locations(line)
                label = re.match(r"\w+", clean)
                assert label
                start = clean.index("(")
                end = matching(clean, start)
                warps = re.search(r"num_warps\((\d+)\)", clean[end:])
                region, tail = self.region(label[0], int(warps[1]) if warps else 0)
                names, types = self.arguments(clean[start + 1 : end])
                region.blocks[0].args, region.blocks[0].arg_types = names, types
            else:
                raise NotImplementedError(f"in ttg.warp_specialize: {line}")
            regions.append(region)
            if re.match(r"\} (: |loc|$)", tail) and not self.next_is_partition():
                return tail

    def next_is_partition(self) -> bool:
        return bool(re.match(r"(partition\d+\(|default \{)", self.lines[self.at].strip()))

    def control(self, name: str, results: list[str], header: str, tail: str, site: Site, text: str) -> Op:
        """scf.for, scf.if and scf.while print their operands, arguments and types each in their own way."""
        attrs = parse_dict(tail[tail.index("{") + 1 : tail.rindex("}")]) if "{" in tail else {}
        unsigned = name == "scf.for" and "unsigned" in header.split("%")[0]
        header = header.strip()
        result_types = []
        arrow = split_arrow(header)
        if len(arrow) == 2:
            result_types = self.type_list(split_top_colon(arrow[1])[0])
        if unsigned:
            attrs["unsigned"] = ""
        return Op(name, results, VALUE.findall(header), header, result_types, [], attrs, header, site, text)


def split_arrow(text: str) -> list[str]:
    depths = scan_depth(text)
    at = text.find("->")
    while at >= 0:
        if depths[at] == 0:
            return [text[:at].strip(), text[at + 2 :].strip()]
        at = text.find("->", at + 2)
    return [text.strip()]


def split_top_colon(text: str) -> list[str]:
    depths = scan_depth(text)
    at = text.rfind(" : ")
    while at >= 0:
        if depths[at] == 0:
            return [text[:at].strip(), text[at + 3 :].strip()]
        at = text.rfind(" : ", 0, at)
    return [text.strip()]


def parse_module(text: str) -> Module:
    return Parser(text).module()
