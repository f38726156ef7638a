"""The policy loss against formulas written token by token on the trained tokens alone.

Each option has a formula of its own, after its paper, over Python loops; loss and
gradient (by autograd through the formula) must agree in float64.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from areal_hpc.config.algorithm import CHOICES, AlgorithmConfig, Objective
from areal_hpc.trainer.objective import loss_denominator, policy_loss

LENGTHS = [7, 1, 12, 4, 9]
FLOATS = (
    "policy_logprobs", "proximal_logprobs", "rollout_logprobs", "advantages", "reference_logprobs", "entropy"
)


class Batch:
    """Seeded log-probabilities with ratios on both sides of every bound; sequence 3 trains nothing."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        total = sum(LENGTHS)

        def normal(scale):
            return scale * torch.randn(total, generator=generator, dtype=torch.float64)

        self.mask = torch.rand(total, generator=generator) < 0.7
        self.cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
        self.mask[self.cu_seqlens[3] : self.cu_seqlens[4]] = False
        self.mask[self.cu_seqlens[1]] = True
        self.policy = (-1.0 - normal(0.5).abs()).requires_grad_()
        self.proximal = self.policy.detach() + normal(0.3)
        self.rollout = self.proximal + normal(0.4)
        self.reference = self.policy.detach() + normal(0.5)
        self.entropy = (1.0 + normal(0.2)).requires_grad_()
        self.advantages = normal(1.0)
        self.staleness = torch.randint(0, 5, (total,), generator=generator)
        self.sequences = [
            [t for t in range(self.cu_seqlens[s], self.cu_seqlens[s + 1]) if self.mask[t]]
            for s in range(len(LENGTHS))
        ]
        self.trained = [t for tokens in self.sequences for t in tokens]
        self.sequence_of = {t: tokens for tokens in self.sequences for t in tokens}

    def loss(self, algorithm, **changes):
        inputs = dict(
            policy_logprobs=self.policy, proximal_logprobs=self.proximal, rollout_logprobs=self.rollout,
            advantages=self.advantages, loss_mask=self.mask.to(torch.uint8), cu_seqlens=self.cu_seqlens,
            reference_logprobs=self.reference, entropy=self.entropy, staleness=self.staleness,
            denominator=loss_denominator(algorithm, [len(tokens) for tokens in self.sequences]),
        )
        return policy_loss(algorithm, **{**inputs, **changes})

    def agrees(self, algorithm, token_objective):
        """Loss and gradient equal those of minus the mean of `token_objective(t)` over trained tokens."""
        expected = -sum(token_objective(t) for t in self.trained) / len(self.trained)
        output = self.loss(algorithm)
        wrt = [self.policy, self.entropy]
        torch.testing.assert_close(output.loss, expected, rtol=1e-10, atol=1e-12)
        for got, want in zip(
            torch.autograd.grad(output.loss, wrt, allow_unused=True, retain_graph=True),
            torch.autograd.grad(expected, wrt, allow_unused=True),
        ):
            none = torch.zeros_like(self.policy)
            torch.testing.assert_close(none if got is None else got, none if want is None else want,
                                       rtol=1e-9, atol=1e-12)
        return output


def clipped(ratio, advantage, low=0.8, high=1.2):
    """PPO's objective by cases instead of by min."""
    if advantage >= 0:
        return advantage * (ratio if ratio < high else ratio.detach() * 0 + high)
    return advantage * (ratio if ratio > low else ratio.detach() * 0 + low)


@pytest.fixture(params=range(3))
def batch(request):
    print(f"seed {request.param}")
    return Batch(request.param)


def test_decoupled(batch):
    def formula(t):
        weight = torch.exp(batch.proximal[t] - batch.rollout[t])
        return weight * clipped(torch.exp(batch.policy[t] - batch.proximal[t]), batch.advantages[t])

    batch.agrees(AlgorithmConfig(), formula)


def test_naive(batch):
    batch.agrees(
        AlgorithmConfig(objective=Objective.naive),
        lambda t: clipped(torch.exp(batch.policy[t] - batch.rollout[t]), batch.advantages[t]),
    )


