"""Which answers count as right, and the figures of a set of scored answers. Pure.

The one rule behind every accuracy: the trainer's of a batch, the controller's and
`areal-hpc eval`'s of held-out prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from areal_hpc.config.schema import RewardsConfig
from areal_hpc.types import EvalSample

PART = "reward."
"""Begins the name of the figure of each single reward."""
TOLERANCE = 1e-6
"""The spool stores rewards in single precision."""


def right_part(rewards: RewardsConfig) -> str:
    """Name of the reward that says whether an answer is right.

    rewards.right_part, else the one with the largest weight (of equals the first).
    """
    if rewards.right_part or not rewards.weights:
        return rewards.right_part or rewards.fn
    return max(rewards.weights, key=lambda name: rewards.weights[name])


def is_right(rewards: RewardsConfig, reward: float, parts: Mapping[str, float]) -> bool:
    """Whether the reward that decides, before weights and discounts, reaches rewards.right_at.

    `parts`: reward by name; without the one that decides (a workflow of the user's own
    need not keep parts) `reward` does.
    """
    return parts.get(right_part(rewards), reward) >= rewards.right_at - TOLERANCE


def describe_answers(rewards: RewardsConfig, answers: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """`accuracy` and the mean of each reward (`reward.NAME`) over answers given as (reward, parts).

    Means are sums over answers by their number; a part's over the answers that have it.
    No answers: accuracy 0.
    """
    num = num_right = 0
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for reward, parts in answers:
        num += 1
        num_right += is_right(rewards, reward, parts)
        for name, value in parts.items():
            sums[name] += value
            counts[name] += 1
    return {
        "accuracy": num_right / num if num else 0.0,
        **{PART + name: total / counts[name] for name, total in sums.items()},
    }


def describe_evaluation(rewards: RewardsConfig, samples: Iterable[EvalSample]) -> dict[str, float]:
    """The figures of an evaluation: `describe_answers`, and `pass@k` where a prompt has k > 1 answers.

    accuracy is mean@k, the share of right answers; pass@k is the share of prompts with a
    right one among their k. `num_prompts` counts the prompts that have answers.
    """
    samples = list(samples)
    right: dict[int, list[bool]] = defaultdict(list)
    for sample in samples:
        right[sample.prompt_id].append(is_right(rewards, sample.reward, sample.parts))
    figures = describe_answers(rewards, ((sample.reward, sample.parts) for sample in samples))
    figures["num_prompts"] = float(len(right))
    k = max(map(len, right.values()), default=1)
    if k > 1:
        figures[f"pass@{k}"] = sum(map(any, right.values())) / len(right)
    return figures
