"""The reward service: scores groups of answers on a pool of worker processes.

Owns the workers (`pool`), the queue of checks and the sums. Called by the rollout's
workflows (where `groups.reward` has nodes, by `loop` for them) and by `score`, from one event loop: `score` returns when all answers of a
group have their reward, many groups may be in flight, generation goes on meanwhile.
A check over its limits is killed with all its processes, pays 0 and is counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from areal_hpc.config.schema import RewardsConfig, Sandbox
from areal_hpc.rewards.pool import Pool, Task
from areal_hpc.rewards.protocol import Check, Limits, RewardCall, Setup, Verdict
from areal_hpc.rewards.registry import (
    RewardError,
    RewardSpec,
    Traits,
    UnscorableGold,
    reward_specs,
    target_of,
)
from areal_hpc.telemetry import Telemetry
from areal_hpc.types import Prompt, RewardResult

logger = logging.getLogger(__name__)

KILL_GRACE_S = 1.0
"""Rewards that run programs end these themselves at rewards.timeout_s; their worker gets so much longer."""


@dataclass
class _Group:
    """One call of `score`: filled in by its checks."""

    future: asyncio.Future
    parts: list[dict[str, float]]
    notes: list[list[str]]
    remaining: int = 0


@dataclass
class _GroupTask(Task):
    """One check of a group: which reward, for which of its answers."""

    group: _Group = field(kw_only=True)
    name: str = field(kw_only=True)
    samples: tuple[int, ...] = field(kw_only=True)

    @property
    def wanted(self) -> bool:
        return not self.group.future.done()


class RewardService:
    """Async context manager around a pool of reward processes.

    Raises RewardError (on entry) when a reward cannot be imported or the sandbox lacks
    a protection that `rewards.sandbox` requires.
    """

    def __init__(self, config: RewardsConfig, telemetry: Telemetry | None = None) -> None:
        self._specs: list[RewardSpec] = reward_specs(config)
        self._config = config
        self._telemetry = telemetry
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self.num_scoring = 0
        """Groups of answers that wait for their scores."""
        setup = Setup(
            rewards=tuple(RewardCall(s.name, target_of(s.name), s.options) for s in self._specs),
            limits=Limits(
                config.timeout_s,
                config.memory_bytes,
                config.sandbox is Sandbox.require,
                tuple(config.sandbox_paths),
            ),
        )
        self._pool = Pool(setup, config.workers, self._finish, self._fail)
        self._traits: list[Traits] = []

    async def __aenter__(self) -> RewardService:
        started = await self._pool.start()
        self._traits = [Traits(*flags) for flags in started.traits]
        for line in started.warnings:
            logger.warning("%s", line)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    @property
    def queue_depth(self) -> int:
        """Checks that wait for a worker."""
        return len(self._pool.queue)

    def stats(self) -> dict[str, float]:
        """Counters since the start: checks, seconds (of workers), timeouts, kills, crashes, ..."""
        return {
            "checks": self._counts["checks"],
            "seconds": self._seconds,
            "timeouts": self._counts["timeout"],
            "crashes": self._counts["crash"],
            "memory": self._counts["memory"],
            "unscorable": self._counts["unscorable"],
            "errors": self._counts["error"],
            "kills": self._pool.num_kills,
            "restarts": self._pool.num_restarts,
            "queue_depth": self.queue_depth,
        }

    async def score(
        self, prompt: Prompt, responses: Sequence[str], truncated: Sequence[bool] | None = None
    ) -> list[RewardResult]:
        """The rewards of one prompt's answers, in their order.

        `truncated[k]` says that answer k was cut off at the token limit: like an empty
        one it gets 0 from each reward that is not marked `sees_truncated`. Raises
        UnscorableGold if the gold answer cannot be parsed and RewardError if a reward
        function breaks its contract.
        """
        if truncated is not None and len(truncated) != len(responses):
            raise ValueError(f"{len(truncated)} truncation flags for {len(responses)} responses")
        began, clock = time.time(), time.perf_counter()
        texts = [encodable(response) for response in responses]
        complete = [
            index
            for index, text in enumerate(texts)
            if text.strip() and not (truncated is not None and truncated[index])
        ]
        group = _Group(
            asyncio.get_running_loop().create_future(),
            [dict.fromkeys((spec.name for spec in self._specs), 0.0) for _ in texts],
            [[] for _ in texts],
        )
        tasks = self._tasks(group, prompt, texts, complete)
        group.remaining = len(tasks)
        if tasks:
            self._pool.submit(tasks)
            self.num_scoring += 1
            try:
                await group.future
            finally:
                self.num_scoring -= 1
        results = [self._result(parts, notes) for parts, notes in zip(group.parts, group.notes)]
        self._record(prompt, results, began, time.perf_counter() - clock)
        return results

    def _tasks(
        self, group: _Group, prompt: Prompt, texts: list[str], complete: list[int]
    ) -> list[_GroupTask]:
        tasks = []
        for reward, (spec, traits) in enumerate(zip(self._specs, self._traits)):
            samples = list(range(len(texts))) if traits.sees_truncated else complete
            if not samples:
                continue
            shares = [(index,) for index in samples] if traits.per_sample else [tuple(samples)]
            deadline_s = self._config.timeout_s + (KILL_GRACE_S if traits.uses_sandbox else 0.0)
            for share in shares:
                check = Check(self._pool.next_id(), reward, prompt, tuple(texts[i] for i in share))
                tasks.append(_GroupTask(check, deadline_s, group=group, name=spec.name, samples=share))
        return tasks

    def _result(self, parts: dict[str, float], notes: list[str]) -> RewardResult:
        return RewardResult(
            sum(spec.weight * parts[spec.name] for spec in self._specs), parts, "; ".join(notes)
        )

    def _record(self, prompt: Prompt, results: list[RewardResult], began: float, seconds: float) -> None:
        """One span a group: its answers, the sum of each part over them, checks that still wait."""
        if self._telemetry is None or not results:
            return
        sums = {spec.name: sum(result.parts[spec.name] for result in results) for spec in self._specs}
        self._telemetry.record_span(
            "reward.score", began, seconds, prompt=prompt.prompt_id, num=len(results), sums=sums,
            queue=self.queue_depth,
        )  # fmt: skip

    # ---- called by the pool, in the event loop -----------------------------------

    def _finish(self, task: Task, verdict: Verdict) -> None:
        assert isinstance(task, _GroupTask)
        group, prompt_id = task.group, task.check.prompt.prompt_id
        self._counts["checks"] += 1
        self._seconds += verdict.seconds
        if verdict.problem:
            self._counts[verdict.problem] += 1
        if not task.wanted:
            return
        if verdict.problem == "unscorable":
            group.future.set_exception(
                UnscorableGold(f"reward {task.name} cannot score prompt {prompt_id}: {verdict.message}")
            )
            return
        if verdict.problem == "error":
            group.future.set_exception(RewardError(verdict.message))
            return
        values = verdict.values
        if verdict.problem:
            values = (0.0,) * len(task.samples)
            logger.warning("reward %s pays 0 on prompt %s: %s", task.name, prompt_id, verdict.message)
        for index, value in zip(task.samples, values, strict=True):
            group.parts[index][task.name] = value
            if verdict.problem:
                group.notes[index].append(f"{task.name}: {verdict.problem}")
        group.remaining -= 1
        if group.remaining == 0:
            group.future.set_result(None)

    def _fail(self, task: Task, error: RewardError) -> None:
        """The pool cannot go on."""
        assert isinstance(task, _GroupTask)
        if task.wanted:
            task.group.future.set_exception(error)


def encodable(text: str) -> str:
    """`text` without lone surrogates, which no frame can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text
