"""What the surrounding `machine` or `check` sets: the schedule of launches that name none, and that there is one."""

from contextvars import ContextVar

from .schedule import Schedule

DEFAULT_SCHEDULE: ContextVar[Schedule | None] = ContextVar("gluon_cpu_schedule", default=None)
RUNNING: ContextVar[bool] = ContextVar("gluon_cpu_running", default=False)
