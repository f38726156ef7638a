"""The batch step of a job: starts the ranks, passes stops on, restarts and requeues.

    sbatch -> supervisor (first node of the controller's group) -> srun -> areal_hpc.main, all ranks

Both roads end here: `areal-hpc submit` runs `Supervise` through submitit, slurm/train.sbatch
runs `python -m areal_hpc.launch.supervise`. It reads the controller's last word in
status.json, writes slurm/events.jsonl in the run folder, and holds no MPI and no model.

Slurm tells the supervisor alone of the walltime (`--signal=B:USR2@lead`); the supervisor
tells the step, once. Preemption and scancel signal the step itself; then the controller
drains on its own and the supervisor sees that it wants to go on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc import runlock
from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import read_config
from areal_hpc.config.schema import Config
from areal_hpc.durable import DiskFullError, write_durably
from areal_hpc.launch import slurm
from areal_hpc.launch.decide import Action, StepEnd, Tally, decide
from areal_hpc.launch.drain import expected_drain_warnings, slow_drain_warnings
from areal_hpc.launch.plan import END_MARGIN_S, JobPlan, plan_job
from areal_hpc.launch.step import is_fault, srun_command, start
from areal_hpc.paths import REFUSAL_BYTES, RunPaths
from areal_hpc.telemetry import append_jsonl
from areal_hpc.terminal import echo

POLL_S = 0.2
END_TIME_INTERVAL_S = 60.0
FAULT_GRACE_S = 2.0
"""From srun's report of a lost rank to SIGKILL for the others; an MPI_Abort ends them sooner."""
STEP_DEADLINE_S = 300.0
"""Longest wait for Slurm to create the step."""
KILL_DEADLINE_S = 60.0


class NoNodesError(RuntimeError):
    """Fewer usable nodes are left than the run needs."""


