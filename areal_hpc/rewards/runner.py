"""The supervisor inside a sandbox: process 1 of its pid namespace where there is one.

Reads requests from the pipe REQUESTS and runs each in a forked child with limits,
kills what the child leaves behind and reports on REPLIES. Holds no expected outputs
and no secrets: whatever a program does to it, verdicts are found outside. Standard
library only; `sandbox` sends its compiled code through the pipe, with that of `proctree`,
`confine`, `values` and `inner`, all into one namespace.
"""

# ruff: noqa: F821 (names of the other modules in this namespace)

import fcntl
import marshal
import os
import resource
import select
import signal
import struct
import sys
import time

REQUESTS, REPLIES, CALLS_IN, CALLS_OUT = 3, 4, 5, 6
IS_INIT = os.getpid() == 1
POLL_S = 0.02
STDERR_BYTES = 64 * 1024
PAGE_BYTES = resource.getpagesize()
# First byte of a reply. ENDED: ran to its end; EXITED: sys.exit(0); DIED: anything else.
ENDED, EXITED, DIED, TIMEOUT, MEMORY, OUTPUT = range(6)
READY = b"+"
REPLY = struct.Struct("=BiidII")
"""verdict, exit code, signal, seconds, bytes of stdout, bytes of stderr (which follow)."""


def serve_requests(setup, descriptors):
    """Run requests until the pipe closes."""
    place_descriptors(descriptors)
    if not IS_INIT:
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    if setup["drop_to"]:
        os.setgroups([])
        os.setresgid(*[setup["drop_to"]] * 3)
        os.setresuid(*[setup["drop_to"]] * 3)
    sys.path += setup["paths"]
    write_all(REPLIES, READY)
    number = 0
    while True:
        header = read_exactly(REQUESTS, 4)
        if header is None:
            return
        request = marshal.loads(read_exactly(REQUESTS, int.from_bytes(header, "big")))
        number += 1
        scratch = os.path.join(setup["scratch"], str(number))
        os.mkdir(scratch, 0o700)
        for name, content in request["files"].items():
            path = os.path.join(scratch, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as stream:
                stream.write(content)
        run_child(setup, request, scratch)


def place_descriptors(descriptors):
    """Give the pipes their numbers and close all else."""
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 1000) for descriptor in descriptors]
    for target, descriptor in zip((REQUESTS, REPLIES, CALLS_IN, CALLS_OUT), moved):
        os.dup2(descriptor, target, inheritable=False)
    os.closerange(3 + len(moved), 2000)


def read_exactly(descriptor, size):
    data = b""
    while len(data) < size:
        piece = os.read(descriptor, size - len(data))
        if not piece:
            return None
        data += piece
    return data


def write_all(descriptor, data):
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


# ---- the supervisor's side of one run ------------------------------------------------


def run_child(setup, request, scratch):
    # The exit status says how the program ended. The two codes change with each run.
    random = os.urandom(2)
    codes = [100 + random[0] % 70, 171 + random[1] % 70]
    stdin_read, stdin_write = os.pipe()
    stdout_read, stdout_write = os.pipe()
    stderr_read, stderr_write = os.pipe()
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            child_main(setup, request, scratch, (stdin_read, stdout_write, stderr_write), codes)
        finally:
            EXIT(1)
    for descriptor in (stdin_read, stdout_write, stderr_write):
        os.close(descriptor)
    if request["mode"] != "program":
        # The child's alone, so that the other side sees its end.
        os.close(CALLS_IN)
        os.close(CALLS_OUT)
    pipes = Pipes(stdin_write, stdout_read, stderr_read, request)
    status, verdict = watch(pid, pipes, start + request["timeout_s"], request)
    seconds = time.monotonic() - start
    kill_the_rest()
    status = status or 0
    reap()
    pipes.drain()
    pipes.close()
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if verdict is None:
        verdict = (
            OUTPUT if pipes.flooded else ENDED if code == codes[0] else EXITED if code == codes[1] else DIED
        )
        if verdict == DIED and pipes.errors.rstrip().rpartition(b"\n")[2].startswith(b"MemoryError"):
            verdict = MEMORY
    if code in codes:
        code = 0
    head = REPLY.pack(verdict, code, number, seconds, len(pipes.output), len(pipes.errors))
    write_all(REPLIES, head + pipes.output + pipes.errors)


