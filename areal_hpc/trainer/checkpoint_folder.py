"""Checkpoint folders on disk: which are whole, which is the newest, which may go.

A checkpoint is a folder `step-NNNNNNNN` whose `manifest.json` names every other file with
its size and SHA-256 digest. It is written under a temporary name and renamed when whole,
so the digests guard against what happens later. Imports no torch: `checkpoint` writes and
reads the contents, command-line tools look at the folders only.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from areal_hpc.durable import REPLACED, replace_folder, restore_folder, sync_folder, write_durably
from areal_hpc.paths import RunPaths
from areal_hpc.terminal import echo

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
log = logging.getLogger(__name__)


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not what its manifest says; the message names file and reason."""


class FileEntry(msgspec.Struct, frozen=True):
    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint holds; `files` by path relative to its folder."""

    train_step: int
    version: int
    config_digest: str
    layout: str
    files: dict[str, FileEntry]
    schema: int = SCHEMA_VERSION


def describe_file(path: Path) -> FileEntry:
    """Size and digest of a file, after flushing it to disk."""
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
        digest = hashlib.file_digest(stream, "sha256")
        return FileEntry(stream.tell(), digest.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_durably(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def publish(temporary: Path, final: Path, manifest: Manifest) -> None:
    """Make a folder with all its files a checkpoint. One of the same step stays until then.

    Step N is saved again when a life ended between its checkpoint and the end of the run, or
    for its Hugging Face folder: a kill must not cost the good one. Files are synced already.
    """
    write_manifest(temporary, manifest)
    for folder in sorted(path for path in temporary.rglob("*") if path.is_dir()):
        sync_folder(folder)
    sync_folder(temporary)
    replace_folder(temporary, final)


def verify(folder: Path) -> Manifest:
    """Read every file and compare; raises DamagedCheckpoint for the first that differs."""
    manifest = read_manifest(folder)

    def check(item: tuple[str, FileEntry]) -> None:
        name, entry = item
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{folder}: {name} is missing")
        found = describe_file(path)
        if found != entry:
            what = "size" if found.num_bytes != entry.num_bytes else "digest"
            raise DamagedCheckpoint(f"{folder}: {name} has another {what} than its manifest says")

    # Digests release the interpreter lock: several files at once.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(check, manifest.files.items()))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise DamagedCheckpoint(f"{folder}: {MANIFEST} is not readable: {error}") from None
    if manifest.schema != SCHEMA_VERSION:
        raise DamagedCheckpoint(f"{folder}: schema {manifest.schema}, this program reads {SCHEMA_VERSION}")
    for name in manifest.files:
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise DamagedCheckpoint(f"{folder}: {MANIFEST} names {name!r}, which lies outside")
    return manifest


def list_checkpoints(paths: RunPaths) -> list[Path]:
    """Folders with a final name, oldest first."""
    return sorted(path for path in paths.checkpoints.glob("step-*") if path.is_dir())


def find_checkpoint(
    paths: RunPaths, train_step: int | None = None, *, set_aside: bool = False
) -> tuple[Path, Manifest] | None:
    """The newest whole checkpoint (or that of `train_step`), None if there is none.

    A damaged one is passed over with a warning that names it, unless it was asked for:
    then DamagedCheckpoint is raised. With `set_aside` it goes to quarantine, so that it
    takes no place among those that are kept and nobody takes its step for reached.
    """
    if train_step is not None:
        folder = paths.checkpoint(train_step)
        return (folder, verify(folder)) if folder.is_dir() else None
    for folder in reversed(list_checkpoints(paths)):
        try:
            return folder, verify(folder)
        except DamagedCheckpoint as error:
            text = f"checkpoint is damaged, falling back to the one before: {error}"
            log.warning(text)
            if set_aside:
                echo(f"warning: {text}")
                _quarantine(paths, folder)
    return None


def _quarantine(paths: RunPaths, folder: Path) -> None:
    paths.quarantine.mkdir(mode=0o700, exist_ok=True)
    target = paths.quarantine / folder.name
    shutil.rmtree(target, ignore_errors=True)  # an earlier one of the same step
    os.rename(folder, target)


def prune(paths: RunPaths, keep_last: int, keep_every: int) -> list[Path]:
    """Delete all but the last `keep_last` checkpoints and each multiple of `keep_every` (0: none)."""
    removed = []
    for folder in list_checkpoints(paths)[:-keep_last]:
        step = int(folder.name.removeprefix("step-"))
        if keep_every and step % keep_every == 0:
            continue
        # Renamed first: a deletion that is cut short must not leave half a checkpoint.
        doomed = folder.with_name(f".{folder.name}.old")
        os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        removed.append(folder)
    return removed


def remove_leftovers(paths: RunPaths) -> None:
    """Delete what an earlier life began to write or to delete; put back what it was about to replace."""
    for aside in paths.checkpoints.glob(f".step-*{REPLACED}"):
        restore_folder(aside.with_name(aside.name.removeprefix(".").removesuffix(REPLACED)))
    for leftover in paths.checkpoints.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
