"""The whole real system in a heterogeneous job: walltime, signals in every phase, a lost rank, scancel.

One long run meets everything, since loading the models is most of the time. Times are
printed as the benchmarks record them.
"""

from __future__ import annotations

import json
import math
import time

import psutil
from omegaconf import OmegaConf

from areal_hpc.analysis.audit import audit
from areal_hpc.controller.ledger import read_ledger
from areal_hpc.launch.drain import read_events
from tests.cluster.conftest import status, wait_for

# Long enough phases to hit each of them: answers run to the limit, an evaluation after every second step.
TASK = (
    "rewards.fn=tests.stack.run_rewards:parity", "rollout.group_size=8", "trainer.batch_size=64", "rollout.max_num_seqs=64",
    "rollout.max_new_tokens=160", "model.max_context=192", "algorithm.max_staleness=1", "trainer.weight_history=2",
    "data.heldout.size=48", "data.train.size=400", "eval.every=2", "checkpoint.every=100000", "run.drain_deadline_s=25",
    "groups.trainer.nodes=2", "groups.trainer.ranks_per_node=1", "launch.time_min=60", "launch.signal_lead_s=60",
)  # fmt: skip
PHASES = {"generation": "groups from", "training": "to finish step", "evaluation": "to answer the evaluation"}
LOAD_S = 420.0


def events(paths, name):
    return [event for event in read_events(paths) if event["event"] == name]


def records(paths, kind):
    lines = paths.metrics.read_text().splitlines() if paths.metrics.exists() else []
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


def in_phase(paths, phase, allocations):
    """Whether the run of that allocation is in `phase` now, and has trained a step before."""
    now = status(paths)
    if len(events(paths, "allocation")) != allocations or now.get("state") != "running":
        return False
    fresh = time.time() - now["time"] < 1.5 and now["time"] > events(paths, "allocation")[-1]["time"]
    return fresh and PHASES[phase] in now["waiting_for"] and now["train_step"] > 0


def tree(cluster, job):
    """The ranks and everything below them, engines included (their titles hide their environment)."""
    found = {}
    for process in cluster.processes(job):
        try:
            for member in (process, *process.children(recursive=True)):
                found[member.pid] = member
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def engines(cluster, job):
    """The engine's core processes: they are told by their titles."""
    found = []
    for process in tree(cluster, job):
        try:
            if "EngineCore" in process.name():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def set_end(cluster, job, minutes):
    """Move the end of the allocation, as an administrator would: `minutes` of walltime in all."""
    for component in cluster.slurm("squeue", "-h", "-j", job, "-o", "%A").split():
        cluster.slurm("scontrol", "update", f"jobid={component}", f"timelimit={minutes}")


def wait_allocation(cluster, paths, job, number):
    """Allocation `number` begins, with time enough that only a signal of the test ends it, however slow the machine."""
    wait_for(lambda: len(events(paths, "allocation")) == number, 90, f"allocation {number}:\n{cluster.log(paths)}")
    set_end(cluster, job, 60)


def left(processes):
    return [process for process in processes if process.is_running() and process.status() != "zombie"]


