"""The algorithm's configuration keys and their checks.

`config.schema` nests AlgorithmConfig in Config, `config.load` calls `check_algorithm`; the
trainer's `advantages`, `objective` and `shaping` and the controller's group filter read the
values. Choices are plain strings, checked here, so that a wrong one is answered with the list.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from areal_hpc.config.errors import ConfigError

if TYPE_CHECKING:
    from areal_hpc.config.schema import Config


class Objective(str, Enum):
    decoupled = "decoupled"
    naive = "naive"


CHOICES = {
    "advantage": ("grpo", "rloo", "dr_grpo", "reinforce", "gae"),
    "surrogate": ("ppo", "gspo", "cispo"),
    "proximal": ("recompute", "interpolate"),
    "aggregation": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"),
    "behaviour_weight": ("full", "truncate", "mask"),
    "behaviour_level": ("token", "sequence", "geometric"),
    "kl_estimator": ("k1", "k2", "k3"),
}
"""Valid values of each key of AlgorithmConfig that names a method."""


@dataclass
class AlgorithmConfig:
    """algorithm: objective, advantages and the staleness bound."""

    objective: Objective = Objective.decoupled
    """decoupled (Eq. 5 of the AReaL paper) or naive PPO (ratio to the behaviour policy, no weight)."""
    max_staleness: int = 4
    """eta of Eq. 3, versions."""
    backlog: int = 0
    """Batches that must be ready before a step takes one; at most max_staleness. Slows a run down on
    purpose: its data are about as old as that, whichever side is faster (tools/experiment_staleness.py)."""
    minibatches: int = 4
    """Optimizer updates per training step."""
    advantage: str = "grpo"
    """grpo (group mean and std), rloo (leave-one-out), dr_grpo (group mean), reinforce (batch mean
    and std, weighted by tokens: the AReaL paper), gae (PPO with a critic)."""
    gamma: float = 1.0
    """Discount per token (gae)."""
    gae_lambda: float = 1.0
    """Trace decay per token (gae)."""
    value_clip: float = 0.2
    """Largest move of a critic's value within one step (gae); 0 turns clipping off."""
    surrogate: str = "ppo"
    """ppo (clipped token ratio), gspo (clipped sequence ratio), cispo (clipped weight on the log-prob)."""
    clip_eps: float = 0.2
    """The ratio is clipped below 1 - clip_eps."""
    clip_eps_high: float = 0.0
    """The ratio is clipped above 1 + clip_eps_high (DAPO's clip-higher); 0 takes clip_eps."""
    dual_clip: float = 0.0
    """Bound on the ratio where the advantage is negative (dual-clip PPO), above 1; 0 is off."""
    proximal: str = "recompute"
    """Proximal log-probs: recompute (forward pass when the batch arrives) or interpolate (A-3PO)."""
    aggregation: str = "token-mean"
    """How token losses become one: token-mean, seq-mean-token-mean, seq-mean-token-sum, constant."""
    aggregation_norm: float = 0.0
    """Tokens per sequence that `constant` divides by (Dr. GRPO: the longest answer)."""
    behaviour_weight: str = "full"
    """pi_prox/pi_behav as it is (full), capped (truncate) or zero outside its bounds (mask)."""
    behaviour_level: str = "token"
    """Weight of each token alone, of the whole sequence (product), or the product's geometric mean."""
    behaviour_cap: float = 2.0
    """Upper bound of the weight for truncate and mask."""
    behaviour_floor: float = 0.0
    """Lower bound of the weight for mask."""
    kl_coef: float = 0.0
    """Weight of the KL penalty to the reference model (the starting policy); 0 loads none."""
    kl_estimator: str = "k3"
    """k1, k2 or k3 of Schulman's note on approximating KL."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    overlong_buffer: int = 0
    """Tokens before rollout.max_new_tokens over which a length penalty grows (DAPO); 0 is off."""
    overlong_penalty: float = 1.0
    """Penalty at the full length, in units of reward."""
    drop_truncated: bool = False
    """Leave answers cut at the length limit out of the loss (overlong filtering)."""
    dynamic_sampling: bool = False
    """Refuse groups whose rewards are all equal and answer further prompts instead (DAPO)."""
    dynamic_sampling_max_attempts: int = 10
    """Once this many batches' worth of groups were refused for one batch, equal groups are taken."""


