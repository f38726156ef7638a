"""Overlong shaping and filtering, and the choice of groups in dynamic sampling."""

from __future__ import annotations

import numpy as np
import torch

from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.controller.selection import keep_group
from areal_hpc.trainer.shaping import shape_rewards, trained_mask
from areal_hpc.types import Trajectory


def dapo_equation_13(length, longest, cache):
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


def test_soft_overlong_penalty():
    lengths = [1, 79, 80, 81, 90, 99, 100, 140]
    rewards = torch.arange(8.0)
    algorithm = AlgorithmConfig(overlong_buffer=20, overlong_penalty=0.5)
    shaped = shape_rewards(algorithm, rewards, torch.tensor(lengths), max_new_tokens=100)
    expected = [reward + 0.5 * dapo_equation_13(n, 100, 20) for reward, n in zip(rewards.tolist(), lengths)]
    torch.testing.assert_close(shaped, torch.tensor(expected))


def test_no_buffer_no_penalty():
    rewards = torch.tensor([1.0, 0.0])
    assert torch.equal(shape_rewards(AlgorithmConfig(), rewards, torch.tensor([500, 3]), 100), rewards)


def trajectory(finish_reason):
    mask = np.array([0, 1, 1], np.uint8)
    zeros = np.zeros(3, np.float32)
    tokens = np.arange(3, dtype=np.int32)
    return Trajectory(tokens, mask, zeros, mask.astype(np.int32), 1.0, 0, 0, 0, finish_reason)


def test_cut_answers_leave_the_loss_only_when_asked():
    filtering = AlgorithmConfig(drop_truncated=True)
    assert trained_mask(filtering, trajectory("length")).tolist() == [0, 0, 0]
    assert trained_mask(filtering, trajectory("stop")).tolist() == [0, 1, 1]
    assert trained_mask(AlgorithmConfig(), trajectory("length")).tolist() == [0, 1, 1]


def test_dynamic_sampling_refuses_equal_groups():
    algorithm = AlgorithmConfig(dynamic_sampling=True)
    assert not keep_group([1.0, 1.0, 1.0], algorithm)
    assert not keep_group([0.1], algorithm)
    assert keep_group([1.0, 0.0, 1.0], algorithm)
    assert keep_group([1.0, 1.0], AlgorithmConfig())


def test_dynamic_sampling_gives_up_after_its_attempts():
    algorithm = AlgorithmConfig(dynamic_sampling=True, dynamic_sampling_max_attempts=3)
    kept = [keep_group([0.0, 0.0], algorithm, num_refused=n, groups_per_batch=4) for n in range(14)]
    assert kept.index(True) == 12 and all(kept[12:])
