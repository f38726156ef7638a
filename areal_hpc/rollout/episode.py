"""What a workflow works with: one group's view of the engine, and the sequence it builds.

`EpisodeEngine` is made by the loop for each lease (or evaluation prompt). It turns text
into ids, generates with the group's own seeds and sampling, scores, and runs programs.
`Transcript` is the one place where token arrays of a trajectory are put together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np

from areal_hpc.config.schema import Config, Sandbox
from areal_hpc.rewards.remote import RemoteRewards
from areal_hpc.rewards.right import is_right
from areal_hpc.rewards.service import RewardService
from areal_hpc.rollout.engine import RolloutEngine, replace_budget
from areal_hpc.rollout.environment import derive_seed
from areal_hpc.rollout.generation import Generation
from areal_hpc.rollout.tokens import PromptEncoder
from areal_hpc.rollout.unfinished import Turn, Turns
from areal_hpc.types import PROMPT_VERSION, Prompt, RewardResult, SamplingSpec, Trajectory

Result = TypeVar("Result")


class Transcript:
    """A growing sequence: tokens that the policy chose, and tokens that it was given."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.token_ids: list[int] = []
        self._loss_mask: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self.finish_reason = ""
        self.num_generated = 0
        self.observe(prompt_ids)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Tokens that no policy produced: prompt, feedback, tool output."""
        count = len(token_ids)
        self.token_ids += [int(token) for token in token_ids]
        self._loss_mask += [0] * count
        self._logprobs += [0.0] * count
        self._versions += [PROMPT_VERSION] * count

    def answer(self, generation: Generation) -> None:
        """Tokens that the engine sampled after everything so far."""
        count = len(generation.token_ids)
        self.token_ids += generation.token_ids.tolist()
        self._loss_mask += [1] * count
        self._logprobs += generation.logprobs.tolist()
        self._versions += generation.versions.tolist()
        self.finish_reason = generation.finish_reason
        self.num_generated += count

    def trajectory(
        self, prompt_id: int, group_id: int, sample_index: int, result: RewardResult, reward: float
    ) -> Trajectory:
        return Trajectory(
            tokens=np.asarray(self.token_ids, dtype=np.int32),
            loss_mask=np.asarray(self._loss_mask, dtype=np.uint8),
            rollout_logprobs=np.asarray(self._logprobs, dtype=np.float32),
            versions=np.asarray(self._versions, dtype=np.int32),
            reward=reward,
            prompt_id=prompt_id,
            group_id=group_id,
            sample_index=sample_index,
            finish_reason=self.finish_reason,
            reward_parts=dict(result.parts),
        )


@dataclass
class Services:
    """What all episodes of a rollout rank share."""

    config: Config
    engine: RolloutEngine
    rewards: RewardService | RemoteRewards
    encoder: PromptEncoder
    program_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """Programs of tool calls at once: they share the cores with the engine."""


class EpisodeEngine:
    """One prompt's group. `seed_parts` make its seeds: distinct for every group and attempt."""

    def __init__(
        self,
        services: Services,
        *,
        group_id: int,
        group_size: int,
        sampling: SamplingSpec,
        seed_parts: tuple[object, ...],
        request_prefix: str,
    ) -> None:
        self._services = services
        self._group_id = group_id
        self._seed_parts = seed_parts
        self._request_prefix = request_prefix
        self.group_size = group_size
        self.sampling = sampling
        self.turns: Turns = {}
        """What the engine has answered so far."""
        self.begun: Turns = {}
        """What an earlier run left of these answers."""

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        return self._services.encoder.prompt(prompt.text)

    def encode_text(self, text: str) -> list[int]:
        """Ids of an observation inside an answer (tool output)."""
        return self._services.encoder.text(text)

    def encode_feedback(self, text: str, transcript: Transcript) -> list[int]:
        """Ids of an observation after a finished answer (the next turn)."""
        return self._services.encoder.feedback(text, transcript.token_ids[-1])

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        return self._services.encoder.decode(token_ids)

    async def generate(
        self,
        transcript: Transcript,
        sample_index: int,
        turn: int = 0,
        *,
        stop: tuple[str, ...] = (),
    ) -> Generation:
        """Let the policy go on after `transcript`, which gets the tokens.

        The budget of an episode is sampling.max_new_tokens over all its turns; `stop` adds
        strings after which this turn ends. `sample_index` and `turn` name the call, each pair
        once: what an earlier run has left of it is gone on with. Raises PromptTooLong where
        the context is full.
        """
        context = list(transcript.token_ids)
        sampling = replace_budget(self.sampling, self.budget(transcript))
        if stop:
            sampling = msgspec.structs.replace(sampling, stop=sampling.stop + stop)
        begun = self.begun.get((sample_index, turn))
        left = begun.generation if begun is not None and begun.context == context else None
        if left is not None and left.finish_reason != "abort":
            generation = left
        else:
            generation = await self._services.engine.generate(
                context,
                sampling,
                f"{self._request_prefix}-{sample_index}-{turn}",
                self.seed(sample_index, turn),
                left,
            )
        self.turns[sample_index, turn] = Turn(context, generation)
        if generation.finish_reason == "abort":
            # The run stops. The loop takes `turns` and cancels this task.
            await asyncio.Event().wait()
        transcript.answer(generation)
        return generation

    def budget(self, transcript: Transcript) -> int:
        """New tokens that the policy may still produce in this episode."""
        room = self._services.config.model.max_context - len(transcript.token_ids)
        return min(self.sampling.max_new_tokens - transcript.num_generated, room)

    def seed(self, sample_index: int, turn: int) -> int:
        return derive_seed(*self._seed_parts, sample_index, turn)

    async def score(
        self, prompt: Prompt, responses: Sequence[str], truncated: Sequence[bool]
    ) -> list[RewardResult]:
        """Raises RuntimeError in a deterministic run where a limit of time decided on a score."""
        results = await self._services.rewards.score(prompt, responses, truncated)
        if self._services.config.run.deterministic:
            late = next((result.note for result in results if "timeout" in result.note), "")
            if late:
                raise RuntimeError(
                    f"run.deterministic=true: the score of an answer to prompt {prompt.prompt_id} was decided by time "
                    f"({late}): raise rewards.timeout_s={self._services.config.rewards.timeout_s:g}"
                )
        return results

    def is_right(self, result: RewardResult) -> bool:
        return is_right(self._services.config.rewards, result.reward, result.parts)

    async def run_python(self, code: str, *, timeout_s: float) -> str:
        """Output of an untrusted program, its errors included, as a tool would show it."""
        from areal_hpc.rewards.sandbox import run_python

        rewards = self._services.config.rewards
        async with self._services.program_slots:
            result = await asyncio.to_thread(
                run_python,
                code,
                timeout_s=timeout_s,
                memory_bytes=rewards.memory_bytes,
                paths=tuple(rewards.sandbox_paths),
                require=rewards.sandbox is Sandbox.require,
            )
        if result.verdict in ("ok", "exit"):
            return result.stdout
        last_line = (result.stderr.strip().splitlines() or [result.verdict])[-1]
        return f"{result.stdout}{last_line}\n"

    def finish(
        self,
        transcript: Transcript,
        prompt: Prompt,
        sample_index: int,
        result: RewardResult,
        reward: float | None = None,
    ) -> Trajectory:
        """The trajectory; `reward` replaces the score's own sum (a discount over turns)."""
        return transcript.trajectory(
            prompt.prompt_id,
            self._group_id,
            sample_index,
            result,
            result.reward if reward is None else reward,
        )


async def gather_all(calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results, in order; the first error ends the other calls and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]

