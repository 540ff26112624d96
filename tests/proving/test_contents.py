"""What proofs take as given of memory: loads of known words, and maps of packed tensors. No verifier is needed."""

import dataclasses
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gluon_attn.forward.table import BLACKWELL
from gluon_attn.kernels.common.packed import RECORD
from gluon_attn.runtime.descriptors import PACKED_WRAP, View
from proving.attention import ARCH, FEATURES, Case, one_row_block, packed
from proving.contents import take_as_given
from proving.kernel_input import kernel_input, parameter_of, strides_forwards
from proving.launch import Pointer, TensorMap
from proving.prove import Proof, Task
from proving.reductions import reduce_by_exchange
from proving.registers import definitions, is_constant
from proving.verifier import Limits
from tests.proving.test_rewrites import HEAD, changed

PTX = """.visible .entry kernel(
	.param .u32 kernel_param_0,
	.param .u64 .ptr .global .align 1 kernel_param_1,
	.param .u64 .ptr .global .align 1 kernel_param_2
)
{{
	.reg .b32 	%r<99>;
	ld.param.b64 	%rd1, [kernel_param_1];
	ld.param.b64 	%rd2, [kernel_param_2];
	mad.wide.s32 	%rd3, %r1, 4, %rd1;
	add.s64 	%rd4, %rd3, 12;
	{load}
	ret;
}}
"""
LOADS = (
    "ld.global.b32 {{ %r5 }}, [ %rd{} + 0 ];",
    "@%p3 ld.global.b32 {{ %r5 }}, [ %rd{} + 8 ];",
    "@!%p3 ld.global.b32 {{ %r5 }}, [ %rd{} + 8 ];",
)


OPERATIONS: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "mov": int,
    "selp": lambda if_true, if_false, condition: if_true if condition else if_false,
    "setp.eq": operator.eq,
    "setp.ne": operator.ne,
    "or": operator.or_,
    "and": operator.and_,
    "not": operator.not_,
}


def executed(text: str, registers: dict[str, int], guard: bool, memory: int) -> int:
    """What is in %r5 after these statements. registers: what they read. guard: %p3. memory: what a load finds."""
    found = {"%r5": -7, "%p3": guard, **registers}

    def value(operand: str) -> int:
        return found[operand] if operand.startswith("%") else int(operand)

    for statement in text.strip(" \t{}").split(";"):
        words = statement.replace(",", " ").split()
        if not words or words[0] == ".reg":
            continue
        if words[0].startswith("@"):
            if not found[words[0][1:]]:
                continue
            words = words[1:]
        operation, target, *reads = words
        if operation.startswith("ld.global"):
            found["%r5"] = memory
            continue
        kind = ".".join(operation.split(".")[:2]) if operation.startswith("setp") else operation.split(".")[0]
        found[target] = int(OPERATIONS[kind](*map(value, reads)))
    return found["%r5"]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("register", [1, 3, 4])
def test_a_load_of_a_known_word_is_that_word_and_others_are_loads(load, register):
    before = PTX.format(load=load.format(register))
    after, count = take_as_given(before, 1, {2: 20, 5: -50})
    assert count == 1
    (line,) = (line for line in after.split("\n") if "ld.global" in line)
    (twin,) = {word.rstrip(",") for word in line.split() if word.startswith("%given")}
    for guard in (False, True):
        asked = guard if "@%p3" in load else not guard if "@!" in load else True
        for index in range(8):
            at = 4 * index + (8 if "+ 8" in load else 0)
            want = {8: 20, 20: -50}.get(at, 1000) if asked else -7
            assert executed(line, {twin: 4 * index}, guard, 1000) == want, (guard, index)


def test_distances_are_added_up_beside_addresses():
    before = PTX.format(load=LOADS[0].format(4))
    after, _ = take_as_given(before, 1, {2: 20})
    lines = [b for a, b in changed(before, after)]
    assert lines[1:4] == [
        "ld.param.b64 \t%rd1, [kernel_param_1]; mov.b64 %given1_0, 0;",
        "mad.wide.s32 \t%rd3, %r1, 4, %rd1; mad.wide.s32 %given1_1, %r1, 4, %given1_0;",
        "add.s64 \t%rd4, %rd3, 12; add.s64 %given1_2, %given1_1, 12;",
    ]


