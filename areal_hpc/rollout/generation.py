"""One answer of an engine, and what is done with its parts. Pure; used by `engine` and the episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Generation:
    """One answer, prompt not included; the three arrays have the shape [num_tokens].

    logprobs: under the distribution that was sampled from. versions: policy_version of
    the weights that produced each token. finish_reason: stop or length.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.versions)}
        assert len(lengths) == 1, f"per-token arrays of an answer differ in length: {lengths}"

    def from_token(self, first: int) -> Generation:
        """The answer from its token `first` on."""
        return Generation(self.token_ids[first:], self.logprobs[first:], self.versions[first:], self.finish_reason)

    def without_tail(self, stop: Sequence[str]) -> Generation:
        """The answer without the tokens that may be the beginning of a stop string.

        What goes on after an interruption is searched for stop strings from there on: one
        that lies across it would be missed.
        """
        kept = max(0, len(self.token_ids) - max(map(len, stop), default=0))
        return Generation(self.token_ids[:kept], self.logprobs[:kept], self.versions[:kept], self.finish_reason)


NOTHING = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "")


def to_generation(output: Any) -> Generation:
    """vLLM's CompletionOutput as an answer."""
    count = len(output.token_ids)
    versions = np.full(count, -1, dtype=np.int32)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    assert (versions >= 0).all(), f"tokens without a weight version: {output.weight_versions}"
    logprobs = output.logprobs.logprobs if count else []
    return Generation(
        token_ids=np.asarray(output.token_ids, dtype=np.int32),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        versions=versions,
        finish_reason=output.finish_reason,
    )


def join(parts: list[Generation], finish_reason: str) -> Generation:
    """The parts of one answer, of which there may be none, as one."""
    parts = parts or [NOTHING]
    if len(parts) == 1:
        return replace(parts[0], finish_reason=finish_reason)
    return Generation(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        finish_reason=finish_reason,
    )
