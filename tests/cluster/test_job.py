"""The job around the ranks on a real Slurm, with stand-ins for the roles (no models).

Rank entry, MPI, checks, signals and supervisor are the real ones. Times are printed as
the benchmarks record them.
"""

from __future__ import annotations

import json
import time

import pytest

from areal_hpc.launch.drain import read_events
from tests.cluster.conftest import STAND_IN, status, wait_for

STAND_IN_PATH = {"PYTHONPATH": str(STAND_IN)}
FAST = ("data.train.size=40", "data.heldout.size=4", "trainer.batch_size=16")


def events(paths, name):
    return [event for event in read_events(paths) if event["event"] == name]


def started(cluster, paths, job, timeout=60.0):
    wait_for(lambda: status(paths).get("train_step", 0) >= 1, timeout, f"a step of job {job}:\n{cluster.log(paths)}")


@pytest.mark.parametrize("road", ["submit", "sbatch"])
def test_both_roads_run_to_the_end_on_disjoint_nodes(cluster, model, paths, road):
    if road == "submit":
        # This one with a node of its own for rewards.
        job = cluster.submit(paths, model, *FAST, "run.total_steps=5", "groups.reward.nodes=1", **STAND_IN_PATH)
    else:
        cluster.environment, before = {**cluster.environment, **STAND_IN_PATH}, cluster.environment
        try:
            output = cluster.slurm(
                "sbatch", "--parsable", f"--output={paths.root.parent}/log", "slurm/train.sbatch",
                "configs/quickstart.yaml", f"model.path={model}", f"run.folder={paths.root}", "run.total_steps=5", *FAST,
            )  # fmt: skip
        finally:
            cluster.environment = before
        job = output.strip()
    cluster.wait_state(job, "COMPLETED", timeout=90)
    assert status(paths)["state"] == "finished" and status(paths)["train_step"] == 5
    (step,) = events(paths, "step_started")
    nodes = [node for group in step["nodes"] for node in group]
    assert len(nodes) == len(set(nodes)) == (4 if road == "submit" else 3)
    for rank, node in enumerate([nodes[1], *nodes[1:]], 1):
        assert (paths.root / f"node-{rank}").read_text() == node
    assert json.loads(paths.job.read_text())["job_id"] == job
    assert not cluster.processes(job)


def test_a_wrong_mpi_is_refused_at_once_and_not_tried_again(cluster, model, paths):
    job = cluster.submit(paths, model, *FAST, "launch.mpi=none", **STAND_IN_PATH)
    cluster.wait_state(job, "FAILED", timeout=60)
    log = cluster.log(paths)
    assert "the MPI world has 1 ranks" in log and "Slurm launched 4 tasks" in log and "srun --mpi=none" in log
    (step,) = events(paths, "step_ended")
    print(f"refused {step['seconds']:.1f} s after srun began")
    # Alone on a machine it is 2 s; the rest is room for a busy one.
    assert step["seconds"] < 10


@pytest.mark.parametrize("name", ["USR2", "TERM"])
def test_a_signal_to_the_step_drains_and_requeues(cluster, model, paths, name):
    job = cluster.submit(paths, model, *FAST, "run.total_steps=1000", **STAND_IN_PATH)
    started(cluster, paths, job)
    sent = time.time()
    cluster.slurm("scancel", f"--signal={name}", job)
    wait_for(lambda: events(paths, "requeue"), 60, "the requeue")
    print(f"{name} to requeue: {events(paths, 'requeue')[0]['time'] - sent:.1f} s")
    step = status(paths)["train_step"]
    cluster.wait_state(job, "PENDING", timeout=30)
    if name == "TERM":
        cluster.slurm("scancel", job)
        return
    cluster.wait_state(job, "RUNNING", timeout=60)
    wait_for(lambda: status(paths).get("state") == "running", 60, "the second allocation")
    assert status(paths)["train_step"] >= step and events(paths, "allocation")[-1]["restart_count"] == 1
    assert "Requeued job" in cluster.log(paths), "submitit's hook did it"
    result = cluster.cli("job", "status", str(paths.root))
    assert f"job {job}: RUNNING" in result.stdout and "component 2: RUNNING" in result.stdout
    assert cluster.cli("job", "cancel", str(paths.root)).returncode == 0
    cluster.wait_state(job, "CANCELLED", timeout=60)
    wait_for(lambda: not cluster.processes(job), 30, "every process to end")
    assert len(events(paths, "requeue")) == 1, "a cancelled job must not come back"


