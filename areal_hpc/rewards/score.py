"""`areal-hpc score REWARD FILE.jsonl`: scores answers offline with the service that runs use.

Reads one JSON object a line (`response` or `responses`; `gold` or `tests`; optionally
`prompt`, `meta`, `truncated`), prints or writes one verdict a line in the order of the
file. Called by `cli`. Holds a bounded window of lines, whatever the size of the file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from areal_hpc.config.load import ConfigError
from areal_hpc.config.schema import RewardsConfig, Sandbox
from areal_hpc.rewards.registry import RewardError, UnscorableGold
from areal_hpc.rewards.service import RewardResult, RewardService
from areal_hpc.types import Prompt

LINES_AHEAD = 64
"""Lines in flight per worker."""
EXAMPLES = """each line of FILE is one JSON object:
  {"response": "... \\\\boxed{4}", "gold": "4"}
  {"response": "print(int(input()) + 1)", "tests": {"inputs": ["1"], "outputs": ["2"]}}
  {"prompt": "2+2?", "responses": ["4", "5"], "gold": "4", "truncated": [false, false]}

examples:
  areal-hpc score math answers.jsonl --workers 4 -o verdicts.jsonl
  areal-hpc score code answers.jsonl --timeout 20 --option partial=true
  areal-hpc score math=1.0,length=0.1 answers.jsonl --option length.target=500
  areal-hpc score my_package.my_module:reward answers.jsonl

exit code: 0 all lines were read (lines whose gold answer cannot be parsed are counted),
1 a reward function failed, 2 a mistake in the arguments or in a line of FILE
"""


class LineError(ValueError):
    """A line of the file that cannot be scored."""


def main(argv: list[str]) -> int:
    """Parse the arguments after `score` and run; ConfigError for what the user can mend."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    return score_file(arguments)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-hpc score",
        description="Score the answers of a JSONL file with a reward.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reward", help="name, import path package.module:function, or name=weight,...")
    parser.add_argument("file", help="JSONL file; - reads standard input")
    parser.add_argument("--workers", type=int, default=1, help="worker processes (default 1)")
    parser.add_argument("-o", "--output", help="write verdicts to this file instead of standard output")
    parser.add_argument("--timeout", type=float, help="seconds per check (default: rewards.timeout_s)")
    parser.add_argument("--memory-gib", type=float, help="memory per check, GiB")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE",
                        help="option of the reward; REWARD.KEY=VALUE with several rewards")  # fmt: skip
    parser.add_argument("--best-effort", action="store_true",
                        help="run programs even if the sandbox lacks protections here")  # fmt: skip


