"""One run folder, one run: a lock file with owner, host, process and job.

The controller holds it for the life of a run and refreshes its time; the launcher looks
before it starts anything. A lock whose holder is certainly gone (its process on this
host, or an earlier step of the same job) is taken over; one that only looks
abandoned is explained, and taken over when the user asks for it.
"""

from __future__ import annotations

import errno
import getpass
import json
import os
import secrets
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_hpc.config.errors import ConfigError

REFRESH_S = 10.0
STALE_S = 120.0
"""Without a refresh for this long a holder on another host looks abandoned."""


@dataclass(frozen=True)
class Holder:
    """Who holds a run folder. `started` is the process's start time in clock ticks since boot."""

    owner: str
    host: str
    pid: int
    started: int
    job_id: str
    since: float
    token: str

    def describe(self) -> str:
        job = f", job {self.job_id}" if self.job_id else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.owner} on {self.host} (pid {self.pid}{job}) since {since}"


class RunLock:
    """A held lock. Use as a context manager."""

    def __init__(self, path: Path, holder: Holder) -> None:
        self._path, self._holder = path, holder
        self._next_refresh = time.monotonic() + REFRESH_S

    def refresh(self) -> None:
        """Show every REFRESH_S that the holder is alive.

        Raises RuntimeError if somebody took the lock over: two writers must not go on.
        """
        now = time.monotonic()
        if now < self._next_refresh:
            return
        self._next_refresh = now + REFRESH_S
        found = read_holder(self._path)
        if found != self._holder:
            whom = found.describe() if found else "nobody: the file is gone"
            raise RuntimeError(f"the lock {self._path} was taken over by {whom}")
        os.utime(self._path)

    def release(self) -> None:
        if read_holder(self._path) == self._holder:
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def acquire(path: Path, *, take_over: bool = False) -> RunLock:
    """Take the lock of a run folder.

    Raises ConfigError that explains who holds it. `take_over` also takes a lock that only
    looks abandoned, never one whose holder was alive a moment ago.
    """
    holder = Holder(
        owner=getpass.getuser(),
        host=socket.gethostname(),
        pid=os.getpid(),
        started=_process_start(os.getpid()) or 0,
        job_id=os.environ.get("SLURM_JOB_ID", ""),
        since=time.time(),
        token=secrets.token_hex(8),
    )
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
        raise ConfigError(_refusal(path, f"it was taken a moment ago ({error.filename2 or error.filename})")) from None
    finally:
        Path(temporary).unlink(missing_ok=True)
    return RunLock(path, holder)


def _replace(path: Path, before: Holder, temporary: str) -> None:
    """Put `temporary` in the place of the lock of `before`. FileExistsError if another process is first."""
    claim = path.with_name(f".{path.name}.{before.token}.claim")
    os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        # Only who holds the claim replaces this holder's lock, so that it cannot change now.
        if read_holder(path) != before:
            raise FileExistsError(errno.EEXIST, "taken over", str(path))
        os.replace(temporary, path)
    finally:
        claim.unlink()


def check(path: Path, *, take_over: bool = False, job_id: str = "") -> Holder | None:
    """The former holder, whose lock may be taken over, or None if there is no lock.

    Raises ConfigError if the lock at `path` keeps a run from starting.
    """
    holder = read_holder(path)
    if holder is None or _is_gone(holder, job_id):
        return holder
    age = _age_s(path)
    if holder.host == socket.gethostname():
        raise ConfigError(_refusal(path, "its process is running: stop it first"))
    if age is not None and age <= STALE_S:
        raise ConfigError(_refusal(path, f"it gave a sign of life {age:.0f} s ago: stop it first"))
    if not take_over:
        raise ConfigError(
            _refusal(path, f"it gave no sign of life for {age or 0:.0f} s; if it is surely dead, set run.take_over=true")
        )
    return holder


def read_holder(path: Path) -> Holder | None:
    """Who is named in a lock file; None if there is none. ConfigError if it is not a lock file."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise ConfigError(f"{path} is not a lock file of this program: remove it if no run uses the folder") from None


def _is_gone(holder: Holder, job_id: str) -> bool:
    """Whether the holder certainly does not run any more."""
    if holder.host == socket.gethostname():
        return _process_start(holder.pid) != holder.started
    # A job's steps follow one another: another one of the same job has ended.
    return bool(holder.job_id) and holder.job_id == job_id


def _refusal(path: Path, why: str) -> str:
    holder = read_holder(path)
    whom = holder.describe() if holder else "another run"
    return f"run folder {path.parent} is in use by {whom}; {why}"


def _age_s(path: Path) -> float | None:
    """Seconds since the last refresh by the filesystem's own clock, which all hosts share."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".clock.") as probe:
        now = os.fstat(probe.fileno()).st_mtime
        try:
            return max(0.0, now - path.stat().st_mtime)
        except FileNotFoundError:
            return None


def _process_start(pid: int) -> int | None:
    """Start time of a process, which tells it from a later one with its id; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
