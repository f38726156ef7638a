"""The policy loss on packed tokens: decoupled and naive PPO and their relatives.

Pure functions on tensors of shape [T] (all sequences of a micro-batch one after the
other, `cu_seqlens` [S+1] their boundaries), called by the trainer's forward step on every
rank that holds log-probabilities. The caller aligns all inputs: entry t of each belongs
to the same token.

The loss of a micro-batch is a SUM divided by a denominator of the whole minibatch over
all ranks (`loss_denominator`), so that adding up micro-batches and ranks gives the same
loss and gradient however they were cut. Metrics are sums and counts for the same reason.

Entries with loss_mask 0 may hold anything, NaN and infinities included: each input is
replaced by 0 there BEFORE any arithmetic (`packed.keep_trained`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from areal_hpc.config.algorithm import AlgorithmConfig, Objective
from areal_hpc.trainer.kl import kl_estimate
from areal_hpc.trainer.packed import MAX_LOG_RATIO, Sequences, bounded_exp, keep_trained


@dataclass(frozen=True)
class LossOutput:
    """What one micro-batch gives.

    loss: scalar to call backward on; summed over micro-batches and ranks it is the loss of
    the minibatch. sums: name -> (sum, count), to be added up over micro-batches and ranks
    and only then divided. maxima: name -> largest value, to be combined by maximum (both
    are detached scalars).
    """

    loss: Tensor
    sums: dict[str, tuple[Tensor, Tensor]]
    maxima: dict[str, Tensor]


def loss_denominator(algorithm: AlgorithmConfig, loss_tokens: Tensor | Sequence[int]) -> float:
    """The divisor of the loss, from the trained tokens of EVERY sequence of the minibatch, all ranks.

    token-mean (DAPO, arXiv 2503.14476, Eq. 8; Eq. 5 of arXiv 2505.24298): tokens.
    seq-mean-token-mean (GRPO) and seq-mean-token-sum: sequences. constant (Dr. GRPO, arXiv
    2503.20783): sequences times algorithm.aggregation_norm. Sequences without a trained
    token do not count; 1 if nothing is trained, for a loss of 0.
    """
    counts = torch.as_tensor(loss_tokens)
    num_sequences = int((counts > 0).sum())
    denominator = {
        "token-mean": float(counts.sum()),
        "seq-mean-token-mean": float(num_sequences),
        "seq-mean-token-sum": float(num_sequences),
        "constant": num_sequences * algorithm.aggregation_norm,
    }[algorithm.aggregation]
    return denominator or 1.0


def policy_loss(
    algorithm: AlgorithmConfig,
    *,
    policy_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    denominator: float,
    proximal_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    staleness: Tensor | None = None,
) -> LossOutput:
    """The objective of one micro-batch, negated.

    Decoupled PPO (arXiv 2505.24298, Eq. 5), per token:
    (pi_prox/pi_behav) * min(u*A, clip(u, 1-eps, 1+eps)*A), u = pi_theta/pi_prox, the weight
    pi_prox/pi_behav without gradient. Naive PPO: u = pi_theta/pi_behav, weight 1. The
    algorithm's options change the parts: see `_proximal`, `_behaviour_weight`, `_log_ratio`,
    `_surrogate`, `kl.kl_estimate`.

    staleness: version being trained from minus the token's version, int [T]. Needed where
    algorithm.proximal is `interpolate` (which needs no proximal_logprobs); else for metrics.
    reference_logprobs: needed where kl_coef > 0. entropy: of the policy's distribution at
    each token, with gradient; needed where entropy_coef > 0, else for metrics.
    """
    mask = loss_mask.bool()
    sequences = Sequences(cu_seqlens, mask)
    trained = partial(keep_trained, mask=mask)
    policy = trained(policy_logprobs)
    behaviour = trained(rollout_logprobs).detach()
    advantages = trained(advantages).detach()
    metrics = _Metrics(mask)

    if algorithm.objective is Objective.naive:
        anchor = behaviour
        weight = torch.ones_like(behaviour)
    else:
        given = None if proximal_logprobs is None else trained(proximal_logprobs).detach()
        anchor = _proximal(algorithm, given, policy.detach(), behaviour, staleness)
        weight = _behaviour_weight(algorithm, anchor - behaviour, sequences, metrics)
    log_ratio = _log_ratio(algorithm, policy - anchor, sequences)
    objective = weight * _surrogate(algorithm, log_ratio, policy, advantages, metrics)
    if algorithm.kl_coef:
        if reference_logprobs is None:
            raise ValueError("algorithm.kl_coef > 0 needs reference_logprobs")
        divergence = kl_estimate(algorithm.kl_estimator, policy, trained(reference_logprobs).detach())
        objective = objective - algorithm.kl_coef * divergence
        metrics.mean("kl_reference", divergence)
    if entropy is not None:
        metrics.mean("entropy", trained(entropy))
    if algorithm.entropy_coef:
        if entropy is None:
            raise ValueError("algorithm.entropy_coef > 0 needs entropy")
        objective = objective + algorithm.entropy_coef * trained(entropy)
    if algorithm.aggregation == "seq-mean-token-mean":
        objective = objective / sequences.num_trained
    loss = -objective.sum() / denominator

    if staleness is not None:
        metrics.mean("staleness", staleness.to(policy.dtype))
        metrics.maximum("staleness_max", staleness.to(policy.dtype))
        if proximal_logprobs is not None:
            # Fresh tokens: engine and trainer hold the same weights, so this is the numerical gap.
            gap = (trained(proximal_logprobs) - behaviour).abs()
            metrics.mean("behaviour_gap_fresh", gap, where=staleness == 0)
    return LossOutput(loss, metrics.sums, metrics.maxima)


class _Metrics:
    """Collects detached sums, counts and maxima over the trained tokens."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}
        self.maxima: dict[str, Tensor] = {}

    def mean(self, name: str, values: Tensor, where: Tensor | None = None) -> None:
        chosen = self._mask if where is None else self._mask & where
        total = torch.where(chosen, values.detach(), 0.0).sum().float()
        self.sums[name] = (total, chosen.sum().float())

    def maximum(self, name: str, values: Tensor) -> None:
        values = torch.where(self._mask, values.detach(), 0.0)
        self.maxima[name] = values.max().float() if values.numel() else values.new_zeros(())


