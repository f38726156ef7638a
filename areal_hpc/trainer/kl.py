"""Estimators of the KL divergence to the reference policy. Called by `objective.policy_loss`."""

from __future__ import annotations

from torch import Tensor

from areal_hpc.trainer.packed import bounded_exp


def kl_estimate(estimator: str, policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """KL(policy || reference) of each token from one sample (Schulman, "Approximating KL divergence").

    With d = log pi_theta - log pi_ref: k1 = d (as a loss its expected gradient is 0: of use as a
    measure only), k2 = d^2/2 (whose expected gradient on policy is that of the KL), k3 =
    exp(-d) - 1 + d (GRPO's choice, arXiv 2402.03300, Eq. 4).
    """
    difference = policy_logprobs - reference_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return bounded_exp(-difference) - 1 + difference
    raise ValueError(f"algorithm.kl_estimator={estimator} is not one of k1, k2, k3")