class Pipes:
    """The supervisor's ends of a child's stdin, stdout and stderr."""

    def __init__(self, stdin, stdout, stderr, request):
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.input = memoryview(request["stdin"])
        self.max_output = request["max_output_bytes"]
        self.output, self.errors = bytearray(), bytearray()
        self.flooded = False
        for descriptor in (stdin, stdout, stderr):
            os.set_blocking(descriptor, False)
        self.poll = select.poll()
        self.poll.register(stdout, select.POLLIN)
        self.poll.register(stderr, select.POLLIN)
        self.open = {stdin, stdout, stderr}
        if self.input:
            self.poll.register(stdin, select.POLLOUT)
        else:
            self.close_one(stdin, registered=False)
        # Closed by the other side when nobody waits for the result any more.
        self.poll.register(REQUESTS, 0)

    def close_one(self, descriptor, registered=True):
        if registered:
            self.poll.unregister(descriptor)
        self.open.discard(descriptor)
        os.close(descriptor)

    def step(self, timeout_s):
        for descriptor, _ in self.poll.poll(timeout_s * 1000):
            if descriptor == REQUESTS:
                kill_the_rest()
                os._exit(1)
            if descriptor == self.stdin:
                try:
                    self.input = self.input[os.write(descriptor, self.input) :]
                except BlockingIOError:
                    continue
                except OSError:
                    self.input = self.input[:0]
                if not self.input:
                    self.close_one(descriptor)
            else:
                self.read(descriptor)

    def read(self, descriptor):
        """One read; False at the end of the pipe or when it is empty."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self.close_one(descriptor)
            return False
        if descriptor == self.stdout:
            self.output += data[: self.max_output - len(self.output)]
            self.flooded = self.flooded or len(self.output) >= self.max_output
        else:
            # The end of stderr says why a program died.
            self.errors += data
            if len(self.errors) > 2 * STDERR_BYTES:
                del self.errors[:-STDERR_BYTES]
        return True

    def drain(self):
        for descriptor in (self.stdout, self.stderr):
            while descriptor in self.open and not self.flooded and self.read(descriptor):
                pass
        del self.errors[:-STDERR_BYTES]

    def close(self):
        for descriptor in self.open:
            os.close(descriptor)


def watch(pid, pipes, deadline, request):
    """Wait for the child; (its status or None, a verdict if a limit was broken)."""
    looked_at = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= deadline:
            return None, TIMEOUT
        # Both ends closed: the child is about to end.
        wait_s = 0.001 if pipes.stdout not in pipes.open and pipes.stderr not in pipes.open else POLL_S
        pipes.step(min(wait_s, deadline - now))
        if pipes.flooded:
            return None, OUTPUT
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status, None
        if IS_INIT and now - looked_at > 2 * POLL_S:
            looked_at = now
            reap_orphans(pid)
            if memory_in_use() > request["memory_bytes"]:
                return None, MEMORY


def own_pages(pid):
    """Pages in memory that are not a file's. What a child still shares with its parent counts for both."""
    with open(f"/proc/{pid}/statm", "rb") as stream:
        fields = stream.read().split()
    return int(fields[1]) - int(fields[2])


def memory_in_use():
    """Bytes that the processes of the sandbox hold beyond what each inherits from this one."""
    if not os.path.isdir("/proc/1"):
        return 0
    inherited, pages = own_pages(1), 0
    for entry in os.listdir("/proc"):
        if entry.isdigit() and entry != "1":
            try:
                pages += max(0, own_pages(entry) - inherited)
            except (OSError, IndexError):
                pass
    return pages * PAGE_BYTES


def reap_orphans(child):
    """Collect ended orphans (process 1 inherits them), but not `child`, whose status is wanted."""
    while True:
        try:
            peek = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if peek is None or peek.si_pid == child:
            return
        os.waitpid(peek.si_pid, 0)


def kill_the_rest():
    if IS_INIT:
        try:
            os.kill(-1, signal.SIGKILL)  # everything in this pid namespace but this process
        except ProcessLookupError:
            pass
    else:
        kill_descendants(os.getpid())


def reap():
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass
