"""Reward for programs: 1 if every unit test passes, else 0.

Parses `Prompt.tests` (JSON) in the forms of HumanEval, MBPP, APPS, DeepCoder and
LiveCodeBench, takes the last Python block of the answer and runs it in `sandbox`.
Expected outputs and test code never enter the program's sandbox: outputs are compared
here, test code runs in a second sandbox and calls the program through pipes. Runs in
reward workers.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import marshal
import math
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from areal_hpc.rewards.extract import python_block
from areal_hpc.rewards.protocol import Limits
from areal_hpc.rewards.registry import UnscorableGold, per_sample, uses_sandbox
from areal_hpc.rewards.sandbox import MAX_OUTPUT_BYTES, Cage, read_exactly, write_all
from areal_hpc.rewards.values import decode_value, dump, encode_value, load
from areal_hpc.types import Prompt

FLOAT_TOLERANCE = 1e-6
MAX_CALL_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class StdioTests:
    """Programs read `inputs[k]` and must print `outputs[k]`."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class CallTests:
    """`function(*arguments[k])` must return `expected[k]`."""

    function: str
    arguments: tuple[list, ...]
    expected: tuple[Any, ...]


@dataclass(frozen=True)
class SourceTests:
    """Test code: `setup`, then each of `sources`, which must not raise.

    entry_point: the only function of the program that the tests see; "" for each one that
    they name. context: code that the answer continues, run before it and before the tests.
    """

    setup: str
    sources: tuple[str, ...]
    entry_point: str = ""
    context: str = ""


Tests = StdioTests | CallTests | SourceTests


@uses_sandbox
@per_sample
def code_reward(prompt: Prompt, response: str, *, limits: Limits, partial: bool = False) -> float:
    """1.0 if the program in `response` passes all tests within `limits.timeout_s`, else 0.0.

    partial: the fraction of passed tests instead. Raises UnscorableGold when the tests
    cannot be parsed.
    """
    tests = parse_tests(prompt.tests, prompt.text)
    program = python_block(response)
    if program is None or not program.strip():
        return 0.0
    passed = run_tests(tests, program, limits, stop_early=not partial)
    return sum(passed) / len(passed) if partial else float(all(passed))


def run_tests(tests: Tests, program: str, limits: Limits, *, stop_early: bool = False) -> list[bool]:
    """Which tests `program` passes; with `stop_early` those after a failure count as failed."""
    deadline = time.monotonic() + limits.timeout_s
    if isinstance(tests, StdioTests):
        return _run_stdio(tests, program, limits, deadline, stop_early)
    if isinstance(tests, CallTests):
        return _run_calls(tests, program, limits, deadline, stop_early)
    return _run_sources(tests, program, limits, deadline, stop_early)


# ---- forms of tests --------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def parse_tests(text: str, prompt_text: str = "") -> Tests:
    """The tests of a prompt; UnscorableGold says what does not fit."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnscorableGold(f"the tests are not JSON: {str(error)[:200]}") from None
    try:
        tests = _tests_of(data, prompt_text)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UnscorableGold(f"the tests have no known form: {type(error).__name__}: {error}") from None
    except SyntaxError as error:
        raise UnscorableGold(f"the test code is not Python: {error}") from None
    return tests


def _tests_of(data: Any, prompt_text: str) -> Tests:
    if isinstance(data, dict) and "test" in data:
        return _humaneval(data, prompt_text)
    if isinstance(data, dict) and "test_list" in data:
        return _source_tests(data.get("test_setup_code") or "", data["test_list"])
    if isinstance(data, list) and data and all(isinstance(item, str) for item in data):
        return _source_tests("", data)
    if isinstance(data, list):
        kinds = {str(item.get("testtype") or item.get("type") or "") for item in data}
        names = {item.get("fn_name") or (item.get("metadata") or {}).get("func_name") for item in data}
        if len(names) > 1:
            raise ValueError(f"several function names: {names}")
        name = names.pop() if names else None
        if name is None and kinds & {"functional", "function_call"}:
            raise ValueError("functional tests without fn_name")
        data = {
            "inputs": [item["input"] for item in data],
            "outputs": [item["output"] for item in data],
            "fn_name": name,
        }
    inputs, outputs = data["inputs"], data["outputs"]
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs for {len(outputs)} outputs")
    if not inputs:
        raise ValueError("there is no test")
    if data.get("fn_name"):
        return CallTests(
            str(data["fn_name"]), tuple(map(_arguments, inputs)), tuple(map(_maybe_json, outputs))
        )
    return StdioTests(tuple(map(_lines, inputs)), tuple(map(_lines, outputs)))


def _humaneval(data: dict, prompt_text: str) -> SourceTests:
    entry_point = data["entry_point"]
    if not entry_point.isidentifier():
        raise ValueError(f"entry_point {entry_point!r} is no name")
    context = ""
    for candidate in (data.get("prompt"), prompt_text, python_block(prompt_text)):
        if candidate and _defines(candidate, entry_point):
            context = candidate
            break
    compile(data["test"], "test", "exec", dont_inherit=True)
    return SourceTests(data["test"], (f"check({entry_point})",), entry_point, context)


def _source_tests(setup: str, sources: list[str]) -> SourceTests:
    if not sources:
        raise ValueError("there is no test")
    for source in (setup, *sources):
        compile(source, "test", "exec", dont_inherit=True)
    return SourceTests(setup, tuple(sources))


def _defines(source: str, name: str) -> bool:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name for node in tree.body
    )


def _lines(value: Any) -> str:
    """An input or output: a text, or a list of its lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if not isinstance(value, str):
        raise TypeError(f"a test's input or output is a {type(value).__name__}, not a text")
    return value


