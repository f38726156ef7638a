"""GAE and the critic's loss against plain recursions, multi-turn masks included."""

from __future__ import annotations

import pytest
import torch

from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.trainer import gae as module

CU = torch.tensor([0, 6, 6, 9, 14])
# Prompt, answer, observation in the middle, answer; an empty sequence; nothing trained; plain.
MASK = torch.tensor([0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 0])
NAN = float("nan")


def recursion(rewards, values, gamma, lam):
    """A_t = sum_k (gamma*lambda)^k d_{t+k}, as the sum it is."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following)]
    return [
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))
    ]


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_gae_runs_over_trained_tokens(gamma, lam):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(14, generator=generator)
    rewards = torch.randn(14, generator=generator)
    values[MASK == 0] = NAN
    rewards[MASK == 0] = NAN
    algorithm = AlgorithmConfig(gamma=gamma, gae_lambda=lam)
    advantages, returns = module.gae(algorithm, rewards, values, MASK, CU)
    for tokens in ([1, 2, 5], [10, 11, 12]):
        expected = recursion(rewards[tokens].tolist(), values[tokens].tolist(), gamma, lam)
        torch.testing.assert_close(advantages[tokens], torch.tensor(expected))
        torch.testing.assert_close(returns[tokens], torch.tensor(expected) + values[tokens])
    for result in (advantages, returns):
        assert torch.equal(result[MASK == 0], torch.zeros(8))


def test_without_critic_and_discount_every_token_gets_the_reward():
    rewards = module.reward_at_last_token(torch.tensor([2.0, 9.0, 7.0, -1.0]), MASK, CU)
    assert rewards.tolist() == [0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, -1, 0]
    advantages, returns = module.gae(AlgorithmConfig(), rewards, torch.zeros(14), MASK, CU)
    assert advantages.tolist() == [0, 2, 2, 0, 0, 2, 0, 0, 0, 0, -1, -1, -1, 0]
    assert torch.equal(advantages, returns)


def test_nothing_trained_at_all():
    advantages, returns = module.gae(
        AlgorithmConfig(), torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.tensor([0, 3])
    )
    assert torch.equal(advantages, torch.zeros(3)) and torch.equal(returns, torch.zeros(3))


def test_normalise_over_two_ranks():
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randn(9, generator=generator), 4 + torch.randn(5, generator=generator)
    masks = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 1]), torch.tensor([1, 0, 1, 1, 1])
    first[2] = NAN
    total = module.moments(first, masks[0]) + module.moments(second, masks[1])
    pooled = torch.cat([first[masks[0] == 1], second[masks[1] == 1]])
    expected = (pooled - pooled.mean()) / pooled.std(unbiased=False)
    result = torch.cat([
        module.normalise(first, masks[0], total)[masks[0] == 1],
        module.normalise(second, masks[1], total)[masks[1] == 1],
    ])
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert module.normalise(first, masks[0], total)[2] == 0


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_value_loss(clip):
    generator = torch.Generator().manual_seed(6)
    values = torch.randn(14, generator=generator).requires_grad_()
    old = values.detach() + 0.3 * torch.randn(14, generator=generator)
    returns = torch.randn(14, generator=generator)
    poisoned = torch.where(MASK.bool(), returns, NAN)
    loss = module.value_loss(
        AlgorithmConfig(value_clip=clip),
        values=values, old_values=old, returns=poisoned, loss_mask=MASK, num_tokens=6.0,
    )
    gradient = torch.autograd.grad(loss, values)[0]
    terms = []
    for t in MASK.nonzero().flatten().tolist():
        plain = (values[t] - returns[t]) ** 2
        held = (old[t] + torch.clamp(values[t] - old[t], -clip, clip) - returns[t]) ** 2
        terms.append(torch.maximum(plain, held) if clip else plain)
    expected = torch.stack(terms).sum() / 2 / 6
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, values)[0])
