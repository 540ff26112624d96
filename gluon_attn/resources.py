"""What a compiled kernel takes of the card, read from its machine code: no card is needed to look."""

import re
from dataclasses import dataclass

from .runtime.assembler import disassemble
from .runtime.compat import CompiledKernel

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(@!?U?P\w+\s+)?(.*?)\s*;")
LABEL = re.compile(r"^\s*(\.L_x_\d+):")
# Only a conditional branch closes a loop: an unconditional one backwards returns from a wait's out-of-line retry.
BRANCH = re.compile(r"^(?:IF BRA\b|BRA\.U !?UP\d).*`\((\.L_x_\d+)\)")

EXP2 = ("MUFU.EX2",)
PRODUCTS = ("HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA")  # of Hopper; of Blackwell, 16 bits and 8
TENSOR_MEMORY_LOADS = ("LDTM",)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The body of a role's walk over key blocks: an innermost loop with products, exponentials or loads from tensor
    memory in it. On Hopper the softmax roles do it all; on Blackwell these are loops of three roles.

    products: product instructions. exp2: exponentials. tensor_memory_loads: Blackwell's.
    spills: stores to and loads from local memory.
    waits: Hopper's, for products; as many as the source has, or the assembler has serialised the products.
    early_exp2: exponentials before the last wait.
    """

    instructions: int
    products: int
    waits: int
    spills: int
    exp2: int
    early_exp2: int
    tensor_memory_loads: int


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Of a whole kernel. first_role_registers: per thread, of the role in the warps that the kernel is launched with:
    what the other roles, which ask for a number, leave it."""

    first_role_registers: int
    smem_bytes: int
    instructions: int
    products: int
    tma_loads: int
    tma_stores: int
    spills: int
    loops: tuple[Loop, ...]


def resources(kernel: CompiledKernel) -> Resources:
    """Count what is in the kernel's machine code, by Triton's own disassembler."""
    code, labels = instructions(disassemble(kernel))
    return Resources(
        first_role_registers=first_role_registers(kernel.asm["ptx"]),
        smem_bytes=kernel.metadata.shared,
        instructions=len(code),
        products=count(code, *PRODUCTS),
        tma_loads=count(code, "UTMALDG"),
        tma_stores=count(code, "UTMASTG"),
        spills=count(code, "STL", "LDL"),
        loops=steady_loops(code, labels),
    )


def first_role_registers(ptx: str) -> int:
    """What the first role has: the number it comes down to from the 256 that the launch's own warps begin with."""
    asked = [int(n) for n in re.findall(r"setmaxnreg\.\w+\S*\s+(\d+)", ptx)]
    return asked[1] if asked[0] == 256 else asked[0]


def instructions(sass: str) -> tuple[list[str], dict[str, int]]:
    """The instructions of a disassembly without their predicates, but for a conditional branch, which begins with IF;
    and for each label the index of the instruction after it."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := INSTRUCTION.search(line):
            code.append("IF " * (found[1] is not None and found[2].startswith("BRA")) + found[2])
    return code, labels


def count(code: list[str], *names: str) -> int:
    return sum(line.startswith(names) for line in code)


def steady_loops(code: list[str], labels: dict[str, int]) -> tuple[Loop, ...]:
    """The innermost loops that compute."""
    spans = {
        (labels[branch[1]], i)
        for i, line in enumerate(code)
        if (branch := BRANCH.match(line)) and labels.get(branch[1], i + 1) <= i
    }
    computing = {(a, b) for a, b in spans if count(code[a : b + 1], *PRODUCTS, *EXP2, *TENSOR_MEMORY_LOADS)}
    innermost = [s for s in computing if not any(s[0] <= a and b <= s[1] and (a, b) != s for a, b in computing)]
    return tuple(loop_of(code[first : last + 1]) for first, last in sorted(innermost))


def loop_of(body: list[str]) -> Loop:
    waits = [i for i, line in enumerate(body) if line.startswith("WARPGROUP.DEPBAR")]
    return Loop(
        instructions=len(body),
        products=count(body, *PRODUCTS),
        waits=len(waits),
        spills=count(body, "STL", "LDL"),
        exp2=count(body, *EXP2),
        early_exp2=count(body[: waits[-1]], *EXP2) if waits else 0,
        tensor_memory_loads=count(body, *TENSOR_MEMORY_LOADS),
    )
