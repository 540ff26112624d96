"""The items that a program computes, as each role walks them: in the same order, each for itself."""

from channels import WorkConsumer
from gluon_attn.compat import aggregate, gl, jit

from ..common.schedule import TileSchedule


@aggregate
class Work:
    """The item at hand; `schedule.items` when there is none left. Immutable: `next()` returns the next."""

    item: gl.tensor
    answers: WorkConsumer
    schedule: TileSchedule
    DYNAMIC: gl.constexpr

    @jit
    def next(self):
        """Static: every gl.num_programs-th item. DYNAMIC: what the hardware hands out."""
        if self.DYNAMIC:
            item, answers = self.answers.acquire(none=self.schedule.items)
            return Work(item, answers, self.schedule, self.DYNAMIC)
        else:
            return Work(self.item + gl.num_programs(0), self.answers, self.schedule, self.DYNAMIC)


@jit
def first_work(wires, schedule, TILE: gl.constexpr):
    return Work(gl.program_id(0), wires.items.consumer(), schedule, TILE.dynamic)
