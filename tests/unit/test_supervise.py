"""The supervisor against fake Slurm commands (real processes, no Slurm), and what it reads and records."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_hpc import runlock
from areal_hpc.config.load import load_config, save_config
from areal_hpc.launch.drain import expected_drain, expected_drain_warnings, read_events, slow_drain_warnings
from areal_hpc.launch.site import Site, apply_site
from areal_hpc.launch.supervise import last_checkpoint, last_word
from areal_hpc.paths import RunPaths
from areal_hpc.telemetry import Telemetry

ROOT = Path(__file__).parents[2]


# ---- records ---------------------------------------------------------------------


def test_the_last_word_counts_only_if_it_is_new(tmp_path):
    paths = RunPaths(tmp_path)
    assert last_word(paths, since=0.0) == {}
    paths.status.write_text(json.dumps({"state": "stopped", "time": 100.0, "requeue": True}))
    assert last_word(paths, since=99.0)["requeue"] and last_word(paths, since=101.0) == {}
    paths.status.write_text(json.dumps({"state": "running", "time": 100.0}))
    assert last_word(paths, since=0.0) == {}
    paths.status.write_text("{")
    assert last_word(paths, since=0.0) == {}


def test_only_checkpoints_with_their_final_name_count(tmp_path):
    paths = RunPaths(tmp_path)
    assert last_checkpoint(paths) == 0
    for name in ("step-00000004", "step-00000012", ".step-00000020.tmp", "step-00000016.tmp", "other"):
        (paths.checkpoints / name).mkdir(parents=True)
    assert last_checkpoint(paths) == 12


def test_a_drain_that_did_not_fit_is_told_at_the_next_start(tmp_path):
    paths = RunPaths(tmp_path)
    paths.slurm.mkdir()
    config = load_config(ROOT / "configs" / "quickstart.yaml", ["launch.signal_lead_s=60"])
    assert slow_drain_warnings(paths, config) == []
    events = [{"event": "drained", "seconds": 12.0}, {"event": "drained", "seconds": 55.0}, {"event": "stop"}]
    paths.slurm_events.write_text("".join(json.dumps(event) + "\n" for event in events[:1]))
    assert slow_drain_warnings(paths, config) == []
    paths.slurm_events.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "dra')
    (warning,) = slow_drain_warnings(paths, config)
    assert "took 55 s" in warning and "launch.signal_lead_s=60" in warning


def test_a_drain_that_would_not_fit_is_foreseen_from_what_the_run_measured(tmp_path):
    paths = RunPaths(tmp_path)
    config = load_config(ROOT / "configs" / "quickstart.yaml", ["launch.signal_lead_s=60"])
    assert expected_drain(paths) == 0.0 and expected_drain_warnings(paths, config) == []
    telemetry = Telemetry(paths.spans("trainer", 0))
    for seconds in (3.0, 9.0, 4.0):
        telemetry.record_span("train.step", 0.0, seconds)
    telemetry.record_span("weights.publish", 0.0, 1.0)
    telemetry.record_span("train.wait", 0.0, 500.0)
    telemetry.close()
    assert expected_drain(paths) == 10.0 and expected_drain_warnings(paths, config) == []
    telemetry = Telemetry(paths.spans("trainer", 0))
    telemetry.value("checkpoint.seconds", 25.0)
    telemetry.close()
    (warning,) = expected_drain_warnings(paths, config)
    assert "about 35 s" in warning and "launch.signal_lead_s=60" in warning


# ---- the process -----------------------------------------------------------------

SRUN = """#!{python}
import json, os, re, signal, sys, time
state = {state!r}
run = sys.argv[sys.argv.index("--run") + 1]
with open(state + "/attempts", "a") as out:
    out.write(json.dumps({{"argv": sys.argv, "plan": os.environ["AREAL_NODE_PLAN"]}}) + "\\n")
attempt = len(open(state + "/attempts").readlines())
plan = json.load(open(state + "/script"))[attempt - 1]
def say(**values):
    json.dump({{"time": time.time(), **values}}, open(run + "/status.json", "w"))
def stop(number, frame):
    open(state + "/signals", "a").write(str(number) + "\\n")
    if plan.get("deaf"):
        return
    os.makedirs(run + "/checkpoints/step-00000007", exist_ok=True)
    say(state="stopped", requeue=True, drain_s=0.1)
    os._exit(0)
