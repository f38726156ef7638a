"""Evaluations of the held-out prompts at one version, spread over the rollout ranks.

`Evaluation` is one of them; `Evaluator` knows when one is due and asks for it. While one
runs nothing is published, so that all answers come from the same weights; leases go on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.config.schema import Config
from areal_hpc.durable import write_durably
from areal_hpc.messages import EvalRequest, EvalResult
from areal_hpc.mpi.world import World
from areal_hpc.rewards.right import describe_evaluation
from areal_hpc.types import EvalSample, Prompt, SamplingSpec


class Evaluator:
    """Evaluates before the first step, every eval.every versions and after the last step."""

    def __init__(self, config: Config, world: World, prompts: list[Prompt], evaluated: Iterable[int]) -> None:
        """`evaluated`: steps that an earlier attempt has evaluated."""
        self._config, self._world, self._prompts = config, world, prompts
        self._evaluated = set(evaluated)
        self._next_id = 0
        self._began = 0.0
        self.running: Evaluation | None = None

    def due(self, train_step: int, *, last: bool) -> bool:
        """Whether the weights after `train_step` are to be evaluated and have not been."""
        if not self._prompts or train_step in self._evaluated or self.running is not None:
            return False
        every = self._config.eval.every
        return train_step == 0 or last or bool(every and train_step % every == 0)

    def begin(self, train_step: int, version: int) -> None:
        """Ask all rollout ranks; `version` must be served."""
        self._began = time.monotonic()
        self.running = Evaluation(
            self._config, self._prompts, train_step=train_step, version=version, first_id=self._next_id
        )
        self._next_id += len(self.running.requests)
        ranks = self._world.rollout_ranks
        for number, request in enumerate(self.running.requests):
            self._world.channel.send(ranks[number % len(ranks)], request)

    def receive(self, result: EvalResult, folder: Path) -> dict[str, Any] | None:
        """Take an answer; the figures, with all answers written to `folder`, once it was the last."""
        evaluation = self.running
        if evaluation is None or not evaluation.receive(result) or not evaluation.finished:
            return None
        self.running = None
        self._evaluated.add(evaluation.train_step)
        evaluation.write(folder)
        return {
            "train_step": evaluation.train_step,
            "version": evaluation.version,
            "seconds": time.monotonic() - self._began,
            **evaluation.summary(),
        }


class Evaluation:
    """Requests to send and answers to come; summed up when all are in."""

    def __init__(
        self, config: Config, prompts: list[Prompt], *, train_step: int, version: int, first_id: int
    ) -> None:
        self.train_step, self.version = train_step, version
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}
        self._rewards = config.rewards
        sampling = SamplingSpec(
            max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
            temperature=config.eval.temperature,
            top_p=config.eval.top_p,
            top_k=config.eval.top_k,
            stop=tuple(config.rollout.stop),
            stop_token_ids=tuple(config.rollout.stop_token_ids),
        )
        size = config.eval.batch_prompts
        self.requests = [
            EvalRequest(first_id + number, version, config.eval.num_samples, tuple(prompts[start : start + size]), sampling)
            for number, start in enumerate(range(0, len(prompts), size))
        ]
        self._waiting = {request.eval_id for request in self.requests}
        self.samples: list[EvalSample] = []

    @property
    def finished(self) -> bool:
        return not self._waiting

    def receive(self, result: EvalResult) -> bool:
        """Take an answer; False for one that was not asked for or came twice.

        Raises ValueError if a sample was made by another version: then the number would
        be a mixture of two policies.
        """
        if result.eval_id not in self._waiting:
            return False
        strays = {sample.version for sample in result.samples} - {self.version}
        if strays:
            raise ValueError(
                f"evaluation at version {self.version} got samples of version {sorted(strays)} "
                f"from rollout {result.role_rank}"
            )
        self._waiting.discard(result.eval_id)
        self.samples += result.samples
        return True

    def summary(self) -> dict[str, float]:
        """The figures of `describe_evaluation`, and means over all samples; lengths in tokens."""
        total = len(self.samples)
        figures = describe_evaluation(self._rewards, self.samples)
        return {
            **figures,
            "reward_mean": sum(sample.reward for sample in self.samples) / total if total else 0.0,
            "length_mean": sum(sample.num_tokens for sample in self.samples) / total if total else 0.0,
            "truncated_fraction": (
                sum(sample.finish_reason == "length" for sample in self.samples) / total if total else 0.0
            ),
            "num_unscored": len(self._prompts) - figures["num_prompts"],
        }

    def write(self, folder: Path) -> Path:
        """One scored answer a line, with its prompt. Raises DiskFullError."""
        path = folder / f"step-{self.train_step:08d}.jsonl"
        lines = []
        for sample in sorted(self.samples, key=lambda sample: (sample.prompt_id, sample.sample_index)):
            prompt = self._prompts[sample.prompt_id]
            lines.append(json.dumps({"prompt": prompt.text, "gold": prompt.gold, **msgspec.to_builtins(sample)}) + "\n")
        write_durably(path, "".join(lines).encode())
        return path
