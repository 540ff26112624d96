"""tcgen05: a queue per issuing role, worked off in order, from shared memory to accumulators in tensor memory.

Tensor memory is kept by columns: word (column c, lane l) is at byte 512 c + 4 l, so that a range of columns is one
piece. In pair mode the even CTA issues for both; it reads both CTAs' operands and writes both accumulators.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import report
from ..clocks import ORDER, join
from ..findings import OutOfBounds
from ..memory import Bytes
from ..shadow import Access, Conflict, Shadow, Unwritten
from ..values import to_f32
from .shared import NoSlot, SharedOps
from .tma import AnswerTask, Task, TmaOps

if TYPE_CHECKING:
    from ..cta import Cta

COLUMN_BYTES = 512
TENSOR_MEMORY_BYTES = 512 * COLUMN_BYTES
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class TensorMemory:
    def __init__(self, cta: "Cta") -> None:
        self.cta = cta
        self.memory = Bytes(TENSOR_MEMORY_BYTES)
        self.shadow = Shadow(self.tell, initialised=False)
        self.allocations: list[Any] = []

    def name_at(self, m: int) -> str:
        for info in reversed(self.allocations):
            if info.offset <= m < info.offset + info.bytes:
                count = info.bytes // info.stride if info.stride else 1
                index = f"[{(m - info.offset) // info.stride}]" if count > 1 else ""
                return f"{info.name}{index}, tensor memory of CTA {self.cta.number}"
        return f"tensor memory of CTA {self.cta.number}, column {m // COLUMN_BYTES}"

    def place(self, start: int, end: int) -> str:
        """Bytes [start, end) in the kernel's words; in part of a buffer, its columns: views may share them."""
        name, where = self.name_at(start), [i for i in self.allocations if i.offset <= start < i.offset + i.bytes]
        if not where:
            return name
        base = where[-1].offset + (start - where[-1].offset) // where[-1].stride * where[-1].stride
        first, last = (start - base) // COLUMN_BYTES, (end - 1 - base) // COLUMN_BYTES
        if end - start >= where[-1].stride or end - start < COLUMN_BYTES:  # all of it, or some lanes of each column
            return name
        return f"{name}, columns {first} to {last}" if last > first else f"{name}, column {first}"

    def tell(self, e: Conflict | Unwritten) -> None:
        place = self.place(e.start, e.end)
        if isinstance(e, Unwritten):
            finding = report.unwritten(e, f"{place} is read before anybody wrote it")
        else:
            finding = report.race(e, place)
        self.cta.cluster.machine.found(finding)

    def read(self, pattern: Any, m: int, clk: Any, access: Access) -> Any:
        if self.cta.checks:
            runs, base = pattern.runs_at(m)
            self.shadow.read(runs, base, clk, access)
        return pattern.load(self.memory, m)

    def write(self, pattern: Any, m: int, clk: Any, access: Access, data: Any) -> None:
        if self.cta.checks:
            runs, base = pattern.runs_at(m)
            self.shadow.write(runs, base, clk, access)
        pattern.store(self.memory, m, data)


class PipeTask(Task):
    """An entry of a role's tcgen05 queue; the next becomes ready when it is done."""

    engine = "tcgen05"

    def __init__(self, agent: Any, info: Any, number: int) -> None:
        clk = agent.async_clk()
        clk[ORDER, agent.pipe_slot] = number
        super().__init__(agent, info, clk, agent.pipe_slot, number)

    def step(self) -> None:
        super().step()
        queue = self.agent.pipe
        queue.popleft()
        if queue:
            # What came before in the queue is over: its knowledge belongs to what follows.
            join(queue[0].clk, self.clk)
            self.cluster.machine.add_task(queue[0])

    def access(self) -> Access:
        return super().access()._replace(is_async=False)


