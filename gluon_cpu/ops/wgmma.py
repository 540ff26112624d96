"""wgmma: a queue per role, worked off in order; results and operands belong to it until waited for."""

from typing import Any

import numpy as np

from ..clocks import ORDER
from ..shadow import Access
from ..values import to_f32
from .base import AgentBase


class PendingUse(Exception):
    """A product's result used before its wait; the scheduler turns it into a finding with the line of the use."""

    def __init__(self, info: Any) -> None:
        super().__init__("result of an asynchronous product used before its wait")
        self.info = info


class Product:
    """One asynchronous product, and what stands for its result until a wait gives it out."""

    def __init__(self, agent: AgentBase, info: Any, a: Any, b: Any, c: Any, use_c: Any) -> None:
        self.agent = agent
        self.info = info
        self.a, self.b, self.c, self.use_c = a, b, c, use_c
        self.clk = agent.async_clk()
        agent.products += 1
        self.number = agent.products
        self.clk[ORDER, agent.product_slot] = self.number
        self.value: Any = None
        self.done = False

    def run(self) -> None:
        agent, info = self.agent, self.info
        issued = int(self.clk[ORDER, agent.slot])
        access = Access(agent.product_slot, self.number, True, info, agent.who, agent.cluster.number, issued=issued)
        a = self.operand(self.a, info.a_pattern, access)
        b = self.operand(self.b, info.b_pattern, access)
        c = self.c.value if isinstance(self.c, Product) else self.c
        self.value = info.multiply(a, b, c if self.use_c else None)
        if agent.cluster.machine.trace is not None:
            agent.cluster.machine.trace.product(agent, info)
        self.done = True
        self.a = self.b = self.c = None

    def operand(self, x: Any, pattern: Any, access: Access) -> Any:
        if pattern is None:
            return to_f32(x) if x.dtype.kind not in "iu" else x
        cta = self.agent.cta
        if cta.checks:
            runs, base = pattern.runs_at(x)
            cta.shadow.read(runs, base, self.clk, access)
        raw = pattern.load(cta.memory, x)
        return to_f32(raw) if raw.dtype.kind not in "iu" else raw

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
        raise PendingUse(self.info)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise PendingUse(self.info)

    def _used(self, *args: Any) -> Any:
        raise PendingUse(self.info)

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = _used
    __gt__ = __lt__ = __ge__ = __le__ = __neg__ = __getitem__ = _used

    def __getattr__(self, name: str) -> Any:
        raise PendingUse(self.__dict__["info"]) if not name.startswith("__") else AttributeError(name)


class WgmmaOps(AgentBase):
    def warp_group_dot(self, info: Any, a: Any, b: Any, c: Any, use_c: Any = True) -> Any:
        self.at = info
        for operand, pattern in ((a, info.a_pattern), (b, info.b_pattern)):
            if pattern is not None:
                self.fence_as_compiled(pattern, operand)
        product = Product(self, info, a, b, c, use_c)
        self.tick()
        if self.cluster.machine.picker.eager():
            self.run_products()
            product.run()
        else:
            self.product_queue.append(product)
        self.products_in_flight.append(product)
        if not info.is_async:
            return self.warp_group_dot_wait(info, 0, product)
        return product

    def run_products(self) -> None:
        queue = self.product_queue
        while queue:
            queue.popleft().run()

    def warp_group_dot_wait(self, info: Any, pendings: int, *values: Any) -> Any:
        """The values, those of products that are complete now given out as arrays."""
        self.at = info
        flight = self.products_in_flight
        newest = self.products - pendings
        while flight and flight[0].number <= newest:
            product = flight.popleft()
            while not product.done:
                self.product_queue.popleft().run()
        if newest > self.clk[ORDER, self.product_slot]:
            self.clk[ORDER, self.product_slot] = newest
        out = tuple(v.value if isinstance(v, Product) and v.number <= newest else v for v in values)
        return out[0] if len(out) == 1 else out


def multiply_float(a: Any, b: Any, c: Any, out: Any = np.float32) -> Any:
    product = a @ b
    if c is not None:
        product += c
    return product if out is np.float32 else product.astype(out)


def multiply_tf32(a: Any, b: Any, c: Any) -> Any:
    product = round_tf32(a) @ round_tf32(b)
    return product if c is None else product + c


def round_tf32(x: Any) -> Any:
    """The hardware drops the low 13 bits of an fp32 operand."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def multiply_int(a: Any, b: Any, c: Any) -> Any:
    product = a.astype(np.int32) @ b.astype(np.int32)
    return product if c is None else product + c


def multiply_half(a: Any, b: Any, c: Any) -> Any:
    """Accumulates in fp16, as `out_dtype` asks."""
    product = a @ b
    if c is not None:
        product = product + c.astype(np.float32)
    return product.astype(np.float16)
