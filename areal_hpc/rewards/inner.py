"""The child's side of a sandbox: limits, the program, and calls between it and its tests.

Runs in the process that `runner` forks for each program. Standard library only; shares
one namespace with `runner`, `proctree`, `confine` and `values` (see `sandbox`).
"""

# ruff: noqa: F821 (names of the other modules in this namespace)

import marshal
import os
import resource
import signal
import sys

EXIT = os._exit  # before a program can put something else in its place
PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""
"""What authors of function-only answers expect to be there."""


def child_main(setup, request, scratch, pipes, codes):
    os.setsid()
    for target, descriptor in enumerate(pipes):
        os.dup2(descriptor, target)
    keep = (CALLS_IN, CALLS_OUT) if request["mode"] != "program" else ()
    for descriptor in (REQUESTS, REPLIES, CALLS_IN, CALLS_OUT):
        if descriptor not in keep:
            try:
                os.close(descriptor)
            except OSError:
                pass
    os.closerange(CALLS_OUT + 1, 64)
    os.chdir(scratch)
    if setup["confine"]:
        confine(setup["readable"], [scratch], setup["devices"])
    for name, value in request["limits"].items():
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    code = run_program(request)
    EXIT(codes[0] if code == -1 else codes[1] if code == 0 else code if code not in codes else 1)


def run_program(request):
    """Run to the end: -1; sys.exit: its code; an exception: 1 with its traceback on stderr."""
    import builtins
    import types

    builtins.exit = builtins.quit = sys.exit  # `site`, which gives these, is not loaded
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    sys.path.insert(0, os.getcwd())
    source = request["code"]
    mode = request["mode"]
    del request
    code = -1
    try:
        if mode == "tests":
            run_tests(marshal.loads(source), module.__dict__)
        else:
            if mode == "calls":
                exec(PRELUDE, module.__dict__)
            exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)
            if mode == "calls":
                answer_calls(module.__dict__)
    except SystemExit as exit_error:
        code = exit_code(exit_error)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    return finish(code)


def exit_code(error):
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def finish(code):
    """What the interpreter does at the end: threads, exit functions, buffers."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        import atexit

        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr, sys.__stdout__):
            if stream is not None:
                stream.flush()
    except SystemExit as exit_error:
        return exit_code(exit_error) or code
    except BaseException:
        return 1
    return code


# ---- calls: a program under test answers, its tests ask -------------------------------------


def send(message):
    body = dump(message)
    write_all(CALLS_OUT, len(body).to_bytes(4, "big") + body)


def receive():
    header = read_exactly(CALLS_IN, 4)
    if header is None:
        EXIT(1)
    return load(read_exactly(CALLS_IN, int.from_bytes(header, "big")))


def answer_calls(namespace):
    """Announce the program's functions, then call them as asked."""
    send({"names": [name for name, value in namespace.items() if callable(value) and name[:2] != "__"]})
    while True:
        call = receive()
        try:
            function = namespace[call["name"]]
            if call["method"]:
                function = getattr(function(), call["method"])
            arguments = decode_value(call["args"])
            keywords = decode_value(call["kwargs"])
            answer = {"value": encode_value(function(*arguments, **keywords))}
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)[:500]}
        send(answer)


def run_tests(tests, namespace):
    """Execute each test against stand-ins of the program's functions; report which passed."""

    def stand_in(name):
        def call(*args, **kwargs):
            send({"call": {"name": name, "method": "", "args": encode_value(list(args)),
                           "kwargs": encode_value(kwargs)}})  # fmt: skip
            answer = receive()
            if "value" in answer:
                return decode_value(answer["value"])
            import builtins

            kind = getattr(builtins, answer["error"], None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            raise kind(answer["message"])

        call.__name__ = name
        return call

    exec(compile(tests["context"], "context.py", "exec", dont_inherit=True), namespace)
    for name in tests["names"]:
        namespace[name] = stand_in(name)
    exec(compile(tests["setup"], "setup.py", "exec", dont_inherit=True), namespace)
    passed = []
    for source in tests["sources"]:
        try:
            exec(compile(source, "test.py", "exec", dont_inherit=True), namespace)
            passed.append(True)
        except Exception as error:
            passed.append(False)
            sys.excepthook(type(error), error, error.__traceback__)
            if not tests["all"]:
                break
    send({"passed": passed})