def _proximal(
    algorithm: AlgorithmConfig,
    given: Tensor | None,
    policy: Tensor,
    behaviour: Tensor,
    staleness: Tensor | None,
) -> Tensor:
    """Log-probabilities of the proximal policy: recomputed when the batch arrived, or A-3PO's.

    A-3PO (arXiv 2512.06547): log pi_prox = a * log pi_behav + (1 - a) * log pi_theta with a =
    1/d, d the versions between behaviour and the policy being made. The policy being made is
    one version after the one trained from, so d = staleness + 1: a fresh token's proximal
    policy IS its behaviour policy.
    """
    if algorithm.proximal == "interpolate":
        if staleness is None:
            raise ValueError("algorithm.proximal=interpolate needs staleness")
        alpha = 1.0 / (staleness.clamp(min=0) + 1).to(policy.dtype)
        return alpha * behaviour + (1.0 - alpha) * policy
    if given is None:
        raise ValueError("algorithm.objective=decoupled with proximal=recompute needs proximal_logprobs")
    return given


def _behaviour_weight(
    algorithm: AlgorithmConfig, log_weight: Tensor, sequences: Sequences, metrics: _Metrics
) -> Tensor:
    """pi_prox/pi_behav, of tokens or sequences, as it is, truncated or masked.

    Truncated (IMPALA, arXiv 1802.01561; TIS): min(w, cap). Masked (IcePop, AReaL): 0 where w
    lies outside [floor, cap]. At the level `sequence` w is the product over the sequence's
    trained tokens, at `geometric` the product's geometric mean.
    """
    if algorithm.behaviour_level == "sequence":
        log_weight = sequences.total(log_weight)
    elif algorithm.behaviour_level == "geometric":
        log_weight = sequences.mean(log_weight)
    weight = bounded_exp(log_weight)
    metrics.maximum("importance_weight_max", weight)
    outside = torch.zeros_like(weight, dtype=torch.bool)
    if algorithm.behaviour_weight == "truncate":
        outside = weight > algorithm.behaviour_cap
        weight = weight.clamp(max=algorithm.behaviour_cap)
    elif algorithm.behaviour_weight == "mask":
        outside = (weight > algorithm.behaviour_cap) | (weight < algorithm.behaviour_floor)
        weight = torch.where(outside, 0.0, weight)
    metrics.mean("importance_weight", weight)
    metrics.mean("importance_weight_cut", outside.to(weight.dtype))
    return weight


def _log_ratio(algorithm: AlgorithmConfig, log_ratio: Tensor, sequences: Sequences) -> Tensor:
    """log u of each token; for GSPO that of its sequence.

    GSPO (arXiv 2507.18071, Eq. 7 and its token variant): s = (prod u)^(1/length), and each
    token's gradient is s times that of its own log-probability (straight through).
    """
    if algorithm.surrogate != "gspo":
        return log_ratio
    return sequences.mean(log_ratio.detach()) + log_ratio - log_ratio.detach()


def _surrogate(
    algorithm: AlgorithmConfig, log_ratio: Tensor, policy: Tensor, advantages: Tensor, metrics: _Metrics
) -> Tensor:
    """The clipped objective of each token, to be maximised.

    ppo and gspo (arXiv 1707.06347, Eq. 7): min(u*A, clip(u)*A), with DAPO's separate upper
    bound (arXiv 2503.14476, Eq. 10) and, where A < 0, dual clip's max(., c*A) (arXiv
    1912.09729, Eq. 5). cispo (MiniMax-M1, arXiv 2506.13585, Eq. 4): clip(u) without gradient,
    times A * log pi_theta, so that no token loses its gradient.
    """
    low = 1.0 - algorithm.clip_eps
    high = 1.0 + (algorithm.clip_eps_high or algorithm.clip_eps)
    ratio = bounded_exp(log_ratio)
    held = ratio.clamp(low, high)
    if algorithm.surrogate == "cispo":
        clipped = ratio != held
        objective = held.detach() * advantages * policy
    else:
        clipped = held * advantages < ratio * advantages
        objective = torch.minimum(ratio * advantages, held * advantages)
        if algorithm.dual_clip:
            bound = algorithm.dual_clip * advantages
            below = (advantages < 0) & (objective < bound)
            objective = torch.where(below, bound, objective)
            metrics.mean("dual_clip_fraction", below.to(ratio.dtype))
    metrics.mean("clip_fraction", clipped.to(ratio.dtype))
    metrics.mean("ratio", ratio)
    metrics.maximum("ratio_max", ratio)
    # k3 of KL(anchor || policy): never negative, and exact sums over tokens.
    metrics.mean("approx_kl", ratio - 1.0 - log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return objective