def check_algorithm(config: Config) -> None:
    """Refuse values outside their range and options that contradict each other."""
    algorithm = config.algorithm
    for key, valid in CHOICES.items():
        _one_of(key, getattr(algorithm, key), valid)
    for key in ("max_staleness", "backlog", "value_clip", "clip_eps_high", "behaviour_floor", "kl_coef", "entropy_coef",
                "overlong_buffer", "overlong_penalty"):
        _require(key, getattr(algorithm, key), getattr(algorithm, key) >= 0, "must not be negative")
    _require("backlog", algorithm.backlog, algorithm.backlog <= algorithm.max_staleness,
             f"can never be reached: it must not exceed algorithm.max_staleness={algorithm.max_staleness}")
    _require("minibatches", algorithm.minibatches, algorithm.minibatches >= 1, "must be at least 1")
    _require("minibatches", algorithm.minibatches, algorithm.minibatches <= config.trainer.batch_size,
             f"must not exceed trainer.batch_size={config.trainer.batch_size}")
    _require("clip_eps", algorithm.clip_eps, 0 < algorithm.clip_eps < 1, "must lie between 0 and 1")
    for key in ("gamma", "gae_lambda"):
        _require(key, getattr(algorithm, key), 0 <= getattr(algorithm, key) <= 1, "must lie in [0, 1]")
    _require("dual_clip", algorithm.dual_clip, algorithm.dual_clip == 0 or algorithm.dual_clip > 1,
             "must be above 1, or 0 to turn it off")
    attempts = algorithm.dynamic_sampling_max_attempts
    _require("dynamic_sampling_max_attempts", attempts, attempts >= 1, "must be at least 1")
    if algorithm.aggregation == "constant":
        _require("aggregation_norm", algorithm.aggregation_norm, algorithm.aggregation_norm > 0,
                 "must be positive for algorithm.aggregation=constant")
    if algorithm.behaviour_weight != "full":
        _require("behaviour_cap", algorithm.behaviour_cap,
                 algorithm.behaviour_cap > max(algorithm.behaviour_floor, 0.0),
                 f"must be above algorithm.behaviour_floor={algorithm.behaviour_floor}")
    if algorithm.objective is Objective.naive:
        for key, plain in (("behaviour_weight", "full"), ("proximal", "recompute")):
            _require(key, getattr(algorithm, key), getattr(algorithm, key) == plain,
                     f"has no meaning for algorithm.objective=naive: set it to {plain}")
    if algorithm.dual_clip:
        _require("dual_clip", algorithm.dual_clip, algorithm.surrogate != "cispo",
                 "has no meaning for algorithm.surrogate=cispo: set it to 0")
    _require("overlong_buffer", algorithm.overlong_buffer,
             algorithm.overlong_buffer < config.rollout.max_new_tokens,
             f"must be below rollout.max_new_tokens={config.rollout.max_new_tokens}")
    grouped = algorithm.advantage in ("grpo", "rloo", "dr_grpo")
    if (grouped or algorithm.dynamic_sampling) and config.rollout.group_size < 2:
        user = f"algorithm.advantage={algorithm.advantage}" if grouped else "algorithm.dynamic_sampling"
        raise ConfigError(f"rollout.group_size={config.rollout.group_size} gives no signal with {user}: "
                          "raise rollout.group_size to 2 or more")


def _one_of(key: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        near = difflib.get_close_matches(value, valid, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"algorithm.{key}={value} is not one of {', '.join(valid)}{hint}")


def _require(key: str, value: object, holds: bool, constraint: str) -> None:
    if not holds or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"algorithm.{key}={value} {constraint}")