signal.signal(signal.SIGUSR2, stop)
open(state + "/ready", "w").close()
if "refuse" in plan:
    open(os.environ["AREAL_REFUSAL_FILE"], "w").write(plan["refuse"])
if "intruder" in plan:
    open(run + "/slurm/refused-49.txt", "w").write(plan["intruder"])
if "checkpoint" in plan:
    os.makedirs(run + "/checkpoints/step-%08d" % plan["checkpoint"])
if "say" in plan:
    say(**plan["say"])
if "stderr" in plan:
    print(plan["stderr"], file=sys.stderr, flush=True)
time.sleep(plan.get("sleep", 0))
sys.exit(plan.get("code", 0))
"""

SCONTROL = """#!{python}
import sys, time
state = {state!r}
open(state + "/scontrol", "a").write(" ".join(sys.argv[1:]) + "\\n")
if "show" in sys.argv:
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(float(open(state + "/end").read())))
    job = open(state + "/job").read().strip()
    nodes = open(state + "/nodes").read().split()
    for offset, names in enumerate(nodes):
        print(f"JobId={{50 + offset}} HetJobId=50 HetJobOffset={{offset}} JobState={{job}} Reason=None "
              f"Restarts=0 EndTime={{end}} ReqNodeList=(null) NodeList={{names}} BatchHost=x")
"""

SINFO = """#!{python}
import sys
down = open({state!r} + "/down").read().split()
for name in sys.argv[sys.argv.index("-n") + 1].split(","):
    print(name, "down*" if name in down else "mixed")
