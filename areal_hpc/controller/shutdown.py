"""The end of a run: drain the rollouts, save what is trained, journal it, let every rank go."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from areal_hpc.controller.progress import Progress
from areal_hpc.messages import Drain, Drained, Stop
from areal_hpc.mpi.world import World
from areal_hpc.stop import StopFlag

if TYPE_CHECKING:
    from areal_hpc.controller.loop import Controller

log = logging.getLogger(__name__)
POLL_S = 0.005


def drain(controller: Controller, stop: StopFlag) -> None:
    """Commit what is finished, save, tell everybody to leave.

    Raises TimeoutError naming who did not answer within run.drain_deadline_s.
    """
    begin = time.monotonic()
    trainers, world, limit_s = controller.trainers, controller.world, controller.config.run.drain_deadline_s
    reason = stop.reason or "the run is finished"
    if stop:
        controller.progress.event(f"stopping: {reason}")
    waiting = set(world.rollout_ranks)
    for rank in sorted(waiting):
        # A deterministic run answers anew: the random numbers of an answer's rest would be others.
        keep = bool(stop) and not controller.config.run.deterministic
        world.channel.send(rank, Drain(abandon=True, reason=reason, keep=keep))
    while waiting or trainers.busy or trainers.saved_step < trainers.train_step:
        for source, message in world.channel.poll():
            controller.progress.heard(source)
            if isinstance(message, Drained):
                waiting.discard(source)
            else:
                controller.handle(source, message)
        controller.ledger.sync()
        trainers.give_up_publishing()
        if not trainers.busy and trainers.saved_step < trainers.train_step:
            trainers.checkpoint_due = True
            trainers.save(export_hf=False)
        controller.progress.write_status(lambda: {**controller.status(), "state": "stopping", "reason": reason})
        if time.monotonic() - begin > limit_s:
            late = [world.describe(rank) for rank in sorted(waiting)]
            late += [world.describe(world.trainer_ranks[0])] if trainers.busy else []
            raise TimeoutError(f"waited {limit_s:g} s (run.drain_deadline_s) at the stop for {', '.join(late)}")
        time.sleep(POLL_S)
    seconds = time.monotonic() - begin
    state = "finished" if controller.finished else "stopped"
    controller.ledger.add("stop", state=state, reason=reason, train_step=trainers.train_step, drain_s=seconds)
    controller.ledger.close()
    log.info("%s at step %d: %s; drained in %.1f s", state, trainers.train_step, reason, seconds)
    if stop:
        kept, tokens = controller.counters["answers_kept"], controller.counters["tokens_kept"]
        controller.progress.event(
            f"stopped at step {trainers.train_step} after draining for {seconds:.1f} s; {kept} unfinished answers "
            f"({tokens} tokens) are kept",
            drain_s=seconds, answers_kept=kept, tokens_kept=tokens,
        )  # fmt: skip
    final = {**controller.status(), "state": state, "reason": reason, "requeue": stop.requeue, "drain_s": seconds}
    let_everybody_go(world, controller.progress, final)


def let_everybody_go(world: World, progress: Progress, final: dict[str, object]) -> None:
    """Stop to all ranks, and the last status."""
    for rank in (*world.trainer_ranks, *world.rollout_ranks, *world.reward_ranks):
        world.channel.send(rank, Stop(str(final["reason"])))
    progress.write_status(lambda: final, force=True)
    progress.close()
