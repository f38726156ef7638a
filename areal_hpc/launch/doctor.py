"""`areal-hpc doctor`: checks a cluster before a run spends an allocation on it.

Without `--job` it looks at this node. With it, a short heterogeneous job with the run's
own groups runs the same rank start as training (MPI, `srun --mpi`, node plan, shared
folder) and checks every node; its ranks print findings as JSON lines into the job's log.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import load_config, read_config, save_config
from areal_hpc.config.schema import Config
from areal_hpc.launch import findings, slurm
from areal_hpc.launch.checks import check_shared_folder, check_world
from areal_hpc.launch.findings import FAILURE, OK, WARNING, Finding
from areal_hpc.launch.plan import check_launch, plan_job
from areal_hpc.launch.script import check_log_folder, render_script
from areal_hpc.launch.site import DEFAULT_MPI, Site, apply_site, load_site
from areal_hpc.launch.status import ACTIVE, job_status
from areal_hpc.launch.step import srun_command, start
from areal_hpc.paths import RunPaths

JOB_MINUTES = 10
QUEUE_DEADLINE_S = 4 * 3600.0
POLL_S = 2.0
MARK = "areal-doctor "
"""Begins every line of the job's log that holds a finding."""


def run_doctor(config_path: str | None, overrides: list[str], *, job: bool = False) -> int:
    """Print one line per check; 1 if anything failed."""
    if job and config_path is None:
        raise ConfigError("doctor --job needs a configuration: its groups and site say which nodes to check")
    config, site = None, Site()
    if config_path is not None:
        config = load_config(config_path, overrides)
        site = load_site(config.launch.site)
        config = apply_site(config, site)
    report = Report()
    for finding in login_findings(config):
        report.add(finding)
    if job and config is not None:
        if findings.worst(report.findings):
            print("not starting the job before these are mended")
        else:
            for finding in job_findings(config, site):
                report.add(finding)
    failed = sum(finding.level == FAILURE for finding in report.findings)
    print("all is well" if not failed else f"{failed} failures")
    return findings.worst(report.findings)


class Report:
    """Findings, printed as they come."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def add(self, finding: Finding) -> None:
        self.findings.append(finding)
        print(finding.line(), flush=True)


def login_findings(config: Config | None) -> list[Finding]:
    found = findings.check_slurm()
    answers = not findings.worst(found)
    found += [findings.check_python(), findings.check_mpi_library(), *findings.check_packages()]
    if answers:
        found.append(findings.check_mpi_plugin(config.launch.mpi if config else DEFAULT_MPI))
    if config is not None:
        plan = plan_job(config)
        found.append(Finding(OK, "plan", f"{plan.num_ranks} ranks on "
                             f"{sum(group.allocated_nodes for group in plan.groups)} nodes"))  # fmt: skip
        found += [Finding(WARNING, "stop", text) for text in check_launch(config)]
        found += findings.check_folder(Path(config.run.folder))
        found += findings.check_inputs(config)
    return found


# ---- the job ---------------------------------------------------------------------


def job_findings(config: Config, site: Site) -> list[Finding]:
    """Submit, wait, read the log; the job is cancelled when the wait is interrupted."""
    parent = findings.existing_parent(Path(config.run.folder))
    folder = Path(tempfile.mkdtemp(prefix=".areal-doctor-", dir=parent))
    try:
        check_log_folder(folder)
        short = replace(
            config,
            run=replace(config.run, name="areal-doctor", folder=str(folder)),
            launch=replace(config.launch, time_min=JOB_MINUTES, signal_lead_s=60, spare_nodes=0),
        )
        save_config(short, folder / "config.yaml")
        command = [sys.executable, "-u", "-m", "areal_hpc.launch.doctor", "--batch", str(folder)]
        script = folder / "doctor.sbatch"
        script.write_text(render_script(short, plan_job(short), site, log=str(folder / "log"), command=command))
        job_id = slurm.command("sbatch", "--parsable", str(script)).strip().split(";")[0]
        print(f"waiting for job {job_id}", flush=True)
        state = _await_job(job_id)
        text = (folder / "log").read_text(errors="replace") if (folder / "log").exists() else ""
        return read_job_log(text, state, plan_job(short).num_ranks)
    except slurm.SlurmError as error:
        return [Finding(FAILURE, "job", str(error), "check partition, account and limits of groups.*")]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _await_job(job_id: str) -> str:
    deadline = time.monotonic() + QUEUE_DEADLINE_S
    try:
        while True:
            state = job_status(job_id).state
            if state not in ACTIVE or state == "COMPLETING":
                return state
            if time.monotonic() > deadline:
                raise slurm.SlurmError(f"waited {QUEUE_DEADLINE_S / 3600:.0f} h for job {job_id} from the queue")
            time.sleep(POLL_S)
    except BaseException:
        slurm.cancel(job_id)
        raise


def read_job_log(text: str, state: str, num_ranks: int) -> list[Finding]:
    """Findings in the job's log; a job that says nothing or ends badly is a failure itself."""
    found = [
        msgspec.json.decode(line[len(MARK) :], type=Finding) for line in text.splitlines() if line.startswith(MARK)
    ]
    if state not in ("COMPLETED", "COMPLETING", "UNKNOWN") or not found:
        errors = re.findall(r"^areal-hpc: .*", text, re.MULTILINE)
        errors += re.findall(r"^(?:srun|slurmstepd).*error.*", text, re.MULTILINE)
        detail = f"; it says: {errors[0][:500]}" if errors else ""
        found.append(Finding(FAILURE, "job", f"the check of {num_ranks} ranks ended as {state}{detail}"))
    return found