class MmaTask(PipeTask):
    def __init__(self, agent: Any, info: Any, number: int, a: int, b: int, acc: int, use_acc: Any,
                 scales: tuple[int, int] | None = None) -> None:  # fmt: skip
        super().__init__(agent, info, number)
        self.a, self.b, self.acc, self.use_acc, self.scales = a, b, acc, use_acc, scales

    def run(self) -> None:
        info, cluster = self.info, self.cluster
        me = self.agent.cta.number
        ctas = [cluster.ctas[me]] + ([cluster.ctas[me ^ 1]] if info.two_ctas else [])
        lefts = [self.operand(cta, self.a, info.a_pattern, info.a_tensor) for cta in ctas]
        rights = [self.operand(cta, self.b, info.b_pattern, info.b_tensor) for cta in ctas]
        # In a pair, each CTA holds half of the columns of the right operand, and both halves serve both.
        right = np.concatenate(rights, axis=1) if info.two_ctas and info.b_split else rights[0]
        for cta, left in zip(ctas, lefts, strict=True):
            tensor = cta.tensor()
            if self.scales is not None:
                left, scaled_right = self.scale(cta, left, right)
            else:
                scaled_right = right
            old = tensor.read(info.acc_pattern, self.acc, self.clk, self.access()) if self.use_acc else None
            value = info.multiply(left, scaled_right, old)
            tensor.write(info.acc_pattern, self.acc, self.clk, self.access(), value)
            cta.touched[self.slot] = (self.time, self.who, info)

    def operand(self, cta: "Cta", m: int, pattern: Any, in_tensor_memory: bool) -> Any:
        if in_tensor_memory:
            raw = cta.tensor().read(pattern, m, self.clk, self.access())
        else:
            if cta.checks:
                runs, base = pattern.runs_at(m)
                cta.shadow.read(runs, base, self.clk, self.access()._replace(is_async=True))
                cta.touched[self.slot] = (self.time, self.who, self.info)
            raw = pattern.load(cta.memory, m)
        return to_f32(raw) if raw.dtype.kind not in "iu" else raw

    def scale(self, cta: "Cta", left: Any, right: Any) -> tuple[Any, Any]:
        info = self.info
        assert self.scales is not None
        factors = []
        for m, pattern in zip(self.scales, (info.a_scale_pattern, info.b_scale_pattern), strict=True):
            raw = cta.tensor().read(pattern, m, self.clk, self.access())
            if raw.dtype.kind in "iu":
                raw = np.exp2(raw.view(np.uint8).astype(np.float32) - 127.0)
            factors.append(raw.astype(np.float32))
        if info.a_padded:
            left = E2M1[left.view(np.uint8) >> 2 & 15]
        elif info.a_packed:
            left = unpack_fp4(left, 1)
        if info.b_packed:
            right = unpack_fp4(right, 0)
        group = left.shape[1] // factors[0].shape[1]
        return left * np.repeat(factors[0], group, 1), right * np.repeat(factors[1], group, 1).T


def unpack_fp4(x: Any, axis: int) -> Any:
    """Two e2m1 values to a byte, the low half first, along an axis."""
    byte = x.view(np.uint8)
    return np.stack([E2M1[byte & 15], E2M1[byte >> 4]], axis + 1).reshape(
        *(2 * n if d == axis else n for d, n in enumerate(byte.shape))
    )


class CopyTask(PipeTask):
    def __init__(self, agent: Any, info: Any, number: int, source: int, target: int) -> None:
        super().__init__(agent, info, number)
        self.source, self.target = source, target

    def run(self) -> None:
        info, cluster = self.info, self.cluster
        me = self.agent.cta.number
        for c in [me, me ^ 1] if info.two_ctas else [me]:
            cta = cluster.ctas[c]
            if cta.checks:
                runs, base = info.source_pattern.runs_at(self.source)
                cta.shadow.read(runs, base, self.clk, self.access()._replace(is_async=True))
                cta.touched[self.slot] = (self.time, self.who, info)
            data = info.source_pattern.load(cta.memory, self.source)
            cta.tensor().write(info.target_pattern, self.target, self.clk, self.access(), data)


class CommitTask(PipeTask):
    def __init__(self, agent: Any, info: Any, number: int, barrier: int, targets: list[int]) -> None:
        super().__init__(agent, info, number)
        self.barrier, self.targets = barrier, targets

    def run(self) -> None:
        agent, info = self.agent, self.info
        for home in sorted({t & ~info.zero for t in self.targets}):
            b = agent.barrier_at(home, self.barrier)
            b.arrive(self.clk, self.who, info, 1, 0, self.slot, self.time)
            b.cta.note_use(self.barrier, self.slot, self.time, self.who, info, remote=True)