def score_file(arguments: argparse.Namespace) -> int:
    """Score `arguments.file`; returns the exit code."""
    config = rewards_config(arguments)
    try:
        service = RewardService(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    with _source(arguments.file) as lines, _sink(arguments.output) as output:
        counts = asyncio.run(_score_lines(service, config.workers, lines, output, arguments.file))
    summary = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    print(f"areal-hpc score: {summary or 'no lines'}", file=sys.stderr)
    return 2 if counts["bad lines"] else 1 if counts["failed"] else 0


def rewards_config(arguments: argparse.Namespace) -> RewardsConfig:
    """The `rewards` section that the arguments describe."""
    config = RewardsConfig(workers=arguments.workers)
    if arguments.workers < 1:
        raise ConfigError(f"--workers={arguments.workers} must be at least 1")
    if "=" in arguments.reward:
        for part in arguments.reward.split(","):
            name, _, weight = part.partition("=")
            try:
                config.weights[name.strip()] = float(weight)
            except ValueError:
                raise ConfigError(f"weight {weight!r} of reward {name!r} is no number") from None
    else:
        config.fn = arguments.reward
    if arguments.timeout is not None:
        if not arguments.timeout > 0:
            raise ConfigError(f"--timeout={arguments.timeout} must be positive")
        config.timeout_s = arguments.timeout
    if arguments.memory_gib is not None:
        if not arguments.memory_gib > 0:
            raise ConfigError(f"--memory-gib={arguments.memory_gib} must be positive")
        config.memory_bytes = int(arguments.memory_gib * 1024**3)
    if arguments.best_effort:
        config.sandbox = Sandbox.best_effort
    for option in arguments.option:
        key, equals, text = option.partition("=")
        if not equals:
            raise ConfigError(f"--option {option!r} is not of the form key=value")
        *owner, name = key.split(".") if config.weights else [key]
        if config.weights and len(owner) != 1:
            raise ConfigError(f"--option {option!r}: with several rewards, write REWARD.{key}=...")
        target = config.options.setdefault(owner[0], {}) if owner else config.options
        target[name] = _value(text)
    return config


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@contextlib.contextmanager
def _source(path: str) -> Iterator[IO[bytes]]:
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = open(path, "rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    with stream:
        yield stream


@contextlib.contextmanager
def _sink(path: str | None) -> Iterator[IO[str]]:
    """Standard output, or a file that gets its name when it is whole."""
    if path is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    temporary = Path(path).with_name(f".{Path(path).name}.{os.getpid()}.tmp")
    try:
        stream = open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from None
    try:
        with stream:
            yield stream
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


async def _score_lines(
    service: RewardService, num_workers: int, lines: IO[bytes], output: IO[str], name: str
) -> dict[str, int]:
    counts = {"scored": 0, "unscorable": 0, "failed": 0, "bad lines": 0}
    window: deque[tuple[int, asyncio.Task]] = deque()

    async def write_oldest() -> None:
        number, task = window.popleft()
        verdict: dict[str, Any] = {"line": number}
        try:
            verdict.update(_verdict(*await task))
            counts["scored"] += 1
        except (UnscorableGold, RewardError, LineError) as error:
            kind = {UnscorableGold: "unscorable", RewardError: "failed"}.get(type(error), "bad lines")
            counts[kind] += 1
            verdict |= {"reward": None, "error": str(error)}
            print(f"{name}:{number}: {error}", file=sys.stderr)
        output.write(json.dumps(verdict) + "\n")

    try:
        await service.__aenter__()
    except RewardError as error:
        raise ConfigError(str(error)) from None
    try:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            window.append((number, asyncio.create_task(_score_line(service, number, line))))
            if len(window) >= LINES_AHEAD * num_workers:
                await write_oldest()
        while window:
            await write_oldest()
    finally:
        for _, task in window:
            task.cancel()
        await service.__aexit__()
    return counts


async def _score_line(service: RewardService, number: int, line: bytes) -> tuple[bool, list[RewardResult]]:
    """Whether the line held one response, and the result of each."""
    prompt, responses, truncated, single = parse_line(number, line)
    return single, await service.score(prompt, responses, truncated)


def parse_line(number: int, line: bytes) -> tuple[Prompt, list[str], list[bool] | None, bool]:
    """One line of the file; LineError says what is wrong with it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LineError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise LineError(f"a {type(record).__name__}, not an object")
    single = "response" in record
    if single == ("responses" in record):
        raise LineError('needs either "response" or "responses"')
    responses = [record["response"]] if single else record["responses"]
    if not isinstance(responses, list) or not all(isinstance(text, str) for text in responses):
        raise LineError('"response" must be a text, "responses" a list of texts')
    truncated = record.get("truncated")
    if truncated is not None:
        truncated = [truncated] if single else truncated
        if not isinstance(truncated, list) or [type(flag) for flag in truncated] != [bool] * len(responses):
            raise LineError('"truncated" must hold true or false for each response')
    prompt = Prompt(
        prompt_id=number,
        text=_text(record.get("prompt", "")),
        gold=_text(record.get("gold", "")),
        tests=_text(record.get("tests", "")),
        meta=_text(record.get("meta", "")),
    )
    return prompt, responses, truncated, single


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _verdict(single: bool, results: list[RewardResult]) -> dict[str, Any]:
    if single:
        return _fields(results[0])
    return {"results": [_fields(result) for result in results]}


def _fields(result: RewardResult) -> dict[str, Any]:
    fields: dict[str, Any] = {"reward": result.reward, "parts": result.parts}
    return fields | ({"note": result.note} if result.note else {})
