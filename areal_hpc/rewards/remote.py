"""The reward service as rollouts see it where rewards have ranks of their own (`groups.reward`).

Owns the requests under way: each goes to the reward rank with the fewest of this rollout's,
its answer is handed in by the rollout's loop. Scores and errors are those of `service`; an
error and a missing answer name the reward rank.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_hpc.messages import Scored, ScoreRequest
from areal_hpc.rewards.registry import RewardError, UnscorableGold
from areal_hpc.rewards.service import encodable
from areal_hpc.types import Prompt, RewardResult

if TYPE_CHECKING:
    from areal_hpc.mpi.world import World

LAST_LOOK_S = 1.0
"""Between the deadline and the error: this process may have been stopped and the answer lie unread."""


class RemoteRewards:
    """Async context manager, as `RewardService` is; there is nothing to start or end here."""

    def __init__(self, world: World, deadline_s: float) -> None:
        """`deadline_s`: longest time in which a reward rank with requests of this rank answers none."""
        self._world = world
        self._deadline_s = deadline_s
        self._waiting: dict[int, dict[int, asyncio.Future[Scored]]] = {rank: {} for rank in world.reward_ranks}
        self._last_answer = dict.fromkeys(world.reward_ranks, 0.0)
        # Of ranks with equally few requests the one that was asked longest ago; rollouts begin at different ones.
        self._order = deque(world.reward_ranks)
        self._order.rotate(-world.role_rank)
        self._ids = itertools.count()
        self._num_answers = 0

    async def __aenter__(self) -> RemoteRewards:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    @property
    def num_scoring(self) -> int:
        """Groups of answers that wait for their scores."""
        return sum(map(len, self._waiting.values()))

    def stats(self) -> dict[str, float]:
        """Requests answered and waiting; the reward ranks report their checks themselves."""
        return {"answers": float(self._num_answers), "waiting": float(self.num_scoring)}

    async def score(
        self, prompt: Prompt, responses: Sequence[str], truncated: Sequence[bool] | None = None
    ) -> list[RewardResult]:
        """As `RewardService.score`; TimeoutError names a reward rank that answers nothing any more."""
        flags = [False] * len(responses) if truncated is None else truncated
        if len(flags) != len(responses):
            raise ValueError(f"{len(flags)} truncation flags for {len(responses)} responses")
        rank = min(self._order, key=lambda rank: len(self._waiting[rank]))
        self._order.remove(rank)
        self._order.append(rank)
        request_id = next(self._ids)
        texts = tuple(encodable(response) for response in responses)
        answer: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        self._waiting[rank][request_id] = answer
        try:
            self._world.channel.send(rank, ScoreRequest(request_id, prompt, texts, tuple(map(bool, flags))))
            scored = await self._await_answer(answer, rank, prompt)
        finally:
            self._waiting[rank].pop(request_id, None)
        if scored.problem == "unscorable":
            raise UnscorableGold(scored.message)
        if scored.problem:
            raise RewardError(f"{scored.message} ({self._world.describe(rank)})")
        return list(scored.results)

    def receive(self, source: int, message: Scored) -> None:
        """An answer has arrived; one to a request that was given up is dropped."""
        self._last_answer[source] = time.monotonic()
        self._num_answers += 1
        answer = self._waiting[source].pop(message.request_id, None)
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def _await_answer(self, answer: asyncio.Future[Scored], rank: int, prompt: Prompt) -> Scored:
        asked, is_late = time.monotonic(), False
        while not answer.done():
            quiet_s = time.monotonic() - max(asked, self._last_answer[rank])
            if is_late and quiet_s > self._deadline_s:
                raise TimeoutError(
                    f"{self._world.describe(rank)} has answered nothing for {quiet_s:.0f} s (rewards.answer_deadline_s="
                    f"{self._deadline_s:g}); the answers to prompt {prompt.prompt_id} and "
                    f"{len(self._waiting[rank]) - 1} other groups wait there for their scores: see its log, or give "
                    "it fewer checks (groups.reward.nodes, rewards.workers)"
                )
            is_late = quiet_s > self._deadline_s
            await asyncio.wait([answer], timeout=max(self._deadline_s - quiet_s, LAST_LOOK_S))
        return answer.result()