def test_a_run_outlives_walltime_signals_and_a_lost_rank(cluster, model, paths):
    job = cluster.submit(paths, model, *TASK, "run.total_steps=100000")
    wait_for(lambda: records(paths, "step"), LOAD_S, f"a first step:\n{cluster.log(paths)}")
    # Only now does the clock run against it: loading takes minutes on a slow machine. Slurm signals up to
    # 90 s before the end, and the supervisor asks for the end once a minute.
    elapsed = time.time() - events(paths, "allocation")[0]["time"]
    set_end(cluster, job, math.ceil((elapsed + 155) / 60))
    wait_for(lambda: len(events(paths, "requeue")) == 1, 300, f"the walltime's requeue:\n{cluster.log(paths)}")
    walltime = events(paths, "stop")[0]
    assert walltime["reason"] == "walltime" and 60 <= walltime["seconds_left"] < 125

    for number, (name, phase) in enumerate([("USR2", "generation"), ("TERM", "training"), ("TERM", "evaluation")], 2):
        wait_allocation(cluster, paths, job, number)
        wait_for(lambda: in_phase(paths, phase, number), LOAD_S, f"{phase} in allocation {number}:\n{cluster.log(paths)}")
        processes, sent = tree(cluster, job), time.time()
        cluster.slurm("scancel", f"--signal={name}", job)
        wait_for(lambda: len(events(paths, "requeue")) == number, 90, f"requeue {number}:\n{cluster.log(paths)}")
        assert status(paths)["state"] == "stopped" and events(paths, "step_ended")[-1]["returncode"] == 0
        print(f"{name} in {phase}: drained in {status(paths)['drain_s']:.1f} s, requeued "
              f"{events(paths, 'requeue')[-1]['time'] - sent:.1f} s after the signal")  # fmt: skip
        assert len(processes) > 8, "the engine's processes were seen"
        wait_for(lambda: not left(processes), 30, f"{left(processes)} to end")

    wait_allocation(cluster, paths, job, 5)
    wait_for(lambda: in_phase(paths, "training", 5), LOAD_S, f"training in allocation 5:\n{cluster.log(paths)}")
    last = status(paths)["train_step"] + 3
    config = OmegaConf.load(paths.config)
    config.run.total_steps = last
    OmegaConf.save(config, paths.config)
    victim = next(
        process for process in cluster.processes(job)
        if process.environ().get("SLURM_PROCID") == "2" and "areal_hpc.main" in process.cmdline()
    )  # fmt: skip
    processes, killed = tree(cluster, job), time.time()
    victim.kill()
    steps = len(events(paths, "step_started"))
    wait_for(lambda: len(events(paths, "step_started")) > steps, 60, f"the step to start again:\n{cluster.log(paths)}")
    assert not [process for process in left(processes) if "areal_hpc.main" in process.cmdline()
                and "srun" not in process.cmdline()[0]], "no rank outlives its step"  # fmt: skip
    cluster.wait_state(job, "COMPLETED", timeout=2 * LOAD_S)
    again = min(record["time"] for record in records(paths, "step") if record["time"] > killed)
    print(f"rank lost to training again: {again - killed:.1f} s, restarted after "
          f"{events(paths, 'step_started')[steps]['time'] - killed:.1f} s")  # fmt: skip

    assert status(paths)["state"] == "finished" and status(paths)["train_step"] == last
    assert all(len({node for group in event["nodes"] for node in group}) == 4 for event in events(paths, "step_started"))
    # The surviving history: every step once, every prompt accounted for once, by journal and shards.
    result = audit(paths)
    assert not result.problems, result.problems
    assert result.counts["trained"] == last * 8 and result.counts["steps"] == last
    assert sum(record["k"] == "run" for record in read_ledger(paths.ledger)) == len(events(paths, "step_started")) == 6
    assert len(events(paths, "allocation")) == 5, "the lost rank cost no second wait in the queue"
    for event in events(paths, "drained"):
        print(f"{event['reason']}: step ended {event['seconds']:.1f} s after the stop (controller {event['controller_s']:.1f} s)")


def test_scancel_ends_everything(cluster, model, paths):
    job = cluster.submit(paths, model, *TASK, "run.total_steps=100000")
    # The supervisor, srun, four ranks, reward worker, and the engine's processes.
    wait_for(lambda: engines(cluster, job), LOAD_S, "an engine")
    processes, sent = tree(cluster, job), time.time()
    cluster.slurm("scancel", job)
    cluster.wait_state(job, "CANCELLED", timeout=60)
    wait_for(lambda: not left(processes) and not cluster.processes(job), 60, f"{left(processes)} to end")
    print(f"scancel to the last process's end: {time.time() - sent:.1f} s")
    assert not events(paths, "requeue")
