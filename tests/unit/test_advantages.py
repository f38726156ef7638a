"""Advantages against exact fractions and plain statistics."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.trainer.advantages import compute_advantages

REWARDS = [1, 0, 0, 1, 1, -1, 2, 5]
GROUPS = [7, 7, 7, 7, 3, 3, 3, 3]


def advantages(name, rewards, groups, lengths=None):
    lengths = [1] * len(rewards) if lengths is None else lengths
    return compute_advantages(
        AlgorithmConfig(advantage=name),
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups),
        torch.tensor(lengths),
    )


def by_group(rewards, groups, function):
    result = []
    for index, group in enumerate(groups):
        others = [Fraction(r) for i, (r, g) in enumerate(zip(rewards, groups)) if g == group and i != index]
        result.append(function(Fraction(rewards[index]), others))
    return torch.tensor([float(value) for value in result])


def test_grpo():
    def formula(own, others):
        members = [own, *others]
        mean = sum(members) / len(members)
        variance = sum((r - mean) ** 2 for r in members) / (len(members) - 1)
        return float(own - mean) / math.sqrt(variance)

    torch.testing.assert_close(advantages("grpo", REWARDS, GROUPS), by_group(REWARDS, GROUPS, formula),
                               rtol=1e-5, atol=1e-6)


def test_dr_grpo():
    expected = by_group(REWARDS, GROUPS, lambda own, others: own - (own + sum(others)) / (len(others) + 1))
    torch.testing.assert_close(advantages("dr_grpo", REWARDS, GROUPS), expected)


def test_rloo():
    expected = by_group(REWARDS, GROUPS, lambda own, others: own - sum(others) / len(others))
    torch.testing.assert_close(advantages("rloo", REWARDS, GROUPS), expected)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_groups_of_unequal_size_and_a_single_survivor(name):
    result = advantages(name, [3.0, 1.0, 0.0, 1.0, 0.5], [9, 2, 2, 2, 4])
    assert result[0] == 0 and result[4] == 0
    assert torch.equal(result[1:4], advantages(name, [1.0, 0.0, 1.0], [0, 0, 0]))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -7.7e5, 1e-30])
@pytest.mark.parametrize("size", [1, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(name, reward, size):
    result = advantages(name, [reward] * size, [5] * size)
    assert result.dtype == torch.float32 and torch.equal(result, torch.zeros(size))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_equal_group_beside_a_useful_one(name):
    result = advantages(name, [0.1, 0.1, 0.1, 1.0, 0.0], [1, 1, 1, 0, 0])
    assert torch.equal(result[:3], torch.zeros(3)) and result[3] > 0 > result[4]


def test_reinforce_is_normalised_over_tokens():
    rewards, lengths = [5.0, -5.0, -5.0, 5.0], [3, 10, 1, 6]
    tokens = [r for r, length in zip(rewards, lengths) for _ in range(length)]
    mean, std = statistics.fmean(tokens), statistics.pstdev(tokens)
    expected = torch.tensor([(r - mean) / std for r in rewards])
    torch.testing.assert_close(advantages("reinforce", rewards, [0, 1, 2, 3], lengths), expected)


def test_reinforce_ignores_sequences_without_trained_tokens():
    result = advantages("reinforce", [0.1, 0.1, 100.0], [0, 1, 2], [1, 2, 0])
    assert torch.equal(result[:2], torch.zeros(2))


@given(st.permutations(range(8)), st.sampled_from(["grpo", "rloo", "dr_grpo", "reinforce"]))
def test_order_and_group_names_do_not_matter(order, name):
    lengths = [2, 3, 4, 5, 6, 7, 8, 9]
    plain = advantages(name, REWARDS, GROUPS, lengths)
    moved = advantages(name, [REWARDS[i] for i in order], [1000 - GROUPS[i] for i in order],
                       [lengths[i] for i in order])
    torch.testing.assert_close(moved, plain[list(order)])


def test_an_empty_batch():
    assert advantages("grpo", [], [], []).shape == (0,)
    assert advantages("reinforce", [], [], []).shape == (0,)


def test_gae_is_not_per_sequence():
    with pytest.raises(ValueError, match="algorithm.advantage=gae"):
        advantages("gae", [1.0], [0])
