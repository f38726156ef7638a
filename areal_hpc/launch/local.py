"""`areal-hpc run`: starts all ranks on this machine with mpiexec and shows their progress.

Owns the mpiexec process: assigns cores to roles, forwards Ctrl-C and termination to the
controller (which drains), and ends what is left when the deadline passes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import psutil

from areal_hpc import runlock
from areal_hpc.config.load import ConfigError, load_config, save_config
from areal_hpc.config.schema import Config
from areal_hpc.launch.preflight import check_files, check_run_folder
from areal_hpc.paths import RunPaths

KILL_GRACE_S = 10.0


def run_local(config_path: str, overrides: list[str]) -> int:
    """Check, start, follow and end a run; returns the exit code."""
    config = load_config(config_path, overrides)
    found = check_files(config)
    resumed = check_run_folder(config, found.prompts)
    paths = RunPaths(Path(config.run.folder).expanduser().resolve())
    paths.create()
    with runlock.acquire(paths.lock, take_over=config.run.take_over) as lock:
        save_config(config, paths.config)
        print(
            f"model {found.model_type}, {found.num_parameters / 1e6:.1f}M parameters; "
            f"{len(found.prompts.train)} training and {len(found.prompts.heldout)} held-out prompts"
            + (f" ({found.prompts.num_removed} left out of training: held out)" if found.prompts.num_removed else "")
        )
        print(("resuming" if resumed else "starting") + f" run {config.run.name!r} in {paths.root}", flush=True)
        return finish_run(config, paths, lock.token)


def finish_run(config: Config, paths: RunPaths, lock_token: str) -> int:
    """Run all ranks to the end and print what came of it; returns the exit code.

    lock_token: of the lock that this process holds, for the controller.
    """
    began = time.time()
    code = start_ranks(config, paths, lock_token)
    if code == 1 and _finished_since(paths, began):
        print("warning: a rank did not end in order, after the run had finished and saved: nothing is lost")
        code = 0
    if code == 0:
        print_result(paths)
    return code


def _finished_since(paths: RunPaths, began: float) -> bool:
    """Whether the controller's last word, spoken after `began`, is that the run is finished."""
    try:
        written = paths.status.stat().st_mtime
        return written >= began and json.loads(paths.status.read_text(encoding="utf-8"))["state"] == "finished"
    except (OSError, ValueError, KeyError):
        return False


