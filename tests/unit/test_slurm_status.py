"""States of heterogeneous jobs from recorded output of squeue, sacct and scontrol (Slurm 22.05)."""

import time
from pathlib import Path

import pytest

from areal_hpc.config.errors import ConfigError
from areal_hpc.launch import slurm, status
from areal_hpc.launch.status import latest, leader_id, parse_sacct, parse_squeue, summarize
from areal_hpc.paths import RunPaths

RECORDED = Path(__file__).with_name("slurm_outputs")
SITUATIONS = {
    "running": ("7", "RUNNING", "RUNNING"),
    "cancelled": ("7", "CANCELLED", "CANCELLED"),
    "requeued": ("10", "PENDING", "PENDING"),
    "rerunning": ("10", "RUNNING", "RUNNING"),
    "completed": ("1", "COMPLETED", "COMPLETED"),
    "reused-failed": ("1", "FAILED", "FAILED"),
    "simple": ("13", "COMPLETED", "COMPLETED"),
    "pending": ("4", "PENDING", "UNKNOWN"),
}


def recorded(program, situation):
    return (RECORDED / f"{program}-{situation}.txt").read_text()


@pytest.mark.parametrize("situation", sorted(SITUATIONS))
def test_squeue_and_sacct_agree(situation):
    job, by_squeue, by_sacct = SITUATIONS[situation]
    queue, accounts = parse_squeue(recorded("squeue", situation)), parse_sacct(recorded("sacct", situation))
    assert {row.job_id for row in [*queue, *accounts]} == {job}
    assert summarize(latest(queue)) == by_squeue
    assert summarize(latest(accounts)) == by_sacct


def test_submitit_alone_does_not_know_these_rows():
    slurm_module = pytest.importorskip("submitit.slurm.slurm")
    info = slurm_module.SlurmInfoWatcher().read_info(recorded("sacct", "running"))
    assert "7" not in info, "submitit learned heterogeneous jobs: hetjob.HetWatcher may go"


def test_nodes_of_every_component_in_order():
    rows = latest(parse_squeue(recorded("squeue", "running")))
    assert [row.nodes for row in rows] == [("n1",), ("n2", "n3"), ("n4",)]
    rows = latest(parse_sacct(recorded("sacct", "requeued")))
    assert [row.nodes for row in rows] == [(), (), ()], "a job that waits again holds no nodes"


def test_a_reused_id_belongs_to_the_job_submitted_last():
    rows = parse_sacct(recorded("sacct", "reused-failed"))
    assert {row.state for row in rows} == {"COMPLETED", "FAILED"}
    assert summarize(latest(rows)) == "FAILED"
    # Only the old job is in the records yet: it must not be taken for ours.
    old = parse_sacct(recorded("sacct", "completed"))
    submitted = slurm.parse_time("2026-11-29T17:36:00")
    assert latest(old, submitted) == [] and summarize(latest(old, submitted)) == "UNKNOWN"
    assert summarize(latest(old, slurm.parse_time("2026-11-29T17:31:50"))) == "COMPLETED"


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (["COMPLETED", "COMPLETED", "COMPLETED"], "COMPLETED"),
        (["FAILED", "CANCELLED", "CANCELLED"], "FAILED"),
        (["COMPLETED", "CANCELLED", "NODE_FAIL"], "COMPLETED"),
        (["COMPLETED", "RUNNING", "COMPLETED"], "RUNNING"),
        (["PENDING", "PENDING", "REQUEUED"], "PENDING"),
        (["COMPLETING", "COMPLETED", "COMPLETED"], "COMPLETING"),
        (["UNKNOWN", "UNKNOWN", "UNKNOWN"], "UNKNOWN"),
        (["UNKNOWN", "TIMEOUT", "TIMEOUT"], "TIMEOUT"),
        (["", "UNKNOWN", "RUNNING"], "RUNNING"),
    ],
)
def test_one_state_for_all_components(states, state):
    text = "\n".join(f"5+{offset}|{name}|n{offset}|None" for offset, name in enumerate(states))
    assert summarize(latest(parse_squeue(text))) == state


def test_odd_lines_are_left_out():
    text = "JobID|State|NodeList|Submit\n5+0.batch|FAILED|n1|x\n5_[1-3]|PENDING||\n|RUNNING|n1|\n5+0|CANCELLED by 12|None assigned|Unknown\n"
    (row,) = parse_sacct(text)
    assert row.state == "CANCELLED" and row.nodes == () and row.submitted == 0.0
    assert parse_sacct("") == [] and parse_squeue("\n") == []


@pytest.mark.parametrize(("text", "leader"), [("123", "123"), ("123+2", "123"), ("123.0", "123"), (" 9 ", "9")])
def test_job_ids(text, leader):
    assert leader_id(text) == leader


@pytest.mark.parametrize("text", ["", "abc", "123_4", "--all", "123;id"])
def test_what_is_no_job_id(text):
    with pytest.raises(ConfigError, match="neither a run folder"):
        leader_id(text)


# ---- scontrol and sinfo ----------------------------------------------------------


def test_components_of_a_running_job():
    parts = slurm.parse_job_records(recorded("scontrol", "running"))
    assert [part.job_id for part in parts] == ["7", "8", "9"] and [part.offset for part in parts] == [0, 1, 2]
    assert [part.nodes for part in parts] == [("n1",), ("n2", "n3"), ("n4",)]
    assert {part.state for part in parts} == {"RUNNING"}
    assert time.strftime("%H:%M:%S", time.localtime(parts[0].end_time)) == "17:35:04"