@pytest.mark.parametrize(
    "load",
    [
        "ld.global.v4.b32 { %r5, %r6, %r7, %r8 }, [ %rd3 + 0 ];",  # several words
        "ld.global.b32 { %r5 }, [ %rd2 + 0 ];",  # of other memory
        "st.global.b32 [ %rd3 + 0 ], { %r5 };",  # the kernel writes to it
        "ld.global.b32 { %r5 }, [ %rd3 + 0 ]; st.global.b32 [ %rd4 + 0 ], { %r5 };",
        "sub.s64 %rd5, %rd3, 4;",  # an address that is made otherwise
        "mov.b64 %rd3, %rd2; ld.global.b32 { %r5 }, [ %rd3 + 0 ];",  # or may be another one
        "add.s64 %rd3, %rd1, %rd1; ld.global.b32 { %r5 }, [ %rd3 + 0 ];",  # or twice the pointer
        "ld.param.b64 %rd1, [kernel_param_2]; ld.global.b32 { %r5 }, [ %rd1 + 0 ];",  # or another one
        "ld.param.u64 %rd5, [kernel_param_1]; ld.global.b32 { %r5 }, [ %rd3 + 0 ];",  # it is read otherwise too
        "@%p3 ld.param.b64 %rd5, [kernel_param_1]; ld.global.b32 { %r5 }, [ %rd3 + 0 ];",
        "mov.b64 %rd5, kernel_param_1; ld.global.b32 { %r5 }, [ %rd3 + 0 ];",
        "ld.global.b64 %rd3, [ %rd2 + 0 ]; ld.global.b32 { %r5 }, [ %rd3 + 0 ];",  # an address from memory
    ],
)
def test_other_loads_are_left_alone(load):
    before = PTX.format(load=load.replace("; ", ";\n\t"))
    assert take_as_given(before, 1, {0: 20}) == (before, 0)


def test_a_store_beside_a_load_is_seen():
    before = PTX.format(load="{ ld.global.b32 { %r5 }, [ %rd3 + 0 ]; st.global.b32 [ %rd4 + 0 ], { %r5 }; }")
    assert take_as_given(before, 1, {0: 20}) == (before, 0)


def exchanged(text: str, values: list[int]) -> list[int]:
    """What each lane of a warp has in %r6 after these statements. values: in %r5."""
    reduced: dict[str, Callable[[int, int], int]] = {"min.s32": min, "max.s32": max, "add.s32": operator.add}
    found = {"%r5": values, "%r6": [0] * len(values)}
    for statement in text.strip("\t {}").split("; "):
        operation, _, rest = statement.strip(" ;").partition(" ")
        target, *reads = (word.strip() for word in rest.split(","))
        if operation == "shfl.sync.bfly.b32":
            assert reads[2:] == ["31", "-1"]
            found[target] = [found[reads[0]][lane ^ int(reads[1])] for lane in range(32)]
        elif operation == "mov.b32":
            found[target] = found[reads[0]]
        elif operation != ".reg":
            found[target] = list(map(reduced[operation], *(found[read] for read in reads)))
    return found["%r6"]


@pytest.mark.parametrize(("kind", "want"), [("min.s32", -5), ("max.s32", 26), ("add.s32", 336)])
def test_a_reduction_over_all_lanes_becomes_exchanges(kind, want):
    before = HEAD + f"\tmov.b32 \t%r2, -1;\n\tredux.sync.{kind} \t%r6, %r5, %r2;\n"
    after, count = reduce_by_exchange(before)
    ((_, line),) = changed(before, after)
    assert count == 1
    assert exchanged(line, [(7 * lane) % 32 - 5 for lane in range(32)]) == [want] * 32


@pytest.mark.parametrize("change", [("-1", "255"), ("min.s32", "or.b32"), ("min.s32", "min.u32")])
def test_other_reductions_are_left_alone(change):
    before = HEAD + "\tmov.b32 \t%r2, -1;\n\tredux.sync.min.s32 \t%r6, %r5, %r2;\n"
    kept = before.replace(*change)
    assert kept != before
    assert reduce_by_exchange(kept) == (kept, 0)


