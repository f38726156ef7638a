"""A workflow for benchmarks: answers whose lengths are drawn from a long-tailed distribution.

rollout.workflow=bench_workflow:LongTailed, with tools/ on PYTHONPATH. For models that never
end an answer by themselves: then the lengths are those drawn here, whatever is trained.
"""

from __future__ import annotations

import asyncio
import copy
import math
import random

import msgspec

from areal_hpc.rollout.episode import EpisodeEngine, Transcript
from areal_hpc.types import Prompt, Trajectory


class LongTailed:
    """One answer per sample of log-normal length, at most rollout.max_new_tokens.

    A length follows from the run's seed, the group and the sample: it is the same in every
    run with that seed, in whatever order answers come.
    """

    def __init__(self, mean: float = 100.0, sigma: float = 1.0) -> None:
        self._mu, self._sigma = math.log(mean) - sigma**2 / 2, sigma

    async def arun_episode(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        prompt_ids = engine.encode_prompt(prompt)
        transcripts = [Transcript(prompt_ids) for _ in range(engine.group_size)]
        answers = await asyncio.gather(
            *(self._limited(engine, index).generate(one, index) for index, one in enumerate(transcripts))
        )
        results = await engine.score(
            prompt, [engine.decode(answer.token_ids) for answer in answers], [False] * len(answers)
        )
        return [
            engine.finish(transcript, prompt, index, result)
            for index, (transcript, result) in enumerate(zip(transcripts, results, strict=True))
        ]

    def _limited(self, engine: EpisodeEngine, sample_index: int) -> EpisodeEngine:
        """The same engine for one sample, with its own budget."""
        drawn = random.Random(engine.seed(sample_index, 0)).lognormvariate(self._mu, self._sigma)
        budget = max(1, min(engine.sampling.max_new_tokens, round(drawn)))
        limited = copy.copy(engine)
        limited.sampling = msgspec.structs.replace(engine.sampling, max_new_tokens=budget)
        return limited
