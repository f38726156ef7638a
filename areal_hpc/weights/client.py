"""The trainer lead's end of weight control: one call to all rollout ranks, all answers back.

Implements vLLM's VLLMWeightSyncClient over WeightCall and WeightReturn messages and adds
the two calls that make a publication all or nothing: `commit` (every engine has loaded,
all may serve) and `abandon` (one did not, all go back). One thread at a time may use it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from areal_hpc.messages import WeightCall, WeightReturn
from areal_hpc.mpi.channel import Channel


class RolloutError(RuntimeError):
    """A rollout rank answered a weight call with an error."""


class RolloutClient:
    """`members_per_engine`: ranks that each engine has in the transfer group (0: no group)."""

    def __init__(
        self,
        channel: Channel,
        rollout_ranks: Sequence[int],
        describe: Callable[[int], str],
        *,
        timeout_s: float,
        members_per_engine: int,
    ) -> None:
        self._channel = channel
        self._ranks = tuple(rollout_ranks)
        self._describe = describe
        self._timeout_s = timeout_s
        self._members = members_per_engine
        self._call_id = 0
        self._method = ""
        self._answers: dict[int, WeightReturn] = {}
        self.version = 0
        self.failure: Exception | None = None
        """What `gather` of the newest call has raised; may be read by any thread."""

    # -- vLLM's four methods -------------------------------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.gather(self.begin("init_weight_transfer_engine", init_info))

    def start_weight_update(self) -> None:
        """The engines were asked by `offer` before the transfer began."""

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        assert isinstance(update_info, dict)
        self.gather(self.begin("update_weights", update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.gather(self.begin("finish_weight_update", {"version": self.version}))

    # -- all or nothing ------------------------------------------------------------

    def offer(self, version: int) -> bool:
        """Announce an update; False if an engine is not (or no longer) in the transfer group."""
        self.version = version
        answers = self.gather(self.begin("start_weight_update", {"version": version}))
        return all(answer["connected"] for answer in answers)

    def commit(self) -> list[dict[str, float]]:
        """Let all engines serve what they loaded; seconds per phase of each."""
        return self.gather(self.begin("commit", {"version": self.version}))

    def abandon(self) -> None:
        """Take every engine back to the version before; they serve it on."""
        self.gather(self.begin("abandon", {"version": self.version}))

    def describe_engine(self, index: int) -> str:
        return self._describe(self._ranks[index])

    # -- transport -----------------------------------------------------------------

    def begin(self, method: str, payload: dict[str, Any]) -> int:
        """Send a call to all rollout ranks; the id to `gather` its answers with."""
        self._call_id += 1
        self._method, self._answers, self.failure = method, {}, None
        for index, rank in enumerate(self._ranks):
            mine = payload
            if method == "init_weight_transfer_engine":
                mine = {**payload, "rank_offset": 1 + index * self._members}
            self._channel.send(rank, WeightCall(self._call_id, method, json.dumps(mine)))
        return self._call_id

    def gather(self, call_id: int) -> list[dict[str, Any]]:
        """Every rank's result, in order of ranks.

        Raises RolloutError as soon as one answers with an error, TimeoutError with the
        names of those that did not answer.
        """
        try:
            return self._gather(call_id)
        except Exception as error:
            if call_id == self._call_id:
                self.failure = error
            raise

    def _gather(self, call_id: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            self.raise_errors(call_id)
            missing = [rank for rank in self._ranks if rank not in self._answers]
            if not missing:
                return [json.loads(self._answers[rank].result) for rank in self._ranks]
            left = deadline - time.monotonic()
            if left <= 0 or not self._take(left):
                names = ", ".join(self._describe(rank) for rank in missing)
                raise TimeoutError(f"waited {self._timeout_s:.0f} s for {self._method} from {names}")

    def raise_errors(self, call_id: int) -> None:
        """Look once at the answers that have arrived; RolloutError if one is an error."""
        while self._take(deadline_s=-1.0):
            pass
        if call_id != self._call_id:
            # vLLM's trainer engine leaves a thread waiting here when its broadcast fails.
            raise RolloutError(f"weight call {call_id} was given up")
        for rank, answer in self._answers.items():
            if answer.error:
                raise RolloutError(f"{self._method} failed on {self._describe(rank)}: {answer.error}")

    def _take(self, deadline_s: float) -> bool:
        """Receive one answer, whoever asked; one to an older call is dropped. False: none in time."""
        try:
            source, answer = self._channel.receive(WeightReturn, deadline_s, "a weight call")
        except TimeoutError:
            return False
        if answer.call_id == self._call_id:
            self._answers[source] = answer
        return True
