"""What the surrounding `machine` or `check` sets: that there is one, and schedule and mode of launches without."""

from contextvars import ContextVar

from .schedule import Schedule

DEFAULT_SCHEDULE: ContextVar[Schedule | None] = ContextVar("gluon_cpu_schedule", default=None)
DEFAULT_MODE: ContextVar[str | None] = ContextVar("gluon_cpu_mode", default=None)
RUNNING: ContextVar[bool] = ContextVar("gluon_cpu_running", default=False)