def _arguments(value: Any) -> list:
    """Arguments of one call: a list, or a text with one JSON value a line."""
    if isinstance(value, str):
        return [json.loads(line) for line in value.split("\n") if line.strip()]
    if not isinstance(value, list):
        raise TypeError(f"a test's arguments are a {type(value).__name__}, not a list")
    return value


def _maybe_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


# ---- stdin and stdout ----------------------------------------------------------------------


def _run_stdio(
    tests: StdioTests, program: str, limits: Limits, deadline: float, stop_early: bool
) -> list[bool]:
    passed: list[bool] = []
    with Cage(paths=limits.sandbox_paths) as cage:
        for stdin, expected in zip(tests.inputs, tests.outputs):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or cage.closed or (stop_early and not all(passed)):
                break
            result = cage.run(
                program,
                stdin,
                timeout_s=left_s,
                memory_bytes=limits.memory_bytes,
                max_output_bytes=max(MAX_OUTPUT_BYTES, 2 * len(expected.encode()) + 65536),
            )
            # sys.exit(0) at the end is a habit; before any output was due it is none.
            ended = result.verdict == "ok" or (result.verdict == "exit" and bool(expected.strip()))
            passed.append(ended and same_output(expected, result.stdout))
    return passed + [False] * (len(tests.inputs) - len(passed))


def same_output(expected: str, output: str) -> bool:
    """Equal line by line, but for white space at line ends and FLOAT_TOLERANCE of decimals."""
    wanted, given = _stripped_lines(expected), _stripped_lines(output)
    return len(wanted) == len(given) and all(map(_same_line, wanted, given))


def _stripped_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_line(wanted: str, given: str) -> bool:
    if wanted == given:
        return True
    wanted_words, given_words = wanted.split(), given.split()
    if len(wanted_words) != len(given_words) or not all(map(_same_word, wanted_words, given_words)):
        return False
    # White space is part of a picture or a text, not of a row of numbers.
    return _spaces(wanted) == _spaces(given) or all(_NUMBER.fullmatch(word) for word in wanted_words)


def _spaces(line: str) -> list[str]:
    return re.findall(r"\s+", line)


_DECIMAL = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def _same_word(wanted: str, given: str) -> bool:
    if wanted == given:
        return True
    if not _DECIMAL.fullmatch(wanted) or not _NUMBER.fullmatch(given):
        return False
    return math.isclose(float(wanted), float(given), rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)


# ---- calls -----------------------------------------------------------------------------------