def test_naive_needs_no_proximal_policy(batch):
    algorithm = AlgorithmConfig(objective=Objective.naive)
    assert batch.loss(algorithm, proximal_logprobs=None).loss == batch.loss(algorithm).loss


def test_decoupled_is_naive_where_the_policies_coincide(batch):
    same = dict(proximal_logprobs=batch.rollout)
    decoupled = batch.loss(AlgorithmConfig(), **same).loss
    naive = batch.loss(AlgorithmConfig(objective=Objective.naive), **same).loss
    torch.testing.assert_close(decoupled, naive, rtol=1e-12, atol=0)


def test_no_gradient_flows_through_anything_but_the_policy(batch):
    algorithm = AlgorithmConfig(kl_coef=0.1)
    attached = {name: batch.policy * (0.8 + 0.1 * i) for i, name in enumerate(FLOATS[1:])}
    live = batch.loss(algorithm, **attached)
    detached = batch.loss(algorithm, **{name: values.detach() for name, values in attached.items()})
    gradients = [torch.autograd.grad(output.loss, batch.policy)[0] for output in (live, detached)]
    assert torch.equal(*gradients)


def test_clip_higher(batch):
    def formula(t):
        weight = torch.exp(batch.proximal[t] - batch.rollout[t])
        ratio = torch.exp(batch.policy[t] - batch.proximal[t])
        return weight * clipped(ratio, batch.advantages[t], 0.9, 1.28)

    batch.agrees(AlgorithmConfig(clip_eps=0.1, clip_eps_high=0.28), formula)


def test_dual_clip(batch):
    def formula(t):
        weight = torch.exp(batch.proximal[t] - batch.rollout[t])
        ratio, advantage = torch.exp(batch.policy[t] - batch.proximal[t]), batch.advantages[t]
        if advantage < 0 and ratio > 1.3:
            return weight * 1.3 * advantage
        return weight * clipped(ratio, advantage)

    output = batch.agrees(AlgorithmConfig(dual_clip=1.3), formula)
    assert output.sums["dual_clip_fraction"][0] > 0


def test_interpolated_proximal_policy(batch):
    """A-3PO: no forward pass; fresh tokens take the behaviour policy, older ones move to the policy."""

    def formula(t):
        alpha = 1 / (int(batch.staleness[t]) + 1)
        current = batch.policy[t].detach()
        proximal = alpha * batch.rollout[t] + (1 - alpha) * current
        ratio = torch.exp(batch.policy[t] - current) * torch.exp(current - batch.rollout[t]) ** alpha
        return torch.exp(proximal - batch.rollout[t]) * clipped(ratio, batch.advantages[t])

    algorithm = AlgorithmConfig(proximal="interpolate")
    batch.agrees(algorithm, formula)
    fresh = batch.loss(algorithm, staleness=torch.zeros_like(batch.staleness), proximal_logprobs=None)
    torch.testing.assert_close(fresh.loss, batch.loss(AlgorithmConfig(objective=Objective.naive)).loss)
    with pytest.raises(ValueError, match="staleness"):
        batch.loss(algorithm, staleness=None)


def test_gspo(batch):
    """Eq. 5 of the paper, whose gradient flows through the sequence ratio itself."""
    algorithm = AlgorithmConfig(
        surrogate="gspo", aggregation="seq-mean-token-mean", objective=Objective.naive, clip_eps=0.05
    )
    sequence_advantages = torch.zeros_like(batch.advantages)
    total = 0.0
    for tokens in filter(None, batch.sequences):
        advantage = batch.advantages[tokens[0]]
        sequence_advantages[tokens] = advantage
        ratio = torch.exp((batch.policy[tokens] - batch.rollout[tokens]).mean())
        total = total + clipped(ratio, advantage, 0.95, 1.05)
    expected = -total / 4
    output = batch.loss(algorithm, advantages=sequence_advantages)
    torch.testing.assert_close(output.loss, expected)
    gradients = [torch.autograd.grad(loss, batch.policy)[0] for loss in (output.loss, expected)]
    torch.testing.assert_close(*gradients)


