"""What the answer's length does to its reward and to the loss. Called by the trainer's step."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.types import Trajectory


def shape_rewards(
    algorithm: AlgorithmConfig, rewards: Tensor, num_generated: Tensor, max_new_tokens: int
) -> Tensor:
    """Rewards [R] less the soft overlong penalty (DAPO, arXiv 2503.14476, Eq. 13).

    The penalty grows linearly from 0, algorithm.overlong_buffer tokens before
    `max_new_tokens`, to algorithm.overlong_penalty there and beyond. num_generated: int
    [R], tokens that the policy wrote.
    """
    if not algorithm.overlong_buffer:
        return rewards
    start = max_new_tokens - algorithm.overlong_buffer
    share = ((num_generated - start) / algorithm.overlong_buffer).clamp(0.0, 1.0)
    return rewards - algorithm.overlong_penalty * share


def trained_mask(algorithm: AlgorithmConfig, trajectory: Trajectory) -> np.ndarray:
    """The trajectory's loss mask; all 0 if it was cut and algorithm.drop_truncated is set.

    Overlong filtering (DAPO, arXiv 2503.14476, section 3.4): being cut says nothing about
    the answer. Its reward still counts in its group's mean.
    """
    if algorithm.drop_truncated and trajectory.finish_reason == "length":
        return np.zeros_like(trajectory.loss_mask)
    return trajectory.loss_mask
