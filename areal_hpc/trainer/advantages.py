"""Advantages from rewards: one number per sequence, or per token with a critic.

Pure functions, called by the trainer's step on the rewards of the WHOLE batch (all dp
ranks: a group may be spread over them). Computed in float64, returned as float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_hpc.config.algorithm import AlgorithmConfig

STD_FLOOR = 1.0e-6
"""Added to a standard deviation before dividing by it."""


def compute_advantages(
    algorithm: AlgorithmConfig, rewards: Tensor, group_ids: Tensor, lengths: Tensor
) -> Tensor:
    """Advantage of each sequence, shape [R]; all its tokens share it.

    rewards float [R]; group_ids int [R]: answers to one prompt share one; lengths int [R]:
    trained tokens of each sequence (weights of `reinforce`; the others ignore it).

    grpo (DeepSeekMath, arXiv 2402.03300, Eq. 3): (r - mean) / std over the group, std with
    Bessel's correction. dr_grpo (arXiv 2503.20783): r - mean. rloo (arXiv 2402.14740): r
    minus the mean of the OTHERS. reinforce (arXiv 2505.24298, section 5.2: gamma = lambda =
    1, reward at the last token, no critic): every token's return is r, normalised by mean
    and standard deviation over all tokens of the batch. Equal rewards in a group (or batch)
    and a group of one give exactly 0.
    """
    rewards = rewards.double()
    if algorithm.advantage == "reinforce":
        return _normalised_over_tokens(rewards, lengths).float()
    _, groups = torch.unique(group_ids, return_inverse=True)
    num_groups = int(groups.max()) + 1 if groups.numel() else 0

    def per_group(values: Tensor) -> Tensor:
        return values.new_zeros(num_groups).index_add(0, groups, values)[groups]

    counts = per_group(torch.ones_like(rewards))
    centred = rewards - per_group(rewards) / counts
    # Not by comparing the std with 0: the mean of equal rewards is not always that reward.
    # A group of one counts as equal; its 0/0 below is replaced.
    equal = _equal_within(rewards, groups, num_groups)
    if algorithm.advantage == "dr_grpo":
        advantages = centred
    elif algorithm.advantage == "rloo":
        # r - (sum - r)/(n - 1) = (r - mean) * n/(n - 1)
        advantages = centred * counts / (counts - 1)
    elif algorithm.advantage == "grpo":
        variances = per_group(centred.square()) / (counts - 1)
        advantages = centred / (variances.sqrt() + STD_FLOOR)
    else:
        raise ValueError(f"algorithm.advantage={algorithm.advantage} gives no advantage per sequence")
    return torch.where(equal, 0.0, advantages).float()


def _equal_within(rewards: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    highest = rewards.new_full((num_groups,), -torch.inf).scatter_reduce(0, groups, rewards, "amax")
    lowest = rewards.new_full((num_groups,), torch.inf).scatter_reduce(0, groups, rewards, "amin")
    return (highest == lowest)[groups]


def _normalised_over_tokens(rewards: Tensor, lengths: Tensor) -> Tensor:
    weights = lengths.to(rewards)
    trained = rewards[weights > 0]
    if not trained.numel() or bool(trained.max() == trained.min()):
        return torch.zeros_like(rewards)
    mean = (weights * rewards).sum() / weights.sum()
    variance = (weights * (rewards - mean).square()).sum() / weights.sum()
    return (rewards - mean) / (variance.sqrt() + STD_FLOOR)
