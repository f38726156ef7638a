"""Files that survive a crash: written aside, synced, renamed; and disks that are full.

Used by the spool, the ledger and the run's small JSON files. A file that has its final
name is whole: data is synced before the rename, the folder's entry after it.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a full disk and an exhausted quota answer."""


VISIBLE_S = 5.0
"""How long a filesystem may at least hide a file whose name was announced by its writer."""


REPLACED = ".replaced"
"""Ending of a folder's name while another one takes its place."""


class DiskFullError(OSError):
    """No space for a file; the message names the path and the bytes that are missing."""


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_full(error: OSError, path: Path, num_bytes: int) -> DiskFullError | None:
    """The error to raise instead of `error` if that is a full disk, else None."""
    if error.errno not in FULL:
        return None
    try:
        free = os.statvfs(path.parent)
        available = free.f_bavail * free.f_frsize
    except OSError:
        available = 0
    missing = max(num_bytes - available, 1)
    reason = "quota exhausted" if error.errno == errno.EDQUOT else "disk full"
    return DiskFullError(
        error.errno,
        f"{reason}: writing {num_bytes} bytes to {path} lacks at least {missing} bytes ({available} are free)",
    )


def find_disk_full(error: BaseException, path: Path, num_bytes: int) -> DiskFullError | None:
    """As `disk_full`, for an error of a library, which may have wrapped or swallowed the system's answer."""
    found = _answer_of_full_disk(error)
    if found is not None:
        return found if isinstance(found, DiskFullError) else disk_full(found, path, num_bytes)
    try:
        free = os.statvfs(path.parent)
    except OSError:
        return None
    if free.f_bavail * free.f_frsize < num_bytes:
        return disk_full(OSError(errno.ENOSPC, ""), path, num_bytes)
    return None


def full_disk_of(error: BaseException) -> str:
    """What an error or its causes say of a full disk: path and bytes where they are known; "" if nothing."""
    found = _answer_of_full_disk(error)
    if found is None:
        return ""
    return found.strerror if isinstance(found, DiskFullError) else f"disk full: {found}"


def _answer_of_full_disk(error: BaseException) -> OSError | None:
    """The first DiskFullError, or the system's own answer, among an error and its causes."""
    answer: OSError | None = None
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DiskFullError):
            return cause
        if answer is None and isinstance(cause, OSError) and cause.errno in FULL:
            answer = cause
        cause = cause.__cause__ or cause.__context__
    return answer


def open_own(path: str | Path, flags: int) -> int:
    """A descriptor of a file in the run folder, mode 0600, made if need be.

    Raises OSError for a symbolic link: what is written through it could land anywhere.
    """
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        why = f"{path} is a symbolic link, a run writes only to files of its own: remove it"
        raise OSError(errno.ELOOP, why) from None


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte; `os.write` may take a part only when space runs out."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def write_durably(path: Path, data: bytes) -> None:
    """Put `data` at `path`, mode 0600, so that a crash leaves the old file or the new one.

    Raises DiskFullError, leaving no temporary file behind, when there is no space.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = open_own(temporary, os.O_WRONLY | os.O_TRUNC)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_full(error, path, len(data)) or error from None


def sync_files(folder: Path) -> None:
    """Make every file and name below `folder` last."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
        elif path.is_file():
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())


def replace_folder(temporary: Path, final: Path) -> None:
    """Give a whole folder, whose files are synced, its final name; one that has it is deleted only then.

    A kill between the two renames leaves the earlier one aside: `restore_folder` puts it back.
    """
    aside = _aside(final)
    restore_folder(final)
    if final.exists():
        os.rename(final, aside)
    os.rename(temporary, final)
    sync_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def restore_folder(final: Path) -> None:
    """Undo or finish what a killed `replace_folder` began."""
    aside = _aside(final)
    if not aside.exists():
        return
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.rename(aside, final)
        sync_folder(final.parent)


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name}{REPLACED}")