@dataclass(frozen=True)
class Supervise:
    """What submitit runs in the batch step and, at a stop, asks for a checkpoint."""

    run_folder: str

    def __call__(self) -> None:
        # submitit's handler saves this object and requeues the job. It is called from the
        # supervisor's loop once the run has drained, not from within a signal handler.
        hook = signal.getsignal(signal.SIGUSR2)
        requeue = (lambda: hook(signal.SIGUSR2, None)) if callable(hook) else None
        code = Supervisor(RunPaths(Path(self.run_folder)), requeue=requeue).run()
        if code:
            raise RuntimeError(f"the run in {self.run_folder} failed; see slurm/events.jsonl and logs/ there")

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class Supervisor:
    """One allocation of a run."""

    def __init__(self, paths: RunPaths, *, requeue: Callable[[], None] | None = None) -> None:
        self.paths = paths
        self.config: Config = read_config(paths.config)
        self.plan: JobPlan = plan_job(self.config)
        self.job_id = os.environ["SLURM_JOB_ID"]
        self.restart_count = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        self._requeue = requeue or (lambda: slurm.patiently(lambda: slurm.requeue(self.job_id)))
        self._end_time = 0.0
        self._next_end_time = 0.0
        self._warned = False
        self._signals: list[int] = []
        self.stop_reason = ""
        self._stopped_at = 0.0

    def run(self) -> int:
        """Supervise the run until it is done, requeued or given up; the exit code of the batch step.

        Raises FolderInUseError, having written nothing, if another run holds the folder.
        """
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, lambda received, _frame: self._signals.append(received))
        runlock.check(self.paths.lock, take_over=self.config.run.take_over, job_id=self.job_id)
        self._refresh_end_time()
        self._event(
            "allocation", job_id=self.job_id, restart_count=self.restart_count,
            seconds=self._end_time - time.time() if self._end_time else None,
        )
        self._warn(slow_drain_warnings(self.paths, self.config))
        tally = Tally()
        while True:
            try:
                nodes = self._choose_nodes()
            except NoNodesError as error:
                return self._put_back(str(error))
            end = self._run_step(nodes)
            self._next_end_time = 0.0
            self._refresh_end_time()
            tally = tally.after(end)
            decision = decide(
                end, tally, max_restarts=self.config.launch.max_step_restarts, seconds_left=self._seconds_to_stop()
            )
            self._event("decision", action=decision.action.value, text=decision.text, returncode=end.returncode)
            if decision.action is Action.DONE:
                self._say(decision.text)
                return 0
            if decision.action is Action.FAIL:
                self._say(f"failed: {decision.text}")
                return 1
            if decision.action is Action.REQUEUE:
                return self._put_back(decision.text)
            self._say(f"restart {tally.restarts + 1}: {decision.text}")
            tally = tally.restarted()

    # ---- the step ----------------------------------------------------------------

    def _choose_nodes(self) -> list[tuple[str, ...]]:
        """Working nodes of every group: the first usable ones that the job still holds."""
        parts = slurm.patiently(lambda: slurm.components(self.job_id))
        if len(parts) != len(self.plan.groups):
            raise ConfigError(
                f"job {self.job_id} has {len(parts)} components but the run plans {len(self.plan.groups)} "
                f"({', '.join(group.role for group in self.plan.groups)}): submit a heterogeneous job"
            )
        self._end_time = parts[0].end_time or self._end_time
        chosen = []
        for group, part in zip(self.plan.groups, parts, strict=True):
            usable = slurm.patiently(lambda part=part: slurm.healthy_nodes(part.nodes))
            if len(usable) < group.nodes:
                raise NoNodesError(
                    f"group {group.role} needs {group.nodes} nodes and {len(usable)} of its "
                    f"{len(part.nodes)} are usable (launch.spare_nodes={group.spare_nodes})"
                )
            if len(part.nodes) > group.allocated_nodes:
                raise ConfigError(
                    f"group {group.role} was allocated {len(part.nodes)} nodes but the run plans "
                    f"{group.allocated_nodes}: make the job and groups.{group.role}.nodes agree"
                )
            chosen.append(usable[: group.nodes])
        self.plan.check_disjoint(chosen)
        return chosen

    def _run_step(self, nodes: list[tuple[str, ...]]) -> StepEnd:
        command = srun_command(
            self.config, self.plan, nodes, ["-m", "areal_hpc.main", "--run", str(self.paths.root)]
        )
        before = last_checkpoint(self.paths)
        refusal = self._reserve_refusal()
        began = time.time()
        self._event("step_started", nodes=nodes, checkpoint=before)
        process = start(command, nodes, refusal)
        watch = _Watch(process)
        try:
            self._follow(process, watch)
        finally:
            if process.poll() is None:
                process.kill()
        watch.join()
        state = last_word(self.paths, since=began)
        after = last_checkpoint(self.paths)
        values = {"returncode": process.returncode, "state": state.get("state", ""), "checkpoint": after}
        if watch.fault_at:
            values["fault_s"] = time.time() - watch.fault_at
        self._event("step_ended", seconds=time.time() - began, **values)
        if self._stopped_at:
            self._event(
                "drained", seconds=time.time() - self._stopped_at, controller_s=state.get("drain_s"),
                lead_s=self.config.launch.signal_lead_s, reason=self.stop_reason,
            )
        return StepEnd(
            returncode=process.returncode,
            state=state.get("state", ""),
            wants_requeue=bool(state.get("requeue")),
            stop_reason=self.stop_reason,
            refusal=_read_text(refusal),
            step_before=before,
            step_after=after,
        )

    def _follow(self, process: subprocess.Popen[str], watch: _Watch) -> None:
        """Until srun ends: pass a stop on, and end what does not end by itself."""
        deadline = float("inf")
        step_deadline: float | None = time.monotonic() + STEP_DEADLINE_S
        while process.poll() is None:
            time.sleep(POLL_S)
            self._refresh_end_time()
            self._notice_stop()
            if self.stop_reason and deadline == float("inf"):
                process.send_signal(signal.SIGUSR2)  # srun hands it to every task
                deadline = self._drain_deadline()
            if watch.fault_at and time.time() > watch.fault_at + FAULT_GRACE_S:
                self._say(f"a rank or node was lost ({watch.fault}); ending the others")
                self._kill(process)
            if time.time() > deadline:
                self._say("the run has not drained in time; ending it")
                self._kill(process)
            if step_deadline is not None and time.monotonic() > step_deadline:
                step_deadline = None
                if not slurm.has_step(self.job_id):
                    self._say(f"waited {STEP_DEADLINE_S:.0f} s for Slurm to start the step")
                    self._kill(process)

    def _kill(self, process: subprocess.Popen[str]) -> None:
        """SIGTERM to srun is SIGKILL to every task, at once."""
        process.terminate()
        try:
            process.wait(KILL_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()

    # ---- time and stops ----------------------------------------------------------

    def _refresh_end_time(self) -> None:
        """Slurm's own end time, asked again now and then: an administrator may move it."""
        if time.monotonic() < self._next_end_time:
            return
        self._next_end_time = time.monotonic() + END_TIME_INTERVAL_S
        try:
            parts = slurm.components(self.job_id)
        except slurm.SlurmError as error:
            self._say(f"warning: {error}; keeping the end time known before")
            return
        self._end_time = min((part.end_time for part in parts if part.end_time), default=self._end_time)
        self._warn(expected_drain_warnings(self.paths, self.config))

    def _seconds_to_stop(self) -> float:
        if not self._end_time:
            return float("inf")
        return self._end_time - self.config.launch.signal_lead_s - time.time()

    def _notice_stop(self) -> None:
        """A signal, or the lead time reached without one."""
        if self.stop_reason:
            return
        if self._signals:
            number = self._signals[0]
            self.stop_reason = "walltime" if number == signal.SIGUSR2 else "termination"
        elif self._seconds_to_stop() < 0:
            self.stop_reason = "walltime"
        else:
            return
        self._stopped_at = time.time()
        left = self._end_time - self._stopped_at if self._end_time else None
        self._event("stop", reason=self.stop_reason, signals=list(self._signals), seconds_left=left)

    def _drain_deadline(self) -> float:
        latest = time.time() + self.config.run.drain_deadline_s + END_MARGIN_S
        if self._end_time and self.stop_reason == "walltime":
            latest = min(latest, self._end_time - END_MARGIN_S / 2)
        return latest

    # ---- back into the queue -----------------------------------------------------

    def _put_back(self, text: str) -> int:
        """Requeue the job unless that is used up or somebody cancelled it."""
        if self.restart_count >= self.config.launch.max_requeues:
            self._say(
                f"{text}; not requeued: {self.restart_count} requeues are used up (launch.max_requeues). "
                "Continue with: areal-hpc submit ... run.on_existing=resume"
            )
            return 1
        state = slurm.patiently(lambda: slurm.components(self.job_id))[0].state
        if state != "RUNNING":
            self._say(f"{text}; not requeued: Slurm is ending the job ({state})")
            return 1
        since = time.time() - self._stopped_at if self._stopped_at else None
        self._event("requeue", text=text, seconds_since_stop=since)
        self._say(f"{text}; back into the queue (requeue {self.restart_count + 1})")
        self._requeue()
        return 0

    # ---- records -----------------------------------------------------------------

    def _say(self, text: str) -> None:
        echo(f"areal-hpc job {self.job_id}: {text}")

    def _warn(self, warnings: list[str]) -> None:
        """Say once in an allocation that the lead time is too short."""
        for warning in [] if self._warned else warnings:
            self._warned = True
            self._say(f"warning: {warning}")
            self._event("warning", text=warning)

    def _event(self, event: str, **values: object) -> None:
        """A line of events.jsonl. Without space for it the job is supervised all the same."""
        try:
            append_jsonl(self.paths.slurm_events, {"time": time.time(), "event": event, **values})
        except OSError as error:
            self._say(f"warning: {event} is not in events.jsonl: {error.strerror or error}")

    def _reserve_refusal(self) -> Path:
        """Blanks, in whose place a rank says why the step must not be started again: a full disk too."""
        refusal = self.paths.refusal(self.job_id)
        try:
            write_durably(refusal, b" " * REFUSAL_BYTES)
        except OSError as error:
            self._say(f"warning: no place for a refusal: {error.strerror or error}")
            refusal.unlink(missing_ok=True)
        return refusal


class _Watch:
    """Copies srun's error lines to ours and notes when it reports a lost rank or node."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.fault, self.fault_at = "", 0.0
        self._stream = process.stderr
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        for line in self._stream or ():
            try:
                os.write(2, line.encode())
            except OSError:  # the job's log is full: srun must go on being read
                pass
            if not self.fault_at and is_fault(line):
                self.fault, self.fault_at = line.strip(), time.time()

    def join(self) -> None:
        self._thread.join(timeout=10.0)


def last_checkpoint(paths: RunPaths) -> int:
    """Step of the newest checkpoint with its final name; 0 without one."""
    names = (entry.name for entry in paths.checkpoints.glob("step-*"))
    return max((int(match.group(1)) for name in names if (match := re.fullmatch(r"step-(\d+)", name))), default=0)


def last_word(paths: RunPaths, *, since: float) -> dict[str, Any]:
    """The controller's final status if it was written after `since`, else {}."""
    try:
        status = json.loads(paths.status.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    final = status.get("state") in ("finished", "stopped") and status.get("time", 0.0) >= since
    return status if final else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def main(argv: list[str] | None = None) -> int:
    """The plain road: `python -m areal_hpc.launch.supervise CONFIG [key=value ...]` in a batch script."""
    from areal_hpc.launch.submit import prepare_run

    parser = argparse.ArgumentParser(prog="python -m areal_hpc.launch.supervise", description=main.__doc__)
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args(argv)
    try:
        if "SLURM_JOB_ID" not in os.environ:
            raise ConfigError("not in a Slurm job: start this from a batch script, e.g. slurm/train.sbatch")
        requeued = int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0
        paths = prepare_run(arguments.config, arguments.overrides, job_id=os.environ["SLURM_JOB_ID"],
                            requeued=requeued)  # fmt: skip
        return Supervisor(paths).run()
    except (ConfigError, slurm.SlurmError) as error:
        print(f"areal-hpc: {error}", file=sys.stderr, flush=True)
        return 2
    except DiskFullError as error:
        print(f"areal-hpc: {error.strerror}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
