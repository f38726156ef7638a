"""What follows a step's end: restart in place, back into the queue, or the end."""

import pytest

from areal_hpc.launch.decide import Action, StepEnd, Tally, decide


def verdict(end, tally=Tally(), *, max_restarts=3, seconds_left=1000.0):
    return decide(end, tally, max_restarts=max_restarts, seconds_left=seconds_left)


@pytest.mark.parametrize(
    ("end", "action"),
    [
        (StepEnd(0, "finished"), Action.DONE),
        (StepEnd(137, "finished"), Action.DONE),
        (StepEnd(0, "stopped", wants_requeue=True), Action.REQUEUE),
        (StepEnd(0, "stopped", stop_reason="walltime"), Action.REQUEUE),
        (StepEnd(137, "stopped", wants_requeue=True, stop_reason="walltime"), Action.REQUEUE),
        (StepEnd(0, "stopped"), Action.FAIL),
        (StepEnd(137, "", stop_reason="termination"), Action.REQUEUE),
        (StepEnd(137, ""), Action.RESTART),
        # A rank that is lost takes the controller's drain with it, whatever the controller said last.
        (StepEnd(137, "stopped", wants_requeue=True), Action.RESTART),
        (StepEnd(0, ""), Action.RESTART),
        (StepEnd(2, "", refusal="world of one"), Action.FAIL),
    ],
)
def test_what_follows_a_step(end, action):
    assert verdict(end).action is action


def test_no_restart_without_time_or_restarts_left():
    assert verdict(StepEnd(1, ""), seconds_left=30.0).action is Action.REQUEUE
    assert verdict(StepEnd(1, ""), Tally(restarts=3)).action is Action.FAIL
    assert "launch.max_step_restarts" in verdict(StepEnd(1, ""), Tally(restarts=3)).text
    assert verdict(StepEnd(1, ""), max_restarts=0).action is Action.FAIL


def attempts(*ends, max_restarts=100):
    """Actions after each failed attempt, given (checkpoint before, after)."""
    tally, actions = Tally(), []
    for before, after in ends:
        end = StepEnd(1, "", step_before=before, step_after=after)
        tally = tally.after(end)
        decision = verdict(end, tally, max_restarts=max_restarts)
        actions.append(decision.action)
        if decision.action is not Action.RESTART:
            return actions, decision.text
        tally = tally.restarted()
    return actions, ""


def test_two_restarts_in_a_row_without_progress_end_it():
    actions, text = attempts((0, 0), (0, 0), (0, 0), (0, 0))
    assert actions == [Action.RESTART, Action.RESTART, Action.FAIL]
    assert "no checkpoint beyond step 0" in text
    actions, _ = attempts((0, 5), (5, 5), (5, 10), (10, 10), (10, 10), (10, 10))
    assert actions == [Action.RESTART] * 4 + [Action.FAIL]
    actions, _ = attempts(*[(step, step + 1) for step in range(20)])
    assert actions == [Action.RESTART] * 20