def test_cispo(batch):
    def formula(t):
        weight = torch.exp(batch.proximal[t] - batch.rollout[t])
        ratio = math.exp(batch.policy[t].item() - batch.proximal[t])
        return weight * min(max(ratio, 0.8), 1.5) * batch.advantages[t] * batch.policy[t]

    batch.agrees(AlgorithmConfig(surrogate="cispo", clip_eps_high=0.5), formula)
    gradient = torch.autograd.grad(batch.loss(AlgorithmConfig(surrogate="cispo")).loss, batch.policy)[0]
    assert bool((gradient[batch.mask] != 0).all()), "cispo drops no token's gradient"


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["full", "truncate", "mask"])
def test_behaviour_weight(batch, level, mode):
    cap, floor = {"token": (1.4, 0.7), "sequence": (1.1, 0.9), "geometric": (1.02, 0.98)}[level]
    cut = []

    def formula(t):
        tokens = {"token": [t]}.get(level, batch.sequence_of[t])
        weight = 1.0
        for other in tokens:
            weight *= math.exp(batch.proximal[other] - batch.rollout[other])
        if level == "geometric":
            weight **= 1 / len(tokens)
        if mode == "truncate":
            cut.append(weight > cap)
            weight = min(weight, cap)
        if mode == "mask":
            cut.append(not floor <= weight <= cap)
            weight = 0.0 if cut[-1] else weight
        return weight * clipped(torch.exp(batch.policy[t] - batch.proximal[t]), batch.advantages[t])

    algorithm = AlgorithmConfig(behaviour_weight=mode, behaviour_level=level, behaviour_cap=cap,
                                behaviour_floor=floor)
    output = batch.agrees(algorithm, formula)
    assert output.sums["importance_weight_cut"][0] == sum(cut)
    assert mode == "full" or any(cut)


def k3(theta, reference):
    ratio = torch.exp(reference) / torch.exp(theta)
    return ratio - 1 - torch.log(ratio)


@pytest.mark.parametrize(
    "estimator, kl",
    [
        ("k1", lambda theta, reference: theta - reference),
        ("k2", lambda theta, reference: (theta - reference) ** 2 / 2),
        ("k3", k3),
    ],
)
def test_kl_to_the_reference(batch, estimator, kl):
    def formula(t):
        weight = torch.exp(batch.proximal[t] - batch.rollout[t])
        gain = weight * clipped(torch.exp(batch.policy[t] - batch.proximal[t]), batch.advantages[t])
        return gain - 0.3 * kl(batch.policy[t], batch.reference[t])

    algorithm = AlgorithmConfig(kl_coef=0.3, kl_estimator=estimator)
    output = batch.agrees(algorithm, formula)
    total = sum(kl(batch.policy[t], batch.reference[t]).item() for t in batch.trained)
    assert output.sums["kl_reference"][0].item() == pytest.approx(total, rel=1e-5)
    with pytest.raises(ValueError, match="reference_logprobs"):
        batch.loss(algorithm, reference_logprobs=None)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_holds_the_policy_at_the_reference(estimator):
    """Descent on the penalty alone leads to the reference, from either side."""
    for start in (-2.0, -0.5):
        policy = torch.tensor([start], requires_grad=True)
        for _ in range(200):
            loss = policy_loss(
                AlgorithmConfig(kl_coef=1.0, kl_estimator=estimator),
                policy_logprobs=policy,
                proximal_logprobs=policy.detach(),
                rollout_logprobs=policy.detach(),
                reference_logprobs=torch.tensor([-1.0]),
                advantages=torch.zeros(1),
                loss_mask=torch.ones(1),
                cu_seqlens=torch.tensor([0, 1]),
                denominator=1.0,
            ).loss
            policy = (policy - 0.1 * torch.autograd.grad(loss, policy)[0]).detach().requires_grad_()
        assert policy.item() == pytest.approx(-1.0, abs=1e-3)


