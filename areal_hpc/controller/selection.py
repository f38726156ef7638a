"""Dynamic sampling: whether a finished group is worth training on. Called by the controller's loop."""

from __future__ import annotations

from collections.abc import Sequence

from areal_hpc.config.algorithm import AlgorithmConfig


def keep_group(
    rewards: Sequence[float], algorithm: AlgorithmConfig, *, num_refused: int = 0, groups_per_batch: int = 1
) -> bool:
    """False for a group whose rewards are all equal: its advantages are 0 (DAPO, arXiv 2503.14476, Eq. 11).

    num_refused: groups refused since the last batch was formed. From
    algorithm.dynamic_sampling_max_attempts batches' worth on every group is kept, so that a
    run whose prompts are all too easy or too hard slows down instead of starving.
    """
    if not algorithm.dynamic_sampling:
        return True
    if num_refused >= algorithm.dynamic_sampling_max_attempts * groups_per_batch:
        return True
    return max(rewards) != min(rewards)
