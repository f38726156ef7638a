"""One reward process: `python -m areal_hpc.rewards.worker`, started by `service`.

Reads Setup and Batch frames from stdin and answers on the pipe that was stdout; what
rewards print goes to stderr. Takes no notice of the signals a scheduler sends to every
process of a step, ends when its pipe closes, and is killed with its parent. Collects
the orphans of its checks, so that killing this process's tree leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from areal_hpc.rewards import protocol
from areal_hpc.rewards.registry import (
    RewardError,
    UnscorableGold,
    call_reward,
    check_options,
    load_reward,
    traits_of,
)

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_MESSAGE_CHARS = 2000


def main() -> int:
    parent = os.getppid()
    # A handler and not SIG_IGN: programs that this process starts get the default back.
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        signal.signal(getattr(signal, name), lambda *_: None)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        return 0
    requests = os.fdopen(os.dup(0), "rb", buffering=1 << 16)
    replies = os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    frame = _read_frame(requests)
    if frame is None:
        return 0
    setup = msgspec.msgpack.decode(frame, type=protocol.Setup)
    try:
        functions = [_load(call, setup.limits) for call in setup.rewards]
        warnings = _check_sandbox(functions, setup.limits)
    except RewardError as error:
        _write(replies, protocol.Started(error=str(error)))
        return 1
    _limit_memory(setup.limits.memory_bytes)
    traits = [traits_of(function) for function in functions]
    _write(
        replies,
        protocol.Started(
            tuple((t.per_sample, t.sees_truncated, t.uses_sandbox) for t in traits), tuple(warnings)
        ),
    )
    while (frame := _read_frame(requests)) is not None:
        batch = msgspec.msgpack.decode(frame, type=protocol.Batch)
        for check in batch.checks:
            call, function = setup.rewards[check.reward], functions[check.reward]
            _write(replies, _verdict(call.name, function, check))
            _reap()
    return 0


def _limit_memory(memory_bytes: int) -> None:
    """Let this process grow by `memory_bytes` beyond what its imports took."""
    with open("/proc/self/statm", "rb") as stream:
        limit = int(stream.read().split()[0]) * resource.getpagesize() + memory_bytes
    # The soft limit only: programs under test get limits of their own.
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )


def _load(call: protocol.RewardCall, limits: protocol.Limits) -> Callable:
    """The reward's function with its options bound."""
    function = load_reward(call.target)
    options = dict(call.options)
    if traits_of(function).uses_sandbox:
        options["limits"] = limits
    check_options(call.name, function, options)
    bound = functools.partial(function, **options)
    functools.update_wrapper(bound, function)
    return bound


def _check_sandbox(functions: list[Callable], limits: protocol.Limits) -> list[str]:
    """What the sandbox lacks here, if a reward needs it; RewardError if that is not allowed."""
    if not any(traits_of(function).uses_sandbox for function in functions):
        return []
    from areal_hpc.rewards.sandbox import SandboxError, missing_protections

    try:
        missing = missing_protections()
    except SandboxError as error:
        raise RewardError(str(error)) from error
    if missing and limits.require_sandbox:
        raise RewardError(
            f"the sandbox lacks protections on this machine: {'; '.join(missing)}; "
            "set rewards.sandbox=best_effort to run without them"
        )
    return [f"sandbox without full protection: {line}" for line in missing]


def _verdict(name: str, function: Callable, check: protocol.Check) -> protocol.Verdict:
    start = time.perf_counter()
    values: tuple[float, ...] = ()
    problem = message = ""
    try:
        values = call_reward(name, function, check.prompt, check.responses)
    except UnscorableGold as error:
        problem, message = "unscorable", str(error)
    except MemoryError:
        problem, message = "memory", f"reward {name} went over rewards.memory_bytes"
    except RewardError as error:
        problem, message = "error", str(error)
    seconds = time.perf_counter() - start
    return protocol.Verdict(check.check_id, values, seconds, problem, message[:MAX_MESSAGE_CHARS])


def _reap() -> None:
    """Collect orphans that checks left behind and that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _read_frame(stream: BinaryIO) -> bytes | None:
    header = stream.read(protocol.HEADER_BYTES)
    if len(header) < protocol.HEADER_BYTES:
        return None
    size = int.from_bytes(header, "big")
    body = stream.read(size)
    return body if len(body) == size else None


def _write(descriptor: int, message: msgspec.Struct) -> None:
    data = memoryview(protocol.pack(message))
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        sys.exit(0)