def test_a_packed_map_steps_forwards_and_others_stay():
    view = View.packed(torch.empty(1, 2, 300, 64))
    packed_map = TensorMap(
        name="q_desc", storage="q_desc", offset_bytes=0, element_type="bf16", element_bytes=2, shape=view.shape,
        strides=view.strides, box=(1, 1, 1, 128, 64), swizzle="128B", fill="zero",
    )  # fmt: skip
    strides = strides_forwards(packed_map)
    assert strides == (64, *view.strides[1:])
    # Every tile moves by as many elements, in addresses that wrap around.
    for head, end, row in ((0, 0, 1), (1, 299, 1 - 128), (1, 100, 1 - 64)):
        at = (PACKED_WRAP, head, end, PACKED_WRAP + row, 0)
        real, moved = (sum(c * s for c, s in zip(at, of, strict=True)) for of in (view.strides, strides))
        assert (moved - real) % 2**64 == 2 * PACKED_WRAP * 64
        assert real % 2**64 == head * 300 * 64 + (end + row) * 64
    plain = dataclasses.replace(packed_map, shape=(300, 64), strides=(128, 1), box=(128, 64))
    assert strides_forwards(plain) == (128, 1)


def case(**options: Any) -> Case:
    row = next(row for row in BLACKWELL if ARCH in row.config.archs)
    return dataclasses.replace(one_row_block(torch.bfloat16, row), **options)


def test_words_are_those_that_the_kernel_before_writes():
    before, step = packed(case()).steps()
    assert (before.launch.programs, step.launch.programs) == (1, 1)
    assert before.words == {"cu_q_ptr": {0: 0, 1: 229, 2: 269}, "cu_k_ptr": {0: 0, 1: 195, 2: 295}}
    first, second = RECORD.value, 2 * RECORD.value
    (records,) = step.words.values()
    assert records[0] == 2
    assert [records[first + i] for i in range(6)] == [0, 229, 0, 195, 0, 0]
    assert [records[second + i] for i in range(6)] == [229, 40, 195, 100, 1, 0]
    assert len(records) == 1 + 2 * 6
    before, step = case(**FEATURES["documents"]).steps()
    assert (list(before.words), list(step.words)) == ([], ["aux0_ptr"])
    assert list(step.words["aux0_ptr"].values())[:4] == [0, 192, 0, 128]  # queries 0 to 63: document 0, keys 0 to 129
    (step,) = case().steps()
    assert step.words == {}


@pytest.mark.parametrize("options", [{"lengths": ((130, 150), (40, 60)), "clusters": 1}, FEATURES["documents"]])
def test_a_task_takes_its_words_as_given(options):
    made = case(**options)
    launch = made.steps()[-1].described()
    (known,) = (arg for arg in launch.arguments if isinstance(arg, Pointer) and arg.words)
    task = Task.of(Proof(name="", launch=lambda: launch, source=str, limits=Limits()))
    assert task.rewrites[f"words of {known.name}"] >= 10
    index = parameter_of(launch, known.name)
    assert {"parameter": index, "type": "pointer", "space": "global", "object": known.storage} in task.input[
        "declarations"
    ]
    assert f"[attention_forward_param_{index}]; mov.b64" in task.ptx
    assert task.input == kernel_input(launch)


COPY = re.compile(r"cp\.async\.bulk\.tensor\.5d\.[^{]*\{(?P<coords>[^}]*)\}")


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 20)}])
def test_every_copy_of_packed_rows_is_as_many_steps_along_the_first_dimension(options):
    """What `strides_forwards` rests on. PTX has coordinates innermost first."""
    lines = packed(case(**options)).steps()[-1].described().ptx.split("\n")
    copies = [found for line in lines if (found := COPY.search(line))]
    assert len(copies) >= 4
    assert sum("cp.async.bulk.tensor" in line for line in lines) == len(copies)
    sources = definitions(lines)
    for found in copies:
        assert is_constant(found["coords"].split(",")[-1].strip(), PACKED_WRAP, sources)


def test_memory_that_two_arguments_share_is_refused():
    launch = packed(case()).steps()[-1].described()

    def task(name: str, storage: str) -> None:
        (own,) = (arg for arg in launch.arguments if arg.name == name)
        assert isinstance(own, Pointer)
        moved = dataclasses.replace(own, storage=storage)
        made = dataclasses.replace(launch, arguments=tuple(moved if arg is own else arg for arg in launch.arguments))
        Task.of(Proof(name="", launch=lambda: made, source=str, limits=Limits()))

    with pytest.raises(ValueError, match="o_desc: expected memory of its own, as its map is moved, got o_desc twice"):
        task("lse_ptr", "o_desc")
    with pytest.raises(ValueError, match="records_ptr: expected memory of its own, as its words are given"):
        task("records_ptr", "lse_ptr")
