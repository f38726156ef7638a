"""Roles without models, for tests of the job around them: put this folder on PYTHONPATH.

The rank entry, MPI, start checks, signals and messages are the real ones; only the
roles' `run` functions are replaced, before anything imports them. The controller "trains" a step
every STAND_IN_STEP_S seconds and saves each; STAND_IN_FAIL=RANK kills that world rank
once it has seen a step, in every attempt.
"""

import os
import sys
import types


def controller(config, world, paths, telemetry):
    import time

    from areal_hpc.messages import Stop, StepDone
    from areal_hpc.stop import FLAG
    from areal_hpc.telemetry import replace_json

    step = max((int(path.name[5:]) for path in paths.checkpoints.glob("step-*")), default=0)
    others = (*world.trainer_ranks, *world.rollout_ranks, *world.reward_ranks)

    def tell(state, **values):
        values = {"state": state, "time": time.time(), "train_step": step, "hosts": world.hosts, **values}
        replace_json(paths.status, values)

    while step < config.run.total_steps and not FLAG:
        tell("running")
        end = time.time() + float(os.environ.get("STAND_IN_STEP_S", "0.2"))
        while time.time() < end:
            # As the real one does: without calls MPI moves nothing, the first message to a rank least of all.
            world.channel.poll()
            time.sleep(0.005)
        for rank in others:
            world.channel.send(rank, StepDone(step, step, {"accuracy": 0.0}))
        if "STAND_IN_FAIL" not in os.environ:
            step += 1
            paths.checkpoint(step).mkdir()
    begin = time.time()
    time.sleep(float(os.environ.get("STAND_IN_DRAIN_S", "0.2")))
    tell("finished" if step >= config.run.total_steps else "stopped", requeue=FLAG.requeue, reason=FLAG.reason,
         drain_s=time.time() - begin)
    for rank in others:
        world.channel.send(rank, Stop(FLAG.reason))


def follower(config, world, paths, telemetry):
    import signal
    import time

    from areal_hpc.messages import Stop

    (paths.root / f"node-{world.world_rank}").write_text(os.environ["SLURMD_NODENAME"])
    while True:
        for _, message in world.channel.poll():
            if isinstance(message, Stop):
                return
            if os.environ.get("STAND_IN_FAIL") == str(world.world_rank):
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)


for package, run in (("controller", controller), ("trainer", follower), ("rollout", follower), ("rewards", follower)):
    module = types.ModuleType(f"areal_hpc.{package}.loop")
    module.run = run
    sys.modules[module.__name__] = module