"""


class FakeJob:
    """A supervisor process in a made-up job 50 on n1; n2,n3; n4,n5."""

    def __init__(self, tmp_path: Path, *overrides: str) -> None:
        self.state = tmp_path / "state"
        self.state.mkdir()
        self.paths = RunPaths(tmp_path / "run")
        self.paths.create()
        self.paths.slurm.mkdir()
        config = load_config(ROOT / "configs" / "quickstart.yaml", ["launch.spare_nodes=1", *overrides])
        save_config(apply_site(config, Site()), self.paths.config)
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sinfo", SINFO)):
            (folder / name).write_text(text.format(python=sys.executable, state=str(self.state)))
            (folder / name).chmod(stat.S_IRWXU)
        self.set(end=time.time() + 3600, job="RUNNING", nodes="n[1,9] n[2-3] n[4-5]", down="")
        self.environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "50"}
        self.environment.pop("SLURM_RESTART_COUNT", None)

    def set(self, **values: object) -> None:
        for name, value in values.items():
            (self.state / name).write_text(str(value))

    def start(self, *script: dict) -> subprocess.Popen:
        (self.state / "script").write_text(json.dumps(script))
        code = (
            "import sys; from pathlib import Path\n"
            "from areal_hpc.launch.supervise import Supervisor\n"
            "from areal_hpc.paths import RunPaths\n"
            f"sys.exit(Supervisor(RunPaths(Path({str(self.paths.root)!r}))).run())"
        )
        return subprocess.Popen(
            [sys.executable, "-c", code], env=self.environment, cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *script: dict) -> tuple[int, str]:
        process = self.start(*script)
        output, _ = process.communicate(timeout=100)
        return process.returncode, output

    @property
    def requeued(self) -> bool:
        return "requeue 50" in (self.state / "scontrol").read_text()

    @property
    def plans(self) -> list[str]:
        return [json.loads(line)["plan"] for line in (self.state / "attempts").read_text().splitlines()]

    def await_attempt(self) -> None:
        deadline = time.monotonic() + 60
        while not (self.state / "ready").exists():
            assert time.monotonic() < deadline, "srun was not called"
            time.sleep(0.02)


@pytest.fixture
def job(tmp_path):
    return FakeJob(tmp_path)


def test_a_finished_run_ends_the_job(job):
    code, output = job.run({"say": {"state": "finished"}})
    assert code == 0 and "finished" in output and not job.requeued
    assert job.plans == ["n1;n2;n4"]


def test_walltime_signal_reaches_the_ranks_once_and_the_job_requeues(job):
    process = job.start({"sleep": 300})
    job.await_attempt()
    process.send_signal(signal.SIGUSR2)
    process.send_signal(signal.SIGUSR2)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0 and job.requeued, output
    assert (job.state / "signals").read_text().split() == [str(int(signal.SIGUSR2))]
    events = {event["event"]: event for event in read_events(job.paths)}
    assert events["stop"]["reason"] == "walltime" and events["drained"]["controller_s"] == 0.1
    assert events["drained"]["seconds"] <= events["requeue"]["seconds_since_stop"] < 60.0


def test_termination_does_the_same(job):
    process = job.start({"sleep": 300})
    job.await_attempt()
    process.terminate()
    process.communicate(timeout=100)
    assert process.returncode == 0 and job.requeued
    assert (job.state / "signals").read_text().split() == [str(int(signal.SIGUSR2))]


def test_slurms_end_time_is_the_budget_even_if_no_signal_comes(job):
    job.set(end=time.time() + 181)  # the lead time is 180 s
    code, output = job.run({"sleep": 300})
    assert code == 0 and job.requeued, output
    assert [event["signals"] for event in read_events(job.paths) if event["event"] == "stop"] == [[]]


def test_a_stop_that_the_step_made_of_its_own_requeues_too(job):
    code, _ = job.run({"say": {"state": "stopped", "requeue": True}})
    assert code == 0 and job.requeued


def test_a_run_that_does_not_drain_is_ended_and_requeued(tmp_path):
    job = FakeJob(tmp_path, "run.drain_deadline_s=1")
    job.set(end=time.time() + 20)
    begin = time.monotonic()
    code, output = job.run({"sleep": 300, "deaf": True})
    assert code == 0 and job.requeued and "has not drained in time" in output
    assert time.monotonic() - begin < 100


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING"])
def test_a_cancelled_job_is_not_put_back(job, state):
    process = job.start({"sleep": 300})
    job.await_attempt()
    job.set(job=state)
    process.terminate()
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 1 and not job.requeued and state in output


def test_requeues_are_limited(job):
    job.environment["SLURM_RESTART_COUNT"] = "100"
    code, output = job.run({"say": {"state": "stopped", "requeue": True}})
    assert code == 1 and not job.requeued and "launch.max_requeues" in output


def test_restart_in_place_leaves_out_the_node_that_is_down(job):
    process = job.start({"sleep": 2, "stderr": "srun: error: Node failure on n2", "code": 0, "checkpoint": 3},
                        {"say": {"state": "finished"}})  # fmt: skip
    job.await_attempt()
    job.set(down="n2")
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0 and job.plans == ["n1;n2;n4", "n1;n3;n4"], output
    assert "restart 1: " in output and "checkpoint of step 3" in output


def test_ranks_that_hang_after_one_is_lost_are_ended(job):
    begin = time.monotonic()
    code, output = job.run({"sleep": 300, "stderr": "srun: error: n2: task 0: Killed"}, {"say": {"state": "finished"}})
    assert code == 0 and time.monotonic() - begin < 100 and "a rank or node was lost" in output


def test_without_a_spare_node_the_job_goes_back_to_the_queue(job):
    job.set(down="n2 n3")
    code, output = job.run()
    assert code == 0 and job.requeued and "group trainer needs 1 nodes and 0 of its 2 are usable" in output


def test_restarts_without_progress_end_with_a_clear_message(job):
    code, output = job.run(*[{"code": 1}] * 5)
    assert code == 1 and len(job.plans) == 3 and not job.requeued
    assert "reached no checkpoint beyond step 0" in output


def test_a_refusal_is_not_tried_again(job):
    code, output = job.run({"refuse": "the MPI world has 1 ranks but Slurm launched 4", "code": 2})
    assert code == 1 and len(job.plans) == 1 and "Slurm launched 4" in output


def test_without_space_for_its_records_a_stop_still_reaches_the_ranks(job):
    job.paths.slurm_events.mkdir()  # whatever is written there fails
    process = job.start({"sleep": 300})
    job.await_attempt()
    process.send_signal(signal.SIGUSR2)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0 and job.requeued, output
    assert (job.state / "signals").read_text().split() == [str(int(signal.SIGUSR2))]
    assert "warning: stop is not in events.jsonl: " in output


FULL_DISK = """
import errno, os, sys
from pathlib import Path
from areal_hpc import main
from areal_hpc.durable import DiskFullError, write_durably
from areal_hpc.launch import supervise
from areal_hpc.paths import RunPaths