def _batch(folder: Path) -> int:
    """The batch step: start the ranks on the allocated nodes as training would."""
    config = read_config(folder / "config.yaml")
    plan = plan_job(config)
    parts = slurm.components(os.environ["SLURM_JOB_ID"])
    nodes = [part.nodes[: group.nodes] for group, part in zip(plan.groups, parts, strict=True)]
    process = start(srun_command(config, plan, nodes, ["-m", "areal_hpc.launch.doctor", "--rank", str(folder)]), nodes)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    for line in process.stderr or ():
        print(line, end="", flush=True)
    return process.wait()


def _rank(folder: Path) -> int:
    """One rank: what training checks at its start, then this node, once per node."""
    from areal_hpc.mpi.world import gather, load_mpi

    config = read_config(folder / "config.yaml")
    communicator = load_mpi()
    rank, size = communicator.Get_rank(), communicator.Get_size()
    check_world(config, size, rank, os.environ)
    delay = check_shared_folder(RunPaths(folder), rank, gather)
    seconds = rename_delay(folder, rank, gather)
    if rank == 0:
        _tell(Finding(OK, "MPI world", f"{size} ranks in one world on their planned nodes"))
        level = OK if max(delay, seconds) < 5.0 else WARNING
        _tell(Finding(level, "shared folder", f"new files seen everywhere after {delay:.2f} s, renames {seconds:.2f} s"))
    node = os.environ.get("SLURMD_NODENAME", "node")
    for finding in _node_findings(config, rank):
        _tell(replace_name(finding, f"{node}: {finding.name}"))
    gather(b"done", "the end of the check")
    return 0


def _node_findings(config: Config, rank: int) -> list[Finding]:
    if os.environ.get("SLURM_LOCALID", "0") != "0":
        return []
    plan = plan_job(config)
    group = next(group for group in reversed(plan.groups) if rank >= group.first_rank)
    found = [findings.check_mpi_library(), *findings.check_packages(), findings.check_gpus(group.gpus_per_node)]
    found += findings.check_folder(Path(config.run.folder)) + findings.check_inputs(config)
    bad = [finding for finding in found if finding.level != OK]
    return bad or [Finding(OK, "node", "; ".join(f"{item.name} {item.text}" for item in found if item.name in
                                                 ("GPUs", "inputs") or item.name.startswith("filesystem")))]  # fmt: skip


def rename_delay(folder: Path, rank: int, gather) -> float:
    """Seconds until every node sees a rename of the controller's (the spool relies on it)."""
    final = folder / "renamed"
    if rank == 0:
        (folder / "unnamed").write_bytes(b"whole")
        os.replace(folder / "unnamed", final)
    gather(b"renamed", "the rename")
    begin = time.monotonic()
    while time.monotonic() - begin < 60.0:
        try:
            if final.read_bytes() == b"whole":
                break
        except OSError:
            time.sleep(0.05)
    else:
        raise ConfigError(f"a rename in {folder} was not seen within 60 s: choose another filesystem for run.folder")
    return max(float(data) for data in gather(f"{time.monotonic() - begin:.3f}".encode(), "the rename's delay"))


def replace_name(finding: Finding, name: str) -> Finding:
    return Finding(finding.level, name, finding.text, finding.fix)


def _tell(finding: Finding) -> None:
    # One write a line: the ranks share the log.
    os.write(1, (MARK + msgspec.json.encode(finding).decode() + "\n").encode())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m areal_hpc.launch.doctor")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--batch", type=Path)
    mode.add_argument("--rank", type=Path)
    arguments = parser.parse_args()
    try:
        return _batch(arguments.batch) if arguments.batch else _rank(arguments.rank)
    except (ConfigError, slurm.SlurmError) as error:
        print(f"areal-hpc: {error}", file=sys.stderr, flush=True)
        os._exit(2)


if __name__ == "__main__":
    sys.exit(main())
