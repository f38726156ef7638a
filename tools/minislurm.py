#!/usr/bin/env python3
"""A real Slurm on one machine: rehearse a launch before you spend an allocation.

    python tools/minislurm.py up --nodes 4     start munged, slurmctld and 4 slurmd on loopback
    python tools/minislurm.py status           nodes, queue and the export line
    python tools/minislurm.py down             end the jobs and exactly what `up` started

Owns one folder (default ~/.areal-minislurm): configuration, key, state, logs, and
`cluster.json`, which lists the processes it started. Ports are free ones above 1024; the
system's own Slurm and munge, if there are any, are neither used nor touched. Needs the
programs of Debian's slurm-wlm and munge; runs as root or as an ordinary user, who then is
the only one that can submit. Used by tests/cluster. Standard library only.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

DEFAULT_FOLDER = "~/.areal-minislurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
MAX_SOCKET_PATH = 100
"""A Unix socket's path ends at 107 bytes; munge adds a suffix to ours."""


class SetupError(Exception):
    """What the user can mend, in one line."""


@dataclass(frozen=True)
class Settings:
    """What `up` was asked for."""

    nodes: int = 4
    cpus: int = 2
    requeue_wait_s: int = 30
    kill_wait_s: int = 30
    slurmd_timeout_s: int = 60


@dataclass(frozen=True)
class Daemon:
    """A process that `up` started; `started` (clock ticks since boot) tells it from a later one of its id."""

    name: str
    pid: int
    started: int


@dataclass(frozen=True)
class Layout:
    """Every path below the cluster's folder."""

    folder: Path

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def record(self) -> Path:
        return self.folder / "cluster.json"

    @property
    def socket(self) -> Path:
        return self.folder / "munge" / "socket"

    def log(self, name: str) -> Path:
        return self.folder / "log" / f"{name}.log"


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    layout = Layout(Path(arguments.folder).expanduser().resolve())
    try:
        if arguments.command == "up":
            settings = Settings(
                arguments.nodes, arguments.cpus, arguments.requeue_wait, arguments.kill_wait,
                arguments.slurmd_timeout,
            )
            up(layout, settings)
        elif arguments.command == "down":
            down(layout)
        else:
            return status(layout)
    except SetupError as error:
        print(f"minislurm: {error}", file=sys.stderr)
        return 2
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("up", "down", "status"))
    parser.add_argument("--folder", default=DEFAULT_FOLDER, help="default %(default)s")
    parser.add_argument("--nodes", type=int, default=4, help="number of nodes n1, n2, ... (default %(default)s)")
    parser.add_argument(
        "--cpus", type=int, default=2, help="CPUs each node claims, whatever the machine has (default %(default)s)"
    )
    parser.add_argument(
        "--requeue-wait", type=int, default=30, help="seconds before a requeued job may start (default %(default)s)"
    )
    parser.add_argument(
        "--kill-wait", type=int, default=30, help="seconds between SIGTERM and SIGKILL (default %(default)s)"
    )
    parser.add_argument(
        "--slurmd-timeout", type=int, default=60,
        help="seconds after which a silent node is down (default %(default)s)",
    )
    return parser.parse_args(argv)


# ---- up --------------------------------------------------------------------------


def up(layout: Layout, settings: Settings) -> None:
    """Write the configuration, start the daemons and wait until every node is idle."""
    check_programs()
    if settings.nodes < 1 or settings.cpus < 1:
        raise SetupError(f"--nodes {settings.nodes} and --cpus {settings.cpus} must be at least 1")
    if any(alive(daemon) for daemon in read_record(layout)):
        raise SetupError(f"a cluster is up in {layout.folder}; end it with: down --folder {layout.folder}")
    if len(str(layout.socket)) > MAX_SOCKET_PATH:
        raise SetupError(f"the path {layout.folder} is too long for a socket; choose a shorter --folder")
    make_folders(layout, settings)
    write_private(layout.conf, slurm_conf(layout, settings, free_ports(settings.nodes + 1)))
    daemons: list[Daemon] = []
    try:
        start_munge(layout, daemons)
        start(layout, daemons, "slurmctld", ["-D", "-i", "-f", str(layout.conf)])
        wait_for(lambda: query(layout, "scontrol", "ping") is not None, 30.0, "slurmctld", layout.log("slurmctld"))
        for node in node_names(settings):
            start(layout, daemons, "slurmd", ["-D", "-N", node, "-f", str(layout.conf)], label=f"slurmd-{node}")
        wait_for(
            lambda: len(idle_nodes(layout)) == settings.nodes, 60.0, f"{settings.nodes} idle nodes",
            layout.log("slurmctld"),
        )
    except BaseException:
        for daemon in reversed(daemons):
            end(daemon)
        layout.record.unlink(missing_ok=True)
        raise
    print(f"{settings.nodes} nodes with {settings.cpus} CPUs each are idle; partitions main (default), low, high")
    print_export(layout)


