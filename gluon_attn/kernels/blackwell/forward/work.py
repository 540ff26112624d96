"""The tiles that a program computes, as each role walks them: in the same order, each for itself."""

from channels import WorkConsumer
from gluon_attn.runtime.compat import aggregate, gl, jit

from ...common.schedule import TileSchedule


@aggregate
class Work:
    """The number of the tile at hand, not below `schedule.tiles` when there is none left. Immutable: `next()` returns
    the next."""

    number: gl.tensor
    answers: WorkConsumer
    schedule: TileSchedule
    DYNAMIC: gl.constexpr

    @jit
    def next(self):
        """As the schedule has it, or DYNAMIC: what the hardware hands out, where every tile is an item."""
        if self.DYNAMIC:
            number, answers = self.answers.acquire(none=self.schedule.tiles)
        else:
            number, answers = self.schedule.following(self.number), self.answers
        return Work(number, answers, self.schedule, self.DYNAMIC)


@jit
def first_work(wires, schedule, TILE: gl.constexpr):
    return Work(schedule.first(), wires.items.consumer(), schedule, TILE.dynamic)