def test_entropy_bonus(batch):
    def formula(t):
        weight = torch.exp(batch.proximal[t] - batch.rollout[t])
        gain = weight * clipped(torch.exp(batch.policy[t] - batch.proximal[t]), batch.advantages[t])
        return gain + 0.01 * batch.entropy[t]

    batch.agrees(AlgorithmConfig(entropy_coef=0.01), formula)
    with pytest.raises(ValueError, match="entropy"):
        batch.loss(AlgorithmConfig(entropy_coef=0.01), entropy=None)


@pytest.mark.parametrize("aggregation", CHOICES["aggregation"])
def test_aggregation(batch, aggregation):
    algorithm = AlgorithmConfig(objective=Objective.naive, aggregation=aggregation, aggregation_norm=32.0)
    ratio = torch.exp(batch.policy - batch.rollout)
    value = {t: clipped(ratio[t], batch.advantages[t]).item() for t in batch.trained}
    sums = [sum(value[t] for t in tokens) for tokens in batch.sequences if tokens]
    means = [sum(value[t] for t in tokens) / len(tokens) for tokens in batch.sequences if tokens]
    expected = {
        "token-mean": sum(sums) / len(batch.trained),
        "seq-mean-token-mean": sum(means) / 4,
        "seq-mean-token-sum": sum(sums) / 4,
        "constant": sum(sums) / (4 * 32.0),
    }[aggregation]
    assert batch.loss(algorithm).loss.item() == pytest.approx(-expected, rel=1e-10)


def test_denominator_of_nothing_is_one():
    for aggregation in ("token-mean", "seq-mean-token-mean", "constant"):
        algorithm = AlgorithmConfig(aggregation=aggregation, aggregation_norm=3.0)
        assert loss_denominator(algorithm, [0, 0]) == loss_denominator(algorithm, []) == 1.0


def test_metrics(batch):
    output = batch.loss(AlgorithmConfig())
    policy, proximal = batch.policy.detach()[batch.mask], batch.proximal[batch.mask]
    rollout = batch.rollout[batch.mask]
    advantages, staleness = batch.advantages[batch.mask], batch.staleness[batch.mask]
    ratio, weight = torch.exp(policy - proximal), torch.exp(proximal - rollout)
    fresh = staleness == 0
    is_clipped = (advantages > 0) & (ratio > 1.2) | (advantages < 0) & (ratio < 0.8)
    expected = {
        "ratio": ratio.sum(),
        "importance_weight": weight.sum(),
        "importance_weight_cut": torch.tensor(0.0),
        "clip_fraction": is_clipped.sum(),
        "approx_kl": (ratio - 1 - ratio.log()).sum(),
        "entropy": batch.entropy.detach()[batch.mask].sum(),
        "staleness": staleness.sum(),
        "behaviour_gap_fresh": (proximal - rollout).abs()[fresh].sum(),
    }
    assert output.sums.keys() == expected.keys()
    for name, (total, count) in output.sums.items():
        torch.testing.assert_close(total, expected[name].float(), rtol=1e-5, atol=1e-6)
        assert count == (fresh.sum() if name == "behaviour_gap_fresh" else len(batch.trained)), name
        assert not total.requires_grad
    torch.testing.assert_close(output.maxima["ratio_max"], ratio.max().float())
    torch.testing.assert_close(output.maxima["importance_weight_max"], weight.max().float())
    assert output.maxima["staleness_max"] == staleness.max()
    assert 0 < is_clipped.sum() < len(batch.trained) and fresh.any()


def test_equal_rewards_give_a_gradient_of_exactly_zero(batch):
    output = batch.loss(AlgorithmConfig(), advantages=torch.zeros_like(batch.advantages))
    assert output.loss == 0
    assert torch.equal(torch.autograd.grad(output.loss, batch.policy)[0], torch.zeros_like(batch.policy))