def test_job_stop_saves_and_ends_without_a_requeue(cluster, model, paths):
    job = cluster.submit(paths, model, *FAST, "run.total_steps=1000", **STAND_IN_PATH)
    started(cluster, paths, job)
    assert cluster.cli("job", "stop", job).returncode == 0
    cluster.wait_state(job, "FAILED", timeout=60)
    assert status(paths)["state"] == "stopped" and not events(paths, "requeue")
    # It goes on where it stopped when it is submitted again.
    step = status(paths)["train_step"]
    again = cluster.submit(paths, model, *FAST, f"run.total_steps={step + 3}", "run.on_existing=resume", **STAND_IN_PATH)
    cluster.wait_state(again, "COMPLETED", timeout=90)
    assert status(paths)["train_step"] == step + 3 and again != job


def test_preemption_drains_within_its_grace_time(cluster, model, paths):
    low = [f"groups.{role}.partition=low" for role in ("controller", "trainer", "rollout")]
    job = cluster.submit(
        paths, model, *FAST, "run.total_steps=1000", "groups.rollout.nodes=4", *low, **STAND_IN_PATH
    )  # all six nodes
    started(cluster, paths, job)
    other = cluster.slurm("sbatch", "--parsable", "--partition=high", "--nodes=1", "--exclusive", "--output=/dev/null",
                          "--wrap", "sleep 60").strip()  # fmt: skip
    wait_for(lambda: events(paths, "requeue"), 60, "the requeue")
    assert status(paths)["state"] == "stopped" and status(paths)["reason"].startswith("termination")
    cluster.wait_state(other, "RUNNING", "COMPLETED", timeout=60)
    cluster.wait_state(job, "PENDING", timeout=30)
    cluster.slurm("scancel", job, other)


def test_a_lost_rank_restarts_in_place(cluster, model, paths):
    job = cluster.submit(paths, model, *FAST, "run.total_steps=1000", **STAND_IN_PATH)
    started(cluster, paths, job)
    victim = next(
        process for process in cluster.processes(job)
        if process.environ().get("SLURM_PROCID") == "2" and "areal_hpc.main" in process.cmdline()
    )  # fmt: skip
    killed, step = time.time(), status(paths)["train_step"]
    victim.kill()
    wait_for(lambda: len(events(paths, "step_started")) == 2, 60, "the second step")
    begun = wait_for(
        lambda: (now := status(paths)) and now["state"] == "running" and now["time"] > killed + 1 and now["train_step"] > step
        and now["time"] > events(paths, "step_started")[1]["time"] and now["time"], 60, "training again",
    )  # fmt: skip
    print(f"rank lost to training again: {begun - killed:.1f} s (without loading models)")
    assert not events(paths, "requeue") and len(events(paths, "allocation")) == 1
    cluster.slurm("scancel", job)
    cluster.wait_state(job, "CANCELLED", timeout=60)


def test_a_lost_node_is_replaced_by_a_spare_one(cluster, model, paths):
    job = cluster.submit(paths, model, *FAST, "run.total_steps=1000", "launch.spare_nodes=1", **STAND_IN_PATH)
    started(cluster, paths, job)
    (first,) = events(paths, "step_started")
    lost = first["nodes"][2][0]
    try:
        cluster.slurm("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
        wait_for(lambda: len(events(paths, "step_started")) == 2, 60, f"the second step:\n{cluster.log(paths)}")
        second = events(paths, "step_started")[1]
        assert second["nodes"][:2] == first["nodes"][:2] and second["nodes"][2] != [lost]
        wait_for(lambda: status(paths).get("time", 0) > second["time"] + 1, 60, "training again")
        assert cluster.state(job) == "RUNNING"
    finally:
        cluster.slurm("scancel", job)
        cluster.wait_state(job, "CANCELLED", timeout=60)


def test_restarts_without_progress_stop(cluster, model, paths):
    job = cluster.submit(paths, model, *FAST, "run.total_steps=1000", STAND_IN_FAIL="3", **STAND_IN_PATH)
    cluster.wait_state(job, "FAILED", timeout=180)
    assert len(events(paths, "step_started")) == 3
    assert "reached no checkpoint beyond step 0" in cluster.log(paths)


def test_doctor_checks_every_node_in_a_job(cluster, model, paths):
    arguments = ["doctor", "configs/quickstart.yaml", f"model.path={model}", f"run.folder={paths.root}", "--job"]
    result = cluster.cli(*arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 ranks in one world on their planned nodes" in result.stdout
    # Three nodes that are free now.
    assert len({line.split()[1] for line in result.stdout.splitlines() if ": node: " in line}) == 3
    result = cluster.cli(*arguments, "model.path=/nowhere")
    assert result.returncode == 1 and "FAILURE model.path" in result.stdout
    assert not list(paths.root.parent.iterdir()), "doctor leaves nothing behind"
