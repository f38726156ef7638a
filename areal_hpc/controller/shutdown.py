"""The end of a run: drain the rollouts, save what is trained, journal it, let every rank go."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from areal_hpc.messages import Drain, Drained, SaveCheckpoint, Stop

if TYPE_CHECKING:
    from areal_hpc.controller.loop import Controller
    from areal_hpc.stop import StopFlag

log = logging.getLogger(__name__)
POLL_S = 0.005


def drain(controller: Controller, stop: StopFlag) -> None:
    """Commit what is finished, save, tell everybody to leave.

    Raises TimeoutError naming who did not answer within run.drain_deadline_s.
    """
    begin = time.monotonic()
    reason = stop.reason or "the run is finished"
    if stop:
        controller.progress.event(f"stopping: {reason}")
    waiting = set(controller.world.rollout_ranks)
    for rank in waiting:
        controller.channel.send(rank, Drain(abandon=True, reason=reason))
    deadline = begin + controller.config.run.drain_deadline_s
    while waiting or _trainer_busy(controller) or controller.saved_step < controller.train_step:
        for source, message in controller.channel.poll():
            controller.progress.heard(source)
            if isinstance(message, Drained):
                waiting.discard(source)
            else:
                controller.handle(source, message)
        controller.ledger.sync()
        _save_if_needed(controller)
        controller.progress.write_status(lambda: {**controller.status(), "state": "stopping", "reason": reason})
        if time.monotonic() > deadline:
            late = [controller.world.describe(rank) for rank in sorted(waiting)]
            late += ["the trainer"] if _trainer_busy(controller) else []
            raise TimeoutError(
                f"waited {controller.config.run.drain_deadline_s:.0f} s (run.drain_deadline_s) at the stop for "
                f"{', '.join(late)}"
            )
        time.sleep(POLL_S)
    seconds = time.monotonic() - begin
    state = "finished" if controller.training_over else "stopped"
    controller.ledger.add("stop", state=state, reason=reason, train_step=controller.train_step, drain_s=seconds)
    controller.ledger.close()
    for rank in (*controller.world.trainer_ranks, *controller.world.rollout_ranks):
        controller.channel.send(rank, Stop(reason))
    log.info("%s at step %d: %s; drained in %.1f s", state, controller.train_step, reason, seconds)
    if stop:
        controller.progress.event(
            f"stopped at step {controller.train_step} after draining for {seconds:.1f} s", drain_s=seconds
        )
    final = {**controller.status(), "state": state, "reason": reason, "requeue": stop.requeue, "drain_s": seconds}
    controller.progress.write_status(lambda: final, force=True)
    controller.progress.close()


def _trainer_busy(controller: Controller) -> bool:
    return controller.step_sent or controller.publishing or controller.saving


def _save_if_needed(controller: Controller) -> None:
    """Save the last step once the trainer is free; a version not yet live needs no publication any more."""
    controller.pending_publish = controller.checkpoint_due = None
    if not _trainer_busy(controller) and controller.saved_step < controller.train_step:
        for rank in controller.world.trainer_ranks:
            controller.channel.send(rank, SaveCheckpoint(controller.train_step, controller.version))
        controller.saving = True