def check_programs() -> None:
    os.environ["PATH"] = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        who = "" if os.geteuid() == 0 else "ask an administrator to "
        raise SetupError(
            f"{', '.join(missing)} not found: {who}install Debian's packages: apt-get install slurm-wlm munge"
        )


def make_folders(layout: Layout, settings: Settings) -> None:
    for stale in ("state", "spool", "munge"):
        shutil.rmtree(layout.folder / stale, ignore_errors=True)
    for name in ("state", "log", "munge", "spool", "tmp"):
        (layout.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    for node in node_names(settings):
        for name in ("spool", "tmp"):
            (layout.folder / name / node).mkdir(mode=0o700, exist_ok=True)


def node_names(settings: Settings) -> list[str]:
    return [f"n{number}" for number in range(1, settings.nodes + 1)]


def slurm_conf(layout: Layout, settings: Settings, ports: list[int]) -> str:
    """One machine that plays several: every node is this host under another name and port."""
    user, host = getpass.getuser(), socket.gethostname().split(".")[0]
    memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    lines = [
        "ClusterName=minislurm",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        f"SlurmctldPort={ports[0]}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.socket},cred_expire={settings.requeue_wait_s}",
        "CredType=cred/munge",
        f"StateSaveLocation={layout.folder}/state",
        f"SlurmdSpoolDir={layout.folder}/spool/%n",
        f"SlurmctldPidFile={layout.folder}/slurmctld.pid",
        f"SlurmdPidFile={layout.folder}/spool/%n/slurmd.pid",
        f"SlurmctldLogFile={layout.log('slurmctld')}",
        f"SlurmdLogFile={layout.folder}/log/slurmd-%n.log",
        f"TmpFS={layout.folder}/tmp/%n",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SchedulerType=sched/backfill",
        # The defaults are made for thousands of jobs and let a rehearsal wait half a minute.
        "SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=0,batch_sched_delay=0",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "MailProg=/bin/true",
        f"KillWait={settings.kill_wait_s}",
        f"SlurmdTimeout={settings.slurmd_timeout_s}",
        "MessageTimeout=20",
    ]
    for node, port in zip(node_names(settings), ports[1:], strict=True):
        lines.append(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={settings.cpus} RealMemory={memory_mib} State=UNKNOWN"
        )
    grace = max(2 * settings.kill_wait_s, 60)
    lines += [
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=5 PreemptMode=OFF",
        f"PartitionName=low Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}",
        "PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=9 PreemptMode=OFF",
    ]
    return "\n".join(lines) + "\n"


def start_munge(layout: Layout, daemons: list[Daemon]) -> None:
    folder = layout.socket.parent
    key = folder / "key"
    descriptor = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(os.urandom(1024))
    start(
        layout, daemons, "munged",
        # --force: munged wants a folder that others may enter; ours is for this user alone.
        ["--foreground", "--force", f"--socket={layout.socket}", f"--key-file={key}",
         f"--pid-file={folder}/pid", f"--seed-file={folder}/seed", f"--log-file={layout.log('munged-own')}"],
    )
    wait_for(layout.socket.exists, 10.0, "munged", layout.log("munged"))


def start(
    layout: Layout, daemons: list[Daemon], program: str, arguments: list[str], label: str = ""
) -> None:
    """Start a daemon in the foreground of a session of its own and write it down at once."""
    log = layout.log((label or program) + ("-stdio" if program.startswith("slurm") else ""))
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [str(shutil.which(program)), *arguments],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            env={**os.environ, "SLURM_CONF": str(layout.conf)},
        )
    daemons.append(Daemon(label or program, process.pid, start_ticks(process.pid) or 0))
    write_private(layout.record, json.dumps([asdict(daemon) for daemon in daemons]))


