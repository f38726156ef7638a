"""Tries to break the sandbox from inside, so that protections are found out and not assumed.

Called once per process by `sandbox.protections`; plants a secret file and a listening
socket and runs one program that goes for them, this process and its environment.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
from pathlib import Path

from areal_hpc.rewards.isolation import INNER_VARIABLES, Isolation

MEMORY_BYTES = 256 * 1024 * 1024
TIMEOUT_S = 20.0
ATTACK = """
import json, os, sys
target = json.loads(sys.stdin.read())
broken = []
def attempt(name, action):
    try:
        if action():
            broken.append(name)
    except (OSError, MemoryError):
        pass
def read_or_write():
    try:
        return open(target["file"]).read() == target["secret"]
    except OSError:
        return bool(open(target["file"] + ".new", "w"))
def processes():
    try:
        return os.kill(target["pid"], 0) is None
    except OSError:
        return os.path.exists(f"/proc/{target['pid']}/status") and target["pid"] != os.getpid()
def network():
    import socket
    return socket.create_connection(("127.0.0.1", target["port"]), timeout=1) is not None
def calls():
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    # Refused by the filter with EPERM; without it a wrong argument is found first.
    libc.unshare(-1)
    return ctypes.get_errno() != 1
def forks():
    children = []
    try:
        while len(children) < target["processes"]:
            pid = os.fork()
            if pid == 0:
                os.close(release)
                os.read(hold, 1)
                os._exit(0)
            children.append(pid)
        return True
    finally:
        os.close(release)
        for pid in children:
            os.waitpid(pid, 0)
def memory():
    return len(bytearray(2 * target["memory"])) > 0
hold, release = os.pipe()
attempt("files", read_or_write)
attempt("processes", processes)
attempt("network", network)
attempt("environment", lambda: any(name in os.environ for name in target["variables"]))
attempt("system calls", calls)
if target["processes"]:
    attempt("process limit", forks)
else:
    broken.append("process limit")
attempt("memory limit", memory)
print(json.dumps(broken))
"""


def try_to_break(isolation: Isolation) -> set[str]:
    """Names of the protections that do not hold under `isolation`."""
    from areal_hpc.rewards.sandbox import MAX_PROCESSES, Cage, SandboxError

    secret = secrets.token_hex(16)
    with (
        tempfile.TemporaryDirectory(prefix="areal-selftest-") as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        Cage(isolation_mode=isolation) as cage,
    ):
        file = Path(folder) / "secret"
        file.write_text(secret)
        target = {
            "file": str(file),
            "secret": secret,
            "pid": os.getpid(),
            "port": server.getsockname()[1],
            "variables": sorted(set(os.environ) - set(INNER_VARIABLES)),
            # Without a limit, forking is not tried: it would only load the machine.
            "processes": 2 * MAX_PROCESSES if isolation.limits_processes else 0,
            "memory": MEMORY_BYTES,
        }
        result = cage.run(ATTACK, json.dumps(target), timeout_s=TIMEOUT_S, memory_bytes=MEMORY_BYTES)
    if result.verdict != "ok":
        raise SandboxError(f"the sandbox's self-test ended with {result.verdict}: {result.stderr[-500:]}")
    return set(json.loads(result.stdout))
