"""PPO with a critic: generalised advantage estimation and the critic's loss, on packed tokens.

Pure functions, called by the trainer's step where algorithm.advantage is `gae`. A value
belongs to the token that is about to be chosen: values[t] is the critic's estimate for
the text before token t. Prompt, observation and tool tokens (mask 0) are no decisions:
the estimate runs from each trained token to the next trained one of the same sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.trainer.advantages import STD_FLOOR
from areal_hpc.trainer.packed import Sequences, keep_trained


def reward_at_last_token(rewards: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Per-token rewards [T]: each sequence's reward [S] at its last trained token, 0 elsewhere."""
    mask = loss_mask.bool()
    sequences = Sequences(cu_seqlens, mask)
    step = mask.long().cumsum(0)
    last = step.new_full((sequences.num,), -1).scatter_reduce(0, sequences.ids, step, "amax")[sequences.ids]
    return torch.where(mask & (step == last), rewards[sequences.ids], 0.0)


def gae(
    algorithm: AlgorithmConfig, rewards: Tensor, values: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each token, [T] float32, 0 on untrained tokens.

    arXiv 1506.02438, Eq. 16: A_t = d_t + gamma*lambda * A_{t+1}, d_t = r_t + gamma * V_{t+1} -
    V_t, with t + 1 the next trained token and V = 0 after the last. Returns are A + V, the
    critic's targets.
    """
    mask = loss_mask.bool()
    sequences = Sequences(cu_seqlens, mask)
    row = sequences.ids[mask]
    before = torch.cat([mask.new_zeros(1, dtype=torch.long), mask.long().cumsum(0)])
    column = before[:-1][mask] - before[cu_seqlens[:-1].long()][row]
    num_steps = int(column.max()) + 1 if column.numel() else 0

    def dense(tokens: Tensor) -> Tensor:
        table = torch.zeros(num_steps + 1, sequences.num, dtype=torch.float64, device=tokens.device)
        table[column, row] = tokens[mask].double()
        return table

    # All sequences at once, one step of the recurrence after the other, backwards; rows
    # past a sequence's end hold 0 and leave the recurrence at 0.
    reward, value = dense(rewards), dense(values)
    advantage = torch.zeros_like(value)
    for step in reversed(range(num_steps)):
        delta = reward[step] + algorithm.gamma * value[step + 1] - value[step]
        advantage[step] = delta + algorithm.gamma * algorithm.gae_lambda * advantage[step + 1]

    def packed(table: Tensor) -> Tensor:
        tokens = torch.zeros(mask.numel(), dtype=torch.float64, device=mask.device)
        tokens[mask] = table[column, row]
        return tokens.float()

    return packed(advantage), packed(advantage + value)


def moments(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """[count, sum, sum of squares] over trained tokens, float64: add these up over all ranks."""
    kept = keep_trained(advantages, loss_mask.bool()).double()
    return torch.stack([loss_mask.bool().sum().double(), kept.sum(), kept.square().sum()])


def normalise(advantages: Tensor, loss_mask: Tensor, total: Tensor) -> Tensor:
    """(A - mean) / std over all trained tokens, given the `moments` of all ranks; 0 elsewhere."""
    mask = loss_mask.bool()
    count = total[0].clamp(min=1.0)
    mean = total[1] / count
    std = (total[2] / count - mean.square()).clamp(min=0.0).sqrt()
    kept = keep_trained(advantages, mask).double()
    return torch.where(mask, (kept - mean) / (std + STD_FLOOR), 0.0).float()


def value_loss(
    algorithm: AlgorithmConfig,
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    num_tokens: float,
) -> Tensor:
    """The critic's loss: sum over trained tokens / `num_tokens` (of the minibatch, all ranks).

    max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2) / 2 as in PPO's reference
    implementation; algorithm.value_clip = 0 leaves the first term alone.
    """
    mask = loss_mask.bool()
    values, old_values, returns = (keep_trained(each, mask) for each in (values, old_values, returns))
    loss = (values - returns).square()
    if algorithm.value_clip:
        moved = (values - old_values).clamp(-algorithm.value_clip, algorithm.value_clip)
        loss = torch.maximum(loss, (old_values + moved - returns).square())
    return 0.5 * loss.sum() / num_tokens