def free_ports(count: int) -> list[int]:
    """Ports the system calls free; all sockets stay open until the last one is known."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


# ---- status and down -------------------------------------------------------------


def status(layout: Layout) -> int:
    """Print nodes and queue; 0 when the cluster answers, 1 when it does not."""
    daemons = read_record(layout)
    dead = [daemon.name for daemon in daemons if not alive(daemon)]
    if not daemons:
        print(f"no cluster in {layout.folder}")
        return 1
    if dead:
        print(f"not running any more: {', '.join(dead)}")
    answer = query(layout, "sinfo", "-N", "-o", "%8N %10T %5c %P")
    print(answer if answer is not None else f"slurmctld does not answer; see {layout.log('slurmctld')}")
    if answer is not None:
        print(query(layout, "squeue", "-o", "%12i %12j %10T %8M %R") or "")
    print_export(layout)
    return 0 if answer is not None and not dead else 1


def down(layout: Layout) -> None:
    """Cancel the cluster's jobs, end the daemons, and what is left of the jobs."""
    daemons = read_record(layout)
    if not daemons:
        print(f"no cluster in {layout.folder}")
        return
    if query(layout, "squeue", "-h", "-o", "%i"):
        query(layout, "scancel", f"--user={getpass.getuser()}")
        deadline = time.monotonic() + 10.0
        while query(layout, "squeue", "-h", "-o", "%i") and time.monotonic() < deadline:
            time.sleep(0.2)
    for daemon in reversed(daemons):
        end(daemon)
    left = job_processes(layout)
    for pid in left:
        send(pid, signal.SIGKILL)
    layout.record.unlink(missing_ok=True)
    print(f"ended {len(daemons)} daemons" + (f" and {len(left)} processes of jobs" if left else ""))


def job_processes(layout: Layout) -> list[int]:
    """Step daemons and tasks of this cluster that outlived their slurmd."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        ours = f"SLURM_CONF={layout.conf}".encode() in environment
        of_job = any(item.startswith(b"SLURM_JOB_ID=") for item in environment)
        if ours and (of_job or command.startswith(b"slurmstepd")):
            found.append(int(entry.name))
    return found


def end(daemon: Daemon) -> None:
    """SIGTERM, then SIGKILL after ten seconds; never another process that took over the id."""
    if not alive(daemon):
        return
    send(daemon.pid, signal.SIGTERM)
    deadline = time.monotonic() + 10.0
    while alive(daemon) and time.monotonic() < deadline:
        time.sleep(0.05)
    if alive(daemon):
        send(daemon.pid, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def alive(daemon: Daemon) -> bool:
    reap(daemon.pid)
    return start_ticks(daemon.pid) == daemon.started


def reap(pid: int) -> None:
    """A daemon of this very process stays a zombie until it is waited for."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def start_ticks(pid: int) -> int | None:
    """Start time of a process that is not a zombie, in clock ticks since boot."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])


def read_record(layout: Layout) -> list[Daemon]:
    try:
        return [Daemon(**item) for item in json.loads(layout.record.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []


# ---- helpers ---------------------------------------------------------------------


def query(layout: Layout, program: str, *arguments: str) -> str | None:
    """Output of a Slurm command; None when it fails."""
    path = shutil.which(program) or f"/usr/bin/{program}"
    try:
        done = subprocess.run(
            [path, *arguments], env={**os.environ, "SLURM_CONF": str(layout.conf)},
            capture_output=True, text=True, timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def idle_nodes(layout: Layout) -> list[str]:
    return re.findall(r"^(\S+) idle$", query(layout, "sinfo", "-h", "-N", "-p", "main", "-o", "%N %T") or "", re.M)


def wait_for(condition: object, seconds: float, what: str, log: Path) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise SetupError(f"waited {seconds:.0f} s for {what}; see {log}")
        time.sleep(0.2)


def write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)


def print_export(layout: Layout) -> None:
    print(f"export SLURM_CONF={layout.conf}")


if __name__ == "__main__":
    sys.exit(main())
