"""What the surrounding `machine` or `check` sets: that there is one, schedule and mode of launches without, and the
list that their reports go to."""

from contextvars import ContextVar
from typing import Any

from .schedule import Schedule

DEFAULT_SCHEDULE: ContextVar[Schedule | None] = ContextVar("gluon_cpu_schedule", default=None)
DEFAULT_MODE: ContextVar[str | None] = ContextVar("gluon_cpu_mode", default=None)
RUNNING: ContextVar[bool] = ContextVar("gluon_cpu_running", default=False)
LAUNCHED: ContextVar[list[Any] | None] = ContextVar("gluon_cpu_launched", default=None)
