"""What follows when the step has ended: done, requeue, restart in place, or give up. Pure.

Called by the supervisor; a step that fails is started again from the last checkpoint
inside the allocation, as long as that helps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

MAX_IDLE_RESTARTS = 2
"""Restarts in a row that reach no new checkpoint before the run is given up."""
MIN_USEFUL_S = 60.0
"""Time before the stop signal that makes a restart worth its while."""


class Action(Enum):
    DONE = "done"
    REQUEUE = "requeue"
    RESTART = "restart"
    FAIL = "fail"


@dataclass(frozen=True)
class StepEnd:
    """How a step ended."""

    returncode: int
    state: str
    """The controller's last word: finished, stopped, or "" where it had none."""
    wants_requeue: bool = False
    stop_reason: str = ""
    """Why the supervisor had told the step to stop; "" if it had not."""
    refusal: str = ""
    """A rank refused to start or ended and starting again cannot help: a user's mistake, a full disk."""
    step_before: int = 0
    step_after: int = 0
    """Last checkpoint when the step began and when it ended."""


@dataclass(frozen=True)
class Tally:
    """Restarts so far in this allocation."""

    restarts: int = 0
    idle_restarts: int = 0

    def after(self, end: StepEnd) -> Tally:
        """Count a failed attempt; the first one is no restart, however short it was."""
        if end.step_after > end.step_before or self.restarts == 0:
            return replace(self, idle_restarts=0)
        return replace(self, idle_restarts=self.idle_restarts + 1)

    def restarted(self) -> Tally:
        return replace(self, restarts=self.restarts + 1)


@dataclass(frozen=True)
class Decision:
    action: Action
    text: str


def decide(end: StepEnd, tally: Tally, *, max_restarts: int, seconds_left: float) -> Decision:
    """`tally` counts this end already; `seconds_left` is the time until the stop signal is due."""
    if end.state == "finished":
        note = f" (srun ended with code {end.returncode} afterwards)" if end.returncode else ""
        return Decision(Action.DONE, f"the run is finished{note}")
    if end.refusal:
        return Decision(Action.FAIL, end.refusal)
    if end.state == "stopped" and (end.returncode == 0 or end.stop_reason):
        if end.wants_requeue or end.stop_reason:
            return Decision(Action.REQUEUE, f"stopped and saved at step {end.step_after}")
        return Decision(Action.FAIL, f"stopped on request at step {end.step_after}")
    cause = f"the step ended with code {end.returncode}"
    if end.stop_reason:
        return Decision(
            Action.REQUEUE, f"{cause} before it had saved; going on from the checkpoint of step {end.step_after}"
        )
    if tally.idle_restarts >= MAX_IDLE_RESTARTS:
        return Decision(
            Action.FAIL,
            f"{cause}; the last {tally.idle_restarts} restarts reached no checkpoint beyond step "
            f"{end.step_after}, so another would not either: read the ranks' logs",
        )
    if tally.restarts >= max_restarts:
        return Decision(Action.FAIL, f"{cause} after {tally.restarts} restarts (launch.max_step_restarts)")
    if seconds_left < MIN_USEFUL_S:
        return Decision(Action.REQUEUE, f"{cause} with {max(seconds_left, 0):.0f} s left before the stop")
    return Decision(Action.RESTART, f"{cause}; starting again from the checkpoint of step {end.step_after}")
