"""Runs Python programs that nobody trusts, without root.

`run_python` runs one program; `Cage` keeps a sandbox open for many runs of one program
(the tests of the code reward). Uses bubblewrap's namespaces and a system call filter;
without namespaces Landlock, the filter and resource limits; `protections` tries each
protection out and says which are missing. Called by `code` in reward workers and by
workflows with a Python tool. Owns the scratch folders; nothing outlives a `Cage`.
"""

from __future__ import annotations

import functools
import marshal
import os
import select
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.rewards import isolation
from areal_hpc.rewards.isolation import Isolation, SandboxError
from areal_hpc.rewards.proctree import kill_tree

START_DEADLINE_S = 30.0
REPLY_GRACE_S = 0.5
"""The supervisor inside enforces the time limit; this long after it the sandbox is killed from outside."""
CLOSE_GRACE_S = 0.5
MAX_OUTPUT_BYTES = 1024 * 1024
MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_PROCESSES = 64
"""Processes and threads of one program."""
MAX_OPEN_FILES = 256
DEFAULT_MEMORY_BYTES = 1024**3
INNER_MODULES = ("proctree", "confine", "values", "inner", "runner")
BOOT = """
import os, sys, marshal
def take(size, data=b""):
    while len(data) < size:
        piece = os.read(descriptors[0], size - len(data))
        if not piece: os._exit(1)
        data += piece
    return data
descriptors = [int(number) for number in sys.argv[1:]]
setup, codes = marshal.loads(take(int.from_bytes(take(4), "big")))
for code in codes: exec(code)
serve_requests(setup, descriptors)
"""
REPLY = struct.Struct("=BiidII")  # as in runner
VERDICTS = ("ok", "exit", "error", "timeout", "memory", "output")


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended.

    verdict: "ok" (ran to its end), "exit" (sys.exit(0) before it), "error" (exception,
    other exit code, signal), "timeout", "memory" or "output" (over that limit).
    returncode is negative for a signal, as in `subprocess`.
    """

    stdout: str
    stderr: str
    returncode: int
    verdict: str
    seconds: float


def run_python(
    code: str,
    stdin: str = "",
    *,
    timeout_s: float = 5.0,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    files: Mapping[str, str | bytes] | None = None,
    paths: Sequence[str] = (),
    require: bool = True,
) -> SandboxResult:
    """Run a program in a sandbox of its own.

    `files` lie in its working folder; `paths` are folders it may also read and import
    from (readable by all if this is root, whose programs run as nobody). Raises
    SandboxError if no sandbox can be made or, with `require`, if a protection is
    missing. Blocks: call it in a thread from an event loop.
    """
    if require and missing_protections():
        raise SandboxError(f"the sandbox lacks protections: {'; '.join(missing_protections())}")
    with Cage(paths=paths) as cage:
        return cage.run(code, stdin, timeout_s=timeout_s, memory_bytes=memory_bytes, files=files)


class Cage:
    """One open sandbox; each `run` gets a fresh process and an empty working folder.

    `calls` adds a pair of pipes to the program, for its tests (see `code`).
    """

    def __init__(
        self,
        *,
        paths: Sequence[str] = (),
        isolation_mode: Isolation | None = None,
        calls: bool = False,
    ) -> None:
        self._isolation = isolation_mode or find_isolation()
        self._scratch = ""
        self._process: subprocess.Popen | None = None
        self._descriptors: list[int] = []
        self.calls_out = self.calls_in = -1
        try:
            self._start([os.path.realpath(path) for path in paths], calls)
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return self._process is None

    def __enter__(self) -> Cage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, paths: list[str], calls: bool) -> None:
        inner, outer = [], []
        for inner_end, outer_end in [(0, 1), (1, 0)] * (2 if calls else 1):
            pipe = os.pipe()
            inner.append(pipe[inner_end])
            outer.append(pipe[outer_end])
        self._descriptors = outer
        self._requests, self._replies = outer[:2]
        if calls:
            self.calls_out, self.calls_in = outer[2:]
        if not self._isolation.namespaces:
            self._scratch = tempfile.mkdtemp(prefix="areal-sandbox-")
        scratch = self._scratch or isolation.INNER_SCRATCH
        command = self._isolation.command(
            ["-c", BOOT, *map(str, inner)], paths=paths, scratch=scratch, scratch_bytes=MAX_FILE_BYTES
        )
        try:
            self._process = subprocess.Popen(
                command.arguments,
                pass_fds=[*inner, *command.descriptors],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=command.environment,
                cwd=self._scratch or "/",
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"the sandbox cannot be started: {error}") from error
        finally:
            for descriptor in [*inner, *command.owned]:
                os.close(descriptor)
        setup = {
            "drop_to": self._isolation.drop_to,
            "paths": paths,
            "scratch": scratch,
            "confine": not self._isolation.namespaces,
            "readable": [*isolation.readable_roots(), *paths],
            "devices": [f"/dev/{name}" for name in isolation.DEVICES],
        }
        deadline = time.monotonic() + START_DEADLINE_S
        try:
            self._send(marshal.dumps((setup, _inner_codes())))
            ready = read_exactly(self._replies, 1, deadline)
        except (OSError, TimeoutError):
            ready = None
        if ready is None:
            raise SandboxError(f"the sandbox did not start: {self._last_words()}")

    def run(
        self,
        code: str | bytes,
        stdin: str = "",
        *,
        timeout_s: float,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        files: Mapping[str, str | bytes] | None = None,
    ) -> SandboxResult:
        """Run a program to its end or to a limit."""
        self.begin(
            code,
            stdin,
            mode="program",
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
            max_output_bytes=max_output_bytes,
            files=files,
        )
        return self.result(timeout_s)

    def begin(
        self,
        code: str | bytes,
        stdin: str = "",
        *,
        mode: str,
        timeout_s: float,
        memory_bytes: int,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        files: Mapping[str, str | bytes] | None = None,
    ) -> None:
        """Start a run; `mode` is program, calls (answer calls) or tests (make calls)."""
        limits = {
            "RLIMIT_AS": memory_bytes,
            "RLIMIT_CPU": int(timeout_s) + 2,
            "RLIMIT_FSIZE": MAX_FILE_BYTES,
            "RLIMIT_NOFILE": MAX_OPEN_FILES,
            "RLIMIT_CORE": 0,
        }
        if self._isolation.limits_processes:
            limits["RLIMIT_NPROC"] = MAX_PROCESSES
        request = {
            "mode": mode,
            "code": code if isinstance(code, bytes) else code.encode("utf-8", "replace"),
            "stdin": stdin.encode("utf-8", "replace"),
            "timeout_s": timeout_s,
            "memory_bytes": memory_bytes,
            "max_output_bytes": max_output_bytes,
            "limits": limits,
            "files": {_inside(name): _as_bytes(content) for name, content in (files or {}).items()},
        }
        self._send(marshal.dumps(request))

    def result(self, timeout_s: float) -> SandboxResult:
        """The result of the run that was begun; never later than `timeout_s` and a grace."""
        start = time.monotonic()
        deadline = start + timeout_s + REPLY_GRACE_S
        try:
            head = read_exactly(self._replies, REPLY.size, deadline)
            if head is None:
                return SandboxResult("", "the sandbox was killed", -9, "error", time.monotonic() - start)
            verdict, code, number, seconds, num_stdout, num_stderr = REPLY.unpack(head)
            body = read_exactly(self._replies, num_stdout + num_stderr, deadline + REPLY_GRACE_S)
        except TimeoutError:
            self.close()
            return SandboxResult("", "", -9, "timeout", time.monotonic() - start)
        if body is None:
            return SandboxResult("", "the sandbox was killed", -9, "error", seconds)
        return SandboxResult(
            body[:num_stdout].decode("utf-8", "replace"),
            body[num_stdout:].decode("utf-8", "replace"),
            -number if number else code,
            VERDICTS[verdict],
            seconds,
        )

    def close(self) -> None:
        """End everything inside; safe to call twice."""
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)  # the supervisor ends when its pipe does
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(CLOSE_GRACE_S)
            except subprocess.TimeoutExpired:
                kill_tree(process.pid)
                process.wait()
            process.stderr.close()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _send(self, data: bytes) -> None:
        try:
            write_all(self._requests, len(data).to_bytes(4, "big") + data)
        except BrokenPipeError:
            pass  # the sandbox is gone: `result` says so

    def _last_words(self) -> str:
        if self._process is None:
            return ""
        kill_tree(self._process.pid)
        self._process.wait()
        return self._process.stderr.read(4096).decode("utf-8", "replace").strip() or "no message"


def read_exactly(descriptor: int, size: int, deadline: float) -> bytes | None:
    """`size` bytes of a pipe; None if it closes before, TimeoutError if the deadline comes first."""
    data = bytearray()
    while len(data) < size:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            raise TimeoutError(f"no answer from the sandbox, {len(data)} of {size} bytes came")
        piece = os.read(descriptor, min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@functools.cache
def _inner_codes() -> list:
    """Compiled modules for the inside, whose interpreter is the same."""
    folder = Path(__file__).parent
    return [
        compile((folder / f"{name}.py").read_bytes(), f"<{name}>", "exec", dont_inherit=True)
        for name in INNER_MODULES
    ]


def _inside(name: str) -> str:
    """A file name that stays in the working folder."""
    normal = os.path.normpath(name)
    if os.path.isabs(normal) or normal.split(os.sep)[0] in ("..", "."):
        raise ValueError(f"file name {name!r} leaves the program's working folder")
    return normal


def _as_bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode()


# ---- what protects -----------------------------------------------------------------


@functools.cache
def find_isolation() -> Isolation:
    """The strongest isolation that starts here; tried once per process."""
    for candidate in isolation.candidates():
        try:
            with Cage(isolation_mode=candidate) as cage:
                if cage.run("print(6 * 7)", timeout_s=10.0).stdout == "42\n":
                    return candidate
        except SandboxError:
            continue
    raise SandboxError("no program can be run here, not even without isolation")


@dataclass(frozen=True)
class Protection:
    """One protection: whether it holds on this machine and what it means if it does not."""

    name: str
    present: bool
    consequence: str


@functools.cache
def protections() -> tuple[Protection, ...]:
    """Each protection, found by trying to break it from inside."""
    from areal_hpc.rewards.selftest import try_to_break

    broken = try_to_break(find_isolation())
    return tuple(
        Protection(name, name not in broken, consequence)
        for name, consequence in isolation.CONSEQUENCES.items()
    )


def missing_protections() -> list[str]:
    """One line for each protection that does not hold here."""
    return [f"{p.name}: {p.consequence}" for p in protections() if not p.present]