def start_ranks(config: Config, paths: RunPaths, lock_token: str) -> int:
    """Run all ranks to the end; returns mpiexec's exit code."""
    process = subprocess.Popen(
        mpi_command(config, ["-m", "areal_hpc.main", "--run", str(paths.root)]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # A group of its own: Ctrl-C on the terminal must reach the controller once, through us.
        start_new_session=True,
        env=rank_environment() | {runlock.HANDED_OVER: lock_token},
    )
    return follow(process, config, paths)


def mpi_command(config: Config, arguments: list[str]) -> list[str]:
    """mpiexec with one section per role, each with its own cores and thread count."""
    command = [find_mpiexec()]
    for role, ranks, environment in role_environments(config):
        command += [":"] if len(command) > 1 else []
        command += ["-n", str(ranks)]
        for name, value in environment.items():
            command += ["-env", name, value]
        command += [sys.executable, *arguments]
    return command


def role_environments(config: Config) -> list[tuple[str, int, dict[str, str]]]:
    """(role, ranks, environment) in world rank order.

    The cores of this machine are dealt out: each rollout engine gets its own, from the
    last one downwards, and the trainers compute with one thread each where cores are few.
    Reward ranks and their workers take what the others leave, as pools beside engines do.
    """
    cores = sorted(os.sched_getaffinity(0))
    trainers, rollouts = config.groups.trainer, config.groups.rollout
    per_engine = max(1, (len(cores) - trainers.ranks) // rollouts.ranks) if len(cores) > trainers.ranks else 1
    threads = max(1, (len(cores) - per_engine * rollouts.ranks) // trainers.ranks)
    environments = [
        ("controller", 1, {"OMP_NUM_THREADS": "1"}),
        ("trainer", trainers.ranks, {"OMP_NUM_THREADS": str(threads)}),
    ]
    for rank in range(rollouts.ranks):
        first = len(cores) - (rank + 1) * per_engine
        mine = [cores[(first + offset) % len(cores)] for offset in range(per_engine)]
        environments.append(
            ("rollout", 1, {"AREAL_ENGINE_CORES": ",".join(map(str, mine)), "OMP_NUM_THREADS": str(per_engine)})
        )
    if config.groups.reward.ranks:
        environments.append(("reward", config.groups.reward.ranks, {"OMP_NUM_THREADS": "1"}))
    return environments


def rank_environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault("HF_HUB_OFFLINE", "1")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment.setdefault("PYTHONUNBUFFERED", "1")
    return environment


def find_mpiexec() -> str:
    """mpiexec of this Python environment, else of the PATH."""
    own = Path(sys.prefix) / "bin" / "mpiexec"
    found = str(own) if own.exists() else shutil.which("mpiexec")
    if not found:
        raise ConfigError("no mpiexec found; install the mpich wheel: pip install mpich==5.0.2")
    return found


def follow(process: subprocess.Popen[str], config: Config, paths: RunPaths) -> int:
    """Print the ranks' lines, show the live line, forward signals; returns the exit code."""
    requests: list[int] = []

    def forward(number: int, _frame: object) -> None:
        requests.append(number)
        if len(requests) > 1:
            _kill_tree(process)
            return
        print("\nstopping: committing and saving (once more ends the run at once)", flush=True)
        _signal_controller(process, number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    reader = threading.Thread(target=_show, args=(process.stdout, paths), daemon=True)
    reader.start()
    deadline: float | None = None
    try:
        while process.poll() is None:
            time.sleep(0.1)
            if requests and deadline is None:
                deadline = time.monotonic() + config.run.drain_deadline_s + KILL_GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                print(f"the run did not stop within {config.run.drain_deadline_s:.0f} s; ending it", flush=True)
                _kill_tree(process)
                deadline = float("inf")
        reader.join(timeout=5.0)
    finally:
        _kill_tree(process)
        for number, handler in previous.items():
            signal.signal(number, handler)
    code = process.returncode
    if len(requests) > 1 or code < 0:
        return 130 if requests else 1
    return code if code in (0, 1, 2) else 1


def _show(stream: IO[str], paths: RunPaths) -> None:
    """Lines as they come; on a terminal also one live line made from the status file."""
    if not sys.stdout.isatty():
        for line in stream:
            print(_with_rank(line, paths), end="", flush=True)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    finished = threading.Event()
    with Live(console=console, transient=True, refresh_per_second=4) as live:

        def refresh() -> None:
            while not finished.wait(0.5):
                live.update(Text(live_line(paths), no_wrap=True, overflow="ellipsis", style="dim"))

        threading.Thread(target=refresh, daemon=True).start()
        for line in stream:
            live.console.print(Text(_with_rank(line, paths).rstrip("\n")))
        finished.set()


def _with_rank(line: str, paths: RunPaths) -> str:
    """mpiexec names a lost process by its id alone: add the rank and its log."""
    lost = re.search(r"PID (\d+) RUNNING AT", line)
    if lost is None:
        return line
    for log in sorted(paths.logs.glob("*.log")):
        if re.search(rf"\bpid {lost[1]}$", log.read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
            role, _, rank = log.stem.rpartition("-")
            return f"{line.rstrip()}: {role} {int(rank)} (log: {log})\n"
    return line


def live_line(paths: RunPaths) -> str:
    """The state of a run in one line, from its status file."""
    try:
        status = json.loads(paths.status.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "starting ..."
    parts = [str(status.get("state", "?"))]
    for key, form in (
        ("train_step", "step {}"),
        ("version", "version {}"),
        ("num_running", "{} generating"),
        ("ready_groups", "{} groups ready"),
        ("gen_tokens_per_s", "{:.0f} tok/s"),
    ):
        if status.get(key) is not None:
            parts.append(form.format(status[key]))
    return " · ".join(parts)


def print_result(paths: RunPaths) -> None:
    """The last two lines of a run: held-out accuracy, if it was measured, and the folder."""
    accuracies = [record["accuracy"] for record in _records(paths.metrics) if record.get("kind") == "eval"]
    if accuracies:
        print(f"held-out accuracy: {accuracies[0]:.3f} -> {accuracies[-1]:.3f}")
    print(f"run folder: {paths.root}", flush=True)


def _records(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _ranks(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _signal_controller(process: subprocess.Popen[str], number: int) -> None:
    for child in _ranks(process):
        try:
            if child.environ().get("PMI_RANK") == "0" and "areal_hpc.main" in child.cmdline():
                child.send_signal(number)
                return
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    _kill_tree(process)


def _kill_tree(process: subprocess.Popen[str]) -> None:
    """SIGKILL to mpiexec and everything below it."""
    for child in _ranks(process):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
    if process.poll() is None:
        process.kill()
        process.wait()