class Tcgen05Ops(TmaOps, SharedOps):
    def tmem_alloc(self, info: Any, data: Any = None) -> int:
        self.at = info
        tensor = self.cta.tensor()
        if info not in tensor.allocations:
            tensor.allocations.append(info)
        if self.cta.checks:
            tensor.shadow.fresh(info.offset, info.offset + info.bytes, self.access(info))
        if data is not None:
            self.tmem_store(info, info.offset, data)
        return int(info.offset)

    def tmem_index(self, info: Any, m: Any, i: int) -> Any:
        if isinstance(m, NoSlot):
            return m
        if not 0 <= i < info.count:
            return NoSlot(
                OutOfBounds(
                    f"{self.who}: index {i} into {self.cta.tensor().name_at(m)}, which has {info.count} slots\n"
                    f"    at {info.site.where}\n      {info.site.source}",
                    (info.site,),
                )
            )
        return m + int(i) * int(info.stride)

    def tmem_load(self, info: Any, m: int) -> Any:
        self.at = info
        return self.cta.tensor().read(info.pattern, m, self.clk, self.access(info))

    def tmem_load_reduce(self, info: Any, m: int) -> Any:
        value = self.tmem_load(info, m)
        x = np.abs(value) if info.absolute else value
        if info.propagate_nan:
            return value, (np.max if info.largest else np.min)(x, -1)
        return value, (np.fmax if info.largest else np.fmin).reduce(x, -1)

    def tmem_store(self, info: Any, m: int, data: Any) -> None:
        self.at = info
        self.cta.tensor().write(info.pattern, m, self.clk, self.access(info), data)

    def enqueue(self, task: PipeTask) -> None:
        self.pipe.append(task)
        if len(self.pipe) == 1:
            self.cluster.machine.add_task(task)

    def next_in_pipe(self) -> int:
        self.pipe_count += 1
        return self.pipe_count

    def mma(self, info: Any, a: int, b: int, acc: int, use_acc: Any, barriers: Any = (), scales: Any = None) -> None:
        self.at = info
        if info.two_ctas and self.cta.number & 1:
            return
        for operand, pattern, in_tensor_memory in (
            (a, info.a_pattern, info.a_tensor),
            (b, info.b_pattern, info.b_tensor),
        ):
            if not in_tensor_memory:
                self.fence_as_compiled(pattern, operand)
        self.enqueue(MmaTask(self, info, self.next_in_pipe(), a, b, acc, use_acc, scales))
        self.tick()
        for barrier_info, m, wanted in barriers:
            if wanted:
                self.commit(barrier_info, m)

    def commit(self, info: Any, m: int) -> None:
        self.at = info
        c = self.cta.number
        if info.two_ctas and c & 1:
            return
        targets = {c}
        for bits in info.shared_over:  # CTA bits over which an operand is the same
            targets |= {c ^ x for x in range(self.cluster.num_ctas) if x & ~bits == 0}
        if info.two_ctas:
            targets |= {t ^ 1 for t in targets}
        self.enqueue(CommitTask(self, info, self.next_in_pipe(), m, sorted(targets)))
        self.tick()

    def tmem_copy(self, info: Any, source: int, target: int) -> None:
        self.at = info
        if info.two_ctas and self.cta.number & 1:
            return
        self.fence_as_compiled(info.source_pattern, source)
        self.enqueue(CopyTask(self, info, self.next_in_pipe(), source, target))
        self.tick()

    # Cluster launch control

    def clc_try_cancel(self, info: Any, m: int, barrier: int) -> None:
        """Ask for a program that has not started, to do its work in its stead."""
        self.at = info
        if self.cta.number:
            return  # one request per cluster; every CTA gets the answer
        machine = self.cluster.machine

        def fetch(task: Task) -> Any:
            if machine.waiting:
                x, y, z = machine.program_list[machine.waiting.popleft()]
                return np.array([1 | x << 32, y | z << 32], np.int64)
            return np.zeros(2, np.int64)

        self.issue_load(info, fetch, m, barrier, list(range(self.cluster.num_ctas)), AnswerTask)

    def clc_load(self, info: Any, m: int) -> tuple[int, int]:
        low, high = (int(x) for x in self.local_load(info, m))
        return low, high


def clc_cancelled(answer: tuple[int, int]) -> bool:
    return bool(answer[0] & 1)


def clc_program(answer: tuple[int, int], dim: int) -> int:
    return (answer[0] >> 32, answer[1] & 0xFFFFFFFF, answer[1] >> 32)[dim]