def test_restarts_and_simple_jobs():
    assert {part.restarts for part in slurm.parse_job_records(recorded("scontrol", "rerunning"))} == {1}
    (part,) = slurm.parse_job_records(recorded("scontrol", "simple"))
    assert part.offset == 0 and part.state == "COMPLETED"


@pytest.mark.parametrize(
    ("state", "good"),
    [("idle", True), ("allocated", True), ("mixed", True), ("completing", True), ("idle*", False), ("down", False),
     ("down*", False), ("drained", False), ("draining", False), ("failing", False), ("unknown", False),
     ("maint", False), ("powering_down", False), ("reboot", False)],
)  # fmt: skip
def test_nodes_on_which_nothing_may_be_started(state, good):
    assert slurm.usable(state) is good


def test_node_states_of_several_partitions():
    states = slurm.parse_node_states("n1 mixed\nn1 mixed\nn2 down*\n\n")
    assert states == {"n1": "mixed", "n2": "down*"}


# ---- the commands together -------------------------------------------------------


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """Programs that print what was recorded; returns a function that sets it."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def set_output(program, text, code=0):
        (folder / f"{program}.out").write_text(text)
        script = folder / program
        script.write_text(f'#!/bin/sh\necho "$@" >> {folder}/{program}.calls\ncat {folder}/{program}.out\nexit {code}\n')
        script.chmod(0o755)

    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for program in ("squeue", "sacct", "scancel", "scontrol"):
        set_output(program, "", 1)
    set_output.calls = lambda program: (folder / f"{program}.calls").read_text()
    return set_output


def test_squeue_first_then_sacct_then_unknown(fake_slurm):
    assert status.job_status("7").state == "UNKNOWN"
    fake_slurm("sacct", recorded("sacct", "cancelled"))
    assert status.job_status("7").state == "CANCELLED"
    fake_slurm("squeue", recorded("squeue", "running"))
    found = status.job_status("7+1")
    assert found.state == "RUNNING" and found.active and found.nodes == ("n1", "n2", "n3", "n4")


def test_accounting_that_is_off_and_a_job_that_is_forgotten(fake_slurm):
    fake_slurm("squeue", "slurm_load_jobs error: Invalid job id specified\n", 1)
    fake_slurm("sacct", "Slurm accounting storage is disabled\n", 1)
    assert status.job_status("7").state == "UNKNOWN"


def test_the_watcher_gives_submitit_the_leaders_state(fake_slurm, tmp_path):
    pytest.importorskip("submitit")
    from areal_hpc.launch.hetjob import HetJob, HetWatcher

    fake_slurm("squeue", recorded("squeue", "rerunning"))

    class Job(HetJob):
        watcher = HetWatcher()

    job = Job(tmp_path, "10")

    def is_done() -> bool:
        time.sleep(0.005)  # submitit ignores a forced look within 1 ms of the last one
        return job.watcher.is_done("10", mode="force")

    assert job.state == "RUNNING" and not is_done()
    fake_slurm("squeue", "", 1)
    fake_slurm("sacct", recorded("sacct", "requeued"))
    assert not is_done()
    fake_slurm("sacct", recorded("sacct", "requeued").replace("PENDING", "TIMEOUT"))
    assert is_done() and job.state == "TIMEOUT"
    assert job.paths.stdout == tmp_path / "10_0_log.out"
    fake_slurm("scancel", "")
    job.cancel()
    assert fake_slurm.calls("scancel").split() == ["10"], "the leader's id ends all components"


def test_the_job_of_a_run_folder(tmp_path, capsys, fake_slurm):
    paths = RunPaths(tmp_path)
    paths.slurm.mkdir()
    with pytest.raises(ConfigError, match="has no Slurm job"):
        status.find_job(str(tmp_path))
    status.write_record(paths, "7")
    fake_slurm("squeue", recorded("squeue", "running"))
    assert status.run_job_command("status", str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "job 7: RUNNING" and lines[2] == "  component 1: RUNNING n2,n3"
    fake_slurm("scancel", "")
    assert status.run_job_command("cancel", str(tmp_path)) == 0
    assert status.run_job_command("stop", str(tmp_path)) == 0
    assert status.run_job_command("requeue", str(tmp_path)) == 0
    assert fake_slurm.calls("scancel").splitlines() == ["7", "--signal=INT 7", "--batch --signal=USR2 7"]
    fake_slurm("squeue", recorded("squeue", "cancelled"))
    fake_slurm("scontrol", "")
    assert status.run_job_command("requeue", str(tmp_path)) == 0
    assert fake_slurm.calls("scontrol").split() == ["requeue", "7"]
    (paths.slurm / "7_0_log.out").write_text("")
    assert status.run_job_command("logs", str(tmp_path)) == 0
    assert capsys.readouterr().out.rstrip().endswith("7_0_log.out")


def test_a_job_that_waited_long_before_its_script_wrote_the_record_is_still_known(tmp_path, monkeypatch):
    """The plain sbatch road: the folder learns of its job when that starts, and squeue forgets it when it is over."""
    paths = RunPaths(tmp_path)
    paths.slurm.mkdir()
    monkeypatch.setattr(slurm, "command", lambda *arguments, **_: recorded("scontrol", "reused-failed"))
    status.write_record(paths, "1", status.submit_time("1"))
    record, _ = status.find_job(str(tmp_path))
    assert record.submitted == slurm.parse_time("2026-11-29T17:33:27")
    assert summarize(latest(parse_sacct(recorded("sacct", "reused-failed")), record.submitted)) == "FAILED"
    monkeypatch.setattr(slurm, "command", lambda *arguments, **_: "")
    assert status.submit_time("1") is None