def test_an_empty_micro_batch_still_has_a_graph(batch):
    empty = {name: getattr(batch, name.removesuffix("_logprobs"))[:0] for name in FLOATS}
    output = batch.loss(AlgorithmConfig(), **empty, loss_mask=batch.mask[:0], cu_seqlens=torch.tensor([0]),
                        staleness=batch.staleness[:0])
    output.loss.backward()
    assert output.loss == 0 and torch.equal(batch.policy.grad, torch.zeros_like(batch.policy))
    assert all(total == 0 and count == 0 for total, count in output.sums.values())


def test_inputs_in_float32_and_half_precision(batch):
    exact = batch.loss(AlgorithmConfig()).loss.item()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        changes = {name: getattr(batch, name.removesuffix("_logprobs")).detach().to(dtype) for name in FLOATS}
        loss = batch.loss(AlgorithmConfig(), **changes).loss
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact, abs=tolerance)


OPTIONS = [
    AlgorithmConfig(),
    AlgorithmConfig(objective=Objective.naive, dual_clip=3.0),
    AlgorithmConfig(proximal="interpolate", kl_coef=0.1, kl_estimator="k1", entropy_coef=0.1),
    AlgorithmConfig(surrogate="gspo", aggregation="seq-mean-token-mean", kl_coef=0.1, kl_estimator="k2"),
    AlgorithmConfig(surrogate="cispo", behaviour_weight="mask", behaviour_level="sequence", kl_coef=0.1),
    AlgorithmConfig(behaviour_weight="truncate", behaviour_level="geometric", aggregation="constant",
                    aggregation_norm=8.0),
]
POISONS = [float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e4, -1e4]


@pytest.mark.parametrize("algorithm", OPTIONS, ids=range(len(OPTIONS)))
@pytest.mark.parametrize("poison", POISONS)
def test_untrained_tokens_may_hold_anything(batch, algorithm, poison):
    """Loss, gradient and metrics are bit for bit those of any other untrained values."""

    def run(names, value):
        leaves = [x.detach().clone().requires_grad_() for x in (batch.policy, batch.entropy)]
        inputs = dict(
            policy_logprobs=leaves[0], entropy=leaves[1], proximal_logprobs=batch.proximal,
            rollout_logprobs=batch.rollout, advantages=batch.advantages, reference_logprobs=batch.reference,
        )
        changes = {n: torch.where(batch.mask, x, value if n in names else x) for n, x in inputs.items()}
        output = batch.loss(algorithm, **changes)
        return output, torch.autograd.grad(output.loss, leaves, allow_unused=True)

    plain, plain_gradients = run((), 0.0)
    for names in (FLOATS, *((name,) for name in FLOATS)):
        output, gradients = run(names, poison)
        assert torch.equal(output.loss, plain.loss)
        for got, want in zip(gradients, plain_gradients):
            assert want is None and got is None or torch.equal(got, want)
        assert gradients[0].isfinite().all() and bool((gradients[0][~batch.mask] == 0).all())
        assert output.maxima == plain.maxima
        assert output.sums == plain.sums


def test_staleness_of_untrained_tokens_does_not_count(batch):
    algorithm = AlgorithmConfig(proximal="interpolate")
    poisoned = torch.where(batch.mask, batch.staleness, -(2**31))
    assert batch.loss(algorithm).sums == batch.loss(algorithm, staleness=poisoned).sums
    assert batch.loss(algorithm).loss == batch.loss(algorithm, staleness=poisoned).loss


@pytest.mark.parametrize("algorithm", OPTIONS, ids=range(len(OPTIONS)))
def test_an_outlier_on_a_trained_token_stays_finite(batch, algorithm):
    """exp(10000) would be infinite."""
    for value in (-1.0e4, 0.0):
        rollout = batch.rollout.clone()
        rollout[batch.trained[3]] = value
        output = batch.loss(algorithm, rollout_logprobs=rollout)
        gradient = torch.autograd.grad(output.loss, batch.policy)[0]
        assert output.loss.isfinite() and gradient.isfinite().all(), value


def test_options_leave_their_argument_alone():
    algorithm = AlgorithmConfig(clip_eps_high=0.3)
    copy = replace(algorithm)
    Batch().loss(algorithm)
    assert algorithm == copy
