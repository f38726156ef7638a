"""One run folder, one run: a lock file with owner, host, process and job.

`areal-hpc run` takes it before it writes anything and hands it to its controller; a job's
controller takes it before any rank writes. A thread of the holder shows every REFRESH_S
that it lives, whatever else it does. A lock whose holder is certainly gone (its process on
this host, or an earlier step of the same job that has gone silent) is taken over; one that
only looks abandoned is explained, and taken over when the user asks for it.
"""

from __future__ import annotations

import errno
import getpass
import json
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_hpc.config.errors import ConfigError
from areal_hpc.durable import disk_full

REFRESH_S = 5.0
SILENT_S = 4 * REFRESH_S
"""Without a refresh for this long an earlier step of the same job has ended."""
STALE_S = 120.0
"""Without a refresh for this long a holder on another host looks abandoned."""
POLL_S = 0.5
LOCK_BYTES = 1024
"""At most this much is a lock file long."""

HANDED_OVER = "AREAL_RUN_LOCK"
"""Environment variable by which a launcher hands its lock (the token) to the controller."""


class FolderInUseError(ConfigError):
    """Another run holds the folder: waiting may help, unlike with the other mistakes of a user."""


@dataclass(frozen=True)
class Holder:
    """Who holds a run folder. `started` is the process's start time in clock ticks since boot.

    boot, pids: which start of the machine, which numbering of its processes; "" if unknown.
    """

    owner: str
    host: str
    pid: int
    started: int
    job_id: str
    since: float
    token: str
    boot: str = ""
    pids: str = ""

    def describe(self) -> str:
        job = f", job {self.job_id}" if self.job_id else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.owner} on {self.host} (pid {self.pid}{job}) since {since}"


class RunLock:
    """A held lock, refreshed by a thread of its own. Use as a context manager."""

    def __init__(self, path: Path, holder: Holder, on_lost: Callable[[RuntimeError], None] | None) -> None:
        self._path, self._holder, self._on_lost = path, holder, on_lost
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="runlock", daemon=True)
        self._thread.start()

    @property
    def token(self) -> str:
        return self._holder.token

    def _refresh(self) -> None:
        while not self._released.wait(REFRESH_S):
            try:
                found = read_holder(self._path)
                if found == self._holder:
                    os.utime(self._path)
                    continue
                whom = found.describe() if found else "nobody: the file is gone"
            except ConfigError as error:
                whom = f"something else: {error}"
            except OSError as error:
                logging.getLogger(__name__).warning("the lock %s cannot be refreshed: %s", self._path, error)
                continue
            if self._on_lost is not None:
                # Two writers must not go on.
                self._on_lost(RuntimeError(f"the lock {self._path} was taken over by {whom}"))
            return

    def release(self) -> None:
        """Give the folder back; a lock that somebody else took or was handed stays."""
        self._released.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if read_holder(self._path) == self._holder:
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def acquire(
    path: Path,
    *,
    take_over: bool = False,
    handed_over: str = "",
    on_lost: Callable[[RuntimeError], None] | None = None,
) -> RunLock:
    """Take the lock of a run folder.

    Raises FolderInUseError that explains who holds it. `take_over` also takes a lock that
    only looks abandoned, never one whose holder was alive a moment ago; `handed_over` is the
    token of a holder who gives it to this process. `on_lost` is called once, in the lock's
    thread, if somebody else took the lock. May wait SILENT_S for an earlier step to be silent.
    Raises DiskFullError when there is no space.
    """
    pid = os.getpid()
    holder = Holder(
        owner=getpass.getuser(),
        host=socket.gethostname(),
        pid=pid,
        started=_process_start(pid) or 0,
        job_id=os.environ.get("SLURM_JOB_ID", ""),
        since=time.time(),
        token=secrets.token_hex(8),
        boot=_boot(),
        pids=_pid_namespace(),
    )
    before = read_holder(path)
    if before is None or not handed_over or before.token != handed_over:
        before = check(path, take_over=take_over, job_id=holder.job_id)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump(asdict(holder), stream)
            stream.flush()
            os.fsync(stream.fileno())
        if before is None:
            # A link, unlike a rename, never replaces what another process has just put there.
            os.link(temporary, path)
        else:
            _replace(path, before, temporary)
    except FileExistsError as error:
        why = f"it was taken a moment ago ({error.filename2 or error.filename})"
        raise FolderInUseError(_refusal(path, why)) from None
    except OSError as error:
        raise disk_full(error, path, LOCK_BYTES) or error from None
    finally:
        Path(temporary).unlink(missing_ok=True)
    return RunLock(path, holder, on_lost)