paths = RunPaths(Path(sys.argv[1]) / "run")
paths.create()
paths.slurm.mkdir()
supervisor = supervise.Supervisor.__new__(supervise.Supervisor)
supervisor.paths, supervisor.job_id = paths, "50"
refusal = supervisor._reserve_refusal()
assert supervise._read_text(refusal) == ""
os.environ["AREAL_REFUSAL_FILE"] = str(refusal)
log = os.open(paths.logs / "rank.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 2)  # where a rank's traceback goes
filler = open(paths.root / "filler", "wb", buffering=0)
while True:
    try:
        while filler.write(bytes(4096)):
            pass
    except OSError:
        break
try:
    write_durably(paths.root / "file", bytes(10000))
except DiskFullError as error:
    cause = error
supervisor._event("stop")
failed = RuntimeError("the checkpoint could not be written")
failed.__cause__ = cause
assert main._tell(failed, None, paths) == 1
text = supervise._read_text(refusal)
wanted = f"disk full: writing 10000 bytes to {paths.root}/file lacks at least 10000 bytes (0 are free); make space"
assert wanted in text, text
assert len(refusal.read_bytes()) == 4096
# A refusal of an earlier step does not outlive it, though there is no space for a new one.
supervisor._reserve_refusal()
assert supervise._read_text(refusal) == ""
"""


def test_on_a_full_disk_the_rank_that_met_it_still_tells_the_supervisor(tmp_path):
    probe = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*probe, "true"], capture_output=True).returncode:
        pytest.skip("no unprivileged mount namespace for a small tmpfs")
    script, mount = tmp_path / "fill.py", tmp_path / "small"
    script.write_text(FULL_DISK)
    mount.mkdir()
    command = 'mount -t tmpfs -o size=256k none "$0" && exec "$1" "$2" "$0"'
    done = subprocess.run(
        [*probe, "sh", "-c", command, str(mount), sys.executable, str(script)], capture_output=True, text=True,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_full_disk_is_not_tried_again_and_named(job):
    text = "trainer 0 on n2: disk full: writing 10 bytes to /run/x lacks at least 10 bytes (0 are free)"
    code, output = job.run({"refuse": text.ljust(4096), "code": 1})
    assert code == 1 and len(job.plans) == 1 and f"failed: {text}\n" in output
    (decision,) = [event for event in read_events(job.paths) if event["event"] == "decision"]
    assert (decision["action"], decision["text"]) == ("fail", text)


def test_a_job_leaves_the_folder_of_another_run_alone(job):
    before = {file: file.read_bytes() for file in job.paths.root.rglob("*") if file.is_file()}
    with runlock.acquire(job.paths.lock):
        code, output = job.run({"say": {"state": "finished"}})
    assert code != 0 and "FolderInUseError" in output and not (job.state / "attempts").exists()
    assert before == {file: file.read_bytes() for file in job.paths.root.rglob("*") if file.is_file()}


def test_the_refusal_of_another_jobs_ranks_does_not_end_this_one(job):
    code, output = job.run({"intruder": "the MPI world has 1 ranks", "code": 1}, {"say": {"state": "finished"}})
    assert code == 0 and len(job.plans) == 2, output


def test_a_job_of_other_components_is_refused(job):
    job.set(nodes="n1 n2")
    code, output = job.run()
    assert code != 0 and "has 2 components but the run plans 3" in output
    job.set(nodes="n[1-2] n[3-5] n[6-7]")
    code, output = job.run()
    assert code != 0 and "trainer was allocated 3 nodes but the run plans 2" in output


def test_submitits_hook_requeues(job, tmp_path):
    """The submitit road: its handler saves the callable and calls scontrol, outside any signal handler."""
    pytest.importorskip("submitit")
    (job.state / "script").write_text(json.dumps([{"sleep": 300}]))
    code = (
        "from areal_hpc.launch.supervise import Supervise\n"
        "from submitit.core.utils import DelayedSubmission\n"
        f"delayed = DelayedSubmission(Supervise({str(job.paths.root)!r})); delayed.set_timeout(60, 5)\n"
        f"delayed.dump({str(job.paths.slurm)!r} + '/50_submitted.pkl')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    environment = {**job.environment, "SUBMITIT_EXECUTOR": "slurm", "SLURM_PROCID": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "submitit.core._submit", str(job.paths.slurm)], cwd=ROOT, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    job.await_attempt()
    process.send_signal(signal.SIGUSR2)
    output, _ = process.communicate(timeout=100)
    assert job.requeued and "Requeued job 50" in output
    assert not (job.paths.slurm / "50_0_result.pkl").exists()
