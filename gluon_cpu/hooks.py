"""Small hooks into the frontend: a driver that answers for a card that is not there, and `breakpoint()` in kernels."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

BREAKPOINT = "gluon_cpu.breakpoint"


@contextlib.contextmanager
def frontend_hooks(arch: int) -> Iterator[None]:
    """`breakpoint()` compiles: to a print of all that has a name, at which the machine stops."""
    from .compat import CodeGenerator

    namespace = CodeGenerator.builtin_namespace
    CodeGenerator.builtin_namespace = namespace | {"breakpoint": make_breakpoint()}
    try:
        yield
    finally:
        CodeGenerator.builtin_namespace = namespace


def make_breakpoint() -> Any:
    from .compat import builtin, gl

    @builtin
    def breakpoint_(_semantic: Any = None, _generator: Any = None) -> None:
        """Hands the names and values of the scope to the machine, through an operation that keeps its place."""
        names: list[str] = []
        values: list[Any] = []
        constants: dict[str, str] = {}

        def collect(name: str, value: Any) -> None:
            if isinstance(value, gl.tensor):
                names.append(name)
                values.append(value)
            elif isinstance(value, gl.constexpr):
                constants[name] = repr(value.value)
            elif hasattr(value, "__dict__") and getattr(type(value), "__triton_aggregate__", False):
                for field, inner in vars(value).items():
                    if not field.startswith("_") and field != "type":
                        collect(f"{name}.{field}", inner)

        for name, value in list(_generator.lscope.items()):
            collect(name, value)
        payload = json.dumps({"names": names, "constants": constants}).encode().hex()
        _semantic.builder.create_print(
            f"{BREAKPOINT}:{payload}", False, [v.handle for v in values],
            [v.dtype.is_int_signed() if v.dtype.is_int() else False for v in values],
        )  # fmt: skip

    return breakpoint_


def uses_breakpoint(kernel: Any) -> bool:
    return "breakpoint" in kernel.fn.__code__.co_names


def knob_options(kernel: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Options that Triton's own launch adds; instrumentation is its business, not ours."""
    fixed = {"debug": True, "instrumentation_mode": "", "sanitize_overflow": False}
    return fixed | {"enable_fp_fusion": kwargs.get("enable_fp_fusion", True)}


class StandInDriver:
    """Answers what host code asks of Triton's driver about the card."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        from .compat import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


@contextlib.contextmanager
def stand_in_driver(target: str) -> Iterator[None]:
    """Host code that asks Triton for its target gets this one, for as long as the context lasts."""
    from .compat import driver
    from .front import arch_of

    before = driver._active
    driver._active = StandInDriver(arch_of(target))
    try:
        yield
    finally:
        driver._active = before