def _replace(path: Path, before: Holder, temporary: str) -> None:
    """Put `temporary` in the place of the lock of `before`. FileExistsError if another process is first."""
    claim = path.with_name(f".{path.name}.{before.token}.claim")
    _drop_old_claim(claim)
    os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        # Only who holds the claim replaces this holder's lock, so that it cannot change now.
        if read_holder(path) != before:
            raise FileExistsError(errno.EEXIST, "taken over", str(path))
        os.replace(temporary, path)
    finally:
        claim.unlink(missing_ok=True)


def _drop_old_claim(claim: Path) -> None:
    """Remove the claim of a process that was killed while it held it, which is a matter of milliseconds."""
    if (_age_s(claim) or 0.0) <= STALE_S:
        return
    aside = claim.with_name(f"{claim.name}.{secrets.token_hex(8)}")
    try:
        os.rename(claim, aside)
    except FileNotFoundError:
        return
    if (_age_s(aside) or 0.0) <= STALE_S:
        # Another process was faster and this is its own new claim: back with it.
        os.link(aside, claim)
    aside.unlink()


def check(path: Path, *, take_over: bool = False, job_id: str = "") -> Holder | None:
    """The former holder, whose lock may be taken over, or None if there is no lock.

    Raises FolderInUseError if the lock at `path` keeps a run of Slurm job `job_id` from
    starting. Changes nothing. Waits up to SILENT_S for an earlier step of that job.
    """
    while True:
        holder = read_holder(path)
        if holder is None:
            return None
        if _is_neighbour(holder):
            if _process_start(holder.pid) == holder.started:
                raise FolderInUseError(_refusal(path, "its process is running: stop it first"))
            return holder
        age = _age_s(path)
        if age is None:
            continue
        if not _has_probably_ended(holder, job_id):
            break
        if age > SILENT_S:
            return holder
        if not _stays_silent(path, age):
            raise FolderInUseError(_refusal(path, "it is alive: stop it first"))
    if age <= STALE_S:
        raise FolderInUseError(_refusal(path, f"it gave a sign of life {age:.0f} s ago: stop it first"))
    if not take_over:
        raise FolderInUseError(
            _refusal(path, f"it gave no sign of life for {age:.0f} s; if it is surely dead, set run.take_over=true")
        )
    return holder


def _stays_silent(path: Path, age_s: float) -> bool:
    """Whether nobody refreshes the lock from its present age on until that is SILENT_S, or it goes away."""
    while age_s <= SILENT_S:
        time.sleep(POLL_S)
        now = _age_s(path)
        if now is None:
            return True
        if now < age_s:
            return False
        age_s = now
    return True


def read_holder(path: Path) -> Holder | None:
    """Who is named in a lock file; None if there is none. ConfigError if it is not a lock file."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise ConfigError(f"{path} is not a lock file of this program: remove it if no run uses the folder") from None


def _is_neighbour(holder: Holder) -> bool:
    """Whether the holder's process, if it lives, has its number on this machine as seen from here."""
    if holder.host != socket.gethostname():
        return False
    return (holder.boot, holder.pids) in (("", ""), (_boot(), _pid_namespace()))


def _has_probably_ended(holder: Holder, job_id: str) -> bool:
    """Whether silence is enough to take the holder for dead.

    The steps of a job follow one another, though two may run side by side in one salloc; a
    machine that was started again runs nothing of before, but another may have its name.
    """
    rebooted = holder.host == socket.gethostname() and holder.boot != _boot()
    return rebooted or (bool(holder.job_id) and holder.job_id == job_id)


def _refusal(path: Path, why: str) -> str:
    holder = read_holder(path)
    whom = holder.describe() if holder else "another run"
    return f"run folder {path.parent} is in use by {whom}; {why}"


def _age_s(path: Path) -> float | None:
    """Seconds since a file's last change by the filesystem's own clock, which all hosts share; None without it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".clock.") as probe:
        now = os.fstat(probe.fileno()).st_mtime
        try:
            # Opened, not only looked up: a network filesystem may answer a look from its cache.
            with open(path, "rb") as stream:
                return max(0.0, now - os.fstat(stream.fileno()).st_mtime)
        except FileNotFoundError:
            return None


def _boot() -> str:
    """Which start of this machine it is; "" where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _process_start(pid: int) -> int | None:
    """Start time of a process, which tells it from a later one with its id; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