class _Callee:
    """The program in its sandbox, ready to be called."""

    def __init__(self, cage: Cage, program: str, limits: Limits, deadline: float) -> None:
        self._cage, self._deadline = cage, deadline
        left_s = max(0.01, deadline - time.monotonic())
        cage.begin(program, mode="calls", timeout_s=left_s, memory_bytes=limits.memory_bytes)
        names = self._message().get("names")
        self.names = {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()

    def call(self, call: dict) -> bytes:
        """The answer to one call, as the program's side encoded it."""
        _send(self._cage, dump(call))
        return _receive(self._cage, self._deadline)

    def _message(self) -> dict:
        message = load(_receive(self._cage, self._deadline))
        return message if isinstance(message, dict) else {}


class _Gone(Exception):
    """A program ended, broke its pipe, sent nonsense or took too long: its tests fail."""


def _send(cage: Cage, body: bytes) -> None:
    try:
        write_all(cage.calls_out, len(body).to_bytes(4, "big") + body)
    except BrokenPipeError:
        raise _Gone from None


def _receive(cage: Cage, deadline: float) -> bytes:
    try:
        header = read_exactly(cage.calls_in, 4, deadline)
        if header is None or (size := int.from_bytes(header, "big")) > MAX_CALL_BYTES:
            raise _Gone
        body = read_exactly(cage.calls_in, size, deadline)
    except TimeoutError:
        raise _Gone from None
    if body is None:
        raise _Gone
    return body


def _failures_as_false(run: Callable[[list[bool]], None], num_tests: int) -> list[bool]:
    """Results that `run` appends; those that it did not come to are False."""
    passed: list[bool] = []
    try:
        run(passed)
    except (_Gone, ValueError, TypeError, KeyError, RecursionError, AttributeError, OverflowError):
        pass  # what a hostile program can make of the messages it sends
    return passed[:num_tests] + [False] * (num_tests - len(passed))


def _run_calls(
    tests: CallTests, program: str, limits: Limits, deadline: float, stop_early: bool
) -> list[bool]:
    def run(passed: list[bool]) -> None:
        callee = _Callee(cage, program, limits, deadline)
        name, method = tests.function, ""
        if name not in callee.names and "Solution" in callee.names:
            name, method = "Solution", tests.function
        for arguments, expected in zip(tests.arguments, tests.expected):
            call = {
                "name": name,
                "method": method,
                "args": encode_value(arguments),
                "kwargs": encode_value({}),
            }
            answer = load(callee.call(call))
            passed.append("value" in answer and _as_expected(expected, decode_value(answer["value"])))
            if stop_early and not passed[-1]:
                return

    with Cage(paths=limits.sandbox_paths, calls=True) as cage:
        return _failures_as_false(run, len(tests.expected))


def _as_expected(expected: Any, value: Any) -> bool:
    """APPS wraps many of its expected values in a list of one."""
    if same_value(expected, value):
        return True
    return isinstance(expected, list) and len(expected) == 1 and same_value(expected[0], value)


def same_value(expected: Any, value: Any) -> bool:
    """Equality of plain data, as far as JSON can tell: tuples are lists, floats have a tolerance."""
    if isinstance(expected, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(expected) == len(value) and all(map(same_value, expected, value))
    if isinstance(expected, dict) and isinstance(value, dict):
        keyed = {str(key): item for key, item in value.items()}
        return len(expected) == len(value) == len(keyed) and all(
            str(key) in keyed and same_value(item, keyed[str(key)]) for key, item in expected.items()
        )
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, float) and isinstance(value, (int, float)):
        return math.isclose(expected, value, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    return expected == value


# ---- test code -------------------------------------------------------------------------------


def _run_sources(
    tests: SourceTests, program: str, limits: Limits, deadline: float, stop_early: bool
) -> list[bool]:
    # With `from __future__` in it, the answer has to be the first thing in its file.
    if tests.context and "from __future__" not in program:
        joint = "" if _continues(program) else "\n\n"
        program = tests.context + joint + program

    def run(passed: list[bool]) -> None:
        callee = _Callee(cages.enter_context(Cage(paths=limits.sandbox_paths, calls=True)), program,
                         limits, deadline)  # fmt: skip
        wanted = {tests.entry_point} if tests.entry_point else _names_used(tests)
        if not wanted & callee.names:
            return
        tester = cages.enter_context(Cage(paths=limits.sandbox_paths, calls=True))
        job = {
            "names": sorted(wanted & callee.names),
            "context": tests.context,
            "setup": tests.setup,
            "sources": list(tests.sources),
            "all": not stop_early,
        }
        left_s = max(0.01, deadline - time.monotonic())
        tester.begin(marshal.dumps(job), mode="tests", timeout_s=left_s, memory_bytes=limits.memory_bytes)
        while True:
            message = load(_receive(tester, deadline))
            if "passed" in message:
                passed.extend(map(bool, message["passed"]))
                return
            call = message["call"]
            if call["name"] not in job["names"]:
                return
            _send(tester, callee.call(call))

    with ExitStack() as cages:
        return _failures_as_false(run, len(tests.sources))


def _continues(program: str) -> bool:
    """Whether an answer is the indented rest of a function rather than a program."""
    first = next((line for line in program.split("\n") if line.strip()), "")
    return first[:1].isspace()


def _names_used(tests: SourceTests) -> set[str]:
    """Names in the tests that a program may define: never a builtin, or it would be its own judge."""
    names: set[str] = set()
    for source in tests.sources:
        names |= {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    return {name for name in names if not hasattr(builtins, name)}
