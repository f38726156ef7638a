"""One training step: shards -> proximal log-probs -> advantages -> minibatch updates -> metrics.

`TrainStep.run` is called by the trainer's loop on every trainer rank with the same
manifest; the result is the same on all of them. Writes nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_hpc.config.algorithm import Objective
from areal_hpc.config.schema import Config
from areal_hpc.paths import RunPaths
from areal_hpc.rewards.right import describe_answers
from areal_hpc.telemetry import Telemetry
from areal_hpc.trainer.advantages import compute_advantages
from areal_hpc.trainer.batch import MicroBatch, Row
from areal_hpc.trainer.critic import Critic
from areal_hpc.trainer.flops import model_flops, peak_flops
from areal_hpc.trainer.history import WeightHistory
from areal_hpc.trainer.megatron import MegatronTrainer, MinibatchResult
from areal_hpc.trainer.objective import LossOutput, loss_denominator, policy_loss
from areal_hpc.trainer.optimizer import UpdateResult
from areal_hpc.trainer.plan import StepPlan, plan_step
from areal_hpc.trainer.reading import read_together
from areal_hpc.trainer.shaping import shape_rewards, trained_mask
from areal_hpc.types import BatchManifest, Trajectory

SEED_STRIDE = 1_000_003


@dataclass
class Batch:
    """The trajectories of a step and what is derived from all of them."""

    trajectories: list[Trajectory]
    masks: list[np.ndarray]
    rewards: np.ndarray
    """Shaped rewards [R], float32."""
    rows: list[Row]


class TrainStep:
    """Holds what stays the same over steps: configuration, engine, reference weights."""

    def __init__(self, config: Config, paths: RunPaths, engine: MegatronTrainer, telemetry: Telemetry,
                 reference: list[Tensor] | None = None, critic: Critic | None = None) -> None:
        self._config, self._paths, self._engine, self._telemetry = config, paths, engine, telemetry
        self._reference, self._critic = reference, critic
        self._history = WeightHistory(config.trainer.weight_history, config.algorithm.max_staleness)
        self._seconds: dict[str, float] = {}
        self._train_step = 0

    @property
    def engines(self) -> dict[str, MegatronTrainer]:
        """Everything that a checkpoint must hold."""
        engines = {"policy": self._engine}
        return engines if self._critic is None else {**engines, "critic": self._critic.engine}

    def run(self, manifest: BatchManifest) -> dict[str, float]:
        """Train on the batch; returns the metrics of the whole step. Raises BatchDamaged, nothing trained."""
        begin = time.perf_counter()
        self._seconds, self._train_step = {}, manifest.train_step
        with self._timed("read", manifest):
            trajectories = read_together(manifest, self._paths, self._config.run.name, self._engine.place.device)
        plan = self._plan(manifest, trajectories)
        batch = self._prepare(manifest, trajectories)
        with self._timed("logprobs", manifest):
            gap = self._proximal(batch, plan)
            self._reference_logprobs(batch, plan)
        with self._timed("gap", manifest):
            self._history.measure(
                self._engine, trajectories, batch.rows, manifest.version,
                self._config.trainer.micro_batch_tokens, gap,
            )
            self._history.keep(manifest.version, self._engine)
        if self._critic is not None:
            with self._timed("critic", manifest):
                self._critic.estimate(batch, plan, batch.rewards)
        with self._timed("update", manifest):
            results, critic_updates = self._update(batch, plan, gap)
        metrics = gather_metrics(results, gap.as_sums())
        if critic_updates:
            metrics |= update_metrics(critic_updates, "critic_")
        metrics |= self._describe(manifest, batch, time.perf_counter() - begin)
        return metrics

    # ---- the parts of a step ---------------------------------------------------------

    def _plan(self, manifest: BatchManifest, trajectories: list[Trajectory]) -> StepPlan:
        return plan_step(
            self._config.trainer,
            [trajectory.num_tokens for trajectory in trajectories],
            self._config.algorithm.minibatches,
            self._config.run.seed * SEED_STRIDE + manifest.train_step,
            self._engine.place.dp_rank,
        )

    def _prepare(self, manifest: BatchManifest, trajectories: list[Trajectory]) -> Batch:
        """Masks, shaped rewards and (without a critic) advantages of the whole batch; the rows to pack."""
        algorithm = self._config.algorithm
        masks = []
        for trajectory in trajectories:
            mask = trained_mask(algorithm, trajectory).astype(bool)
            mask[0] = False  # nothing predicts a first token
            masks.append(mask)
        generated = torch.tensor([trajectory.num_loss_tokens for trajectory in trajectories])
        rewards = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)
        rewards = shape_rewards(algorithm, rewards, generated, self._config.rollout.max_new_tokens)
        advantages = np.zeros(len(trajectories), np.float32)  # a critic gives them per token
        if self._critic is None:
            groups = torch.tensor([trajectory.group_id for trajectory in trajectories])
            lengths = torch.tensor([int(mask.sum()) for mask in masks])
            advantages = compute_advantages(algorithm, rewards, groups, lengths).numpy()
        rows = [
            Row(
                trajectory.tokens,
                {
                    "loss_mask": mask,
                    "rollout_logprobs": trajectory.rollout_logprobs,
                    "staleness": np.where(mask, manifest.version - trajectory.versions, 0).astype(np.int64),
                    "advantages": np.full(trajectory.num_tokens, advantage, np.float32),
                },
            )
            for trajectory, mask, advantage in zip(trajectories, masks, advantages, strict=True)
        ]
        return Batch(trajectories, masks, rewards.float().numpy(), rows)

    @property
    def _recomputes(self) -> bool:
        algorithm = self._config.algorithm
        return algorithm.objective is Objective.decoupled and algorithm.proximal == "recompute"

    def _proximal(self, batch: Batch, plan: StepPlan) -> FreshGap:
        """Log-probs of the weights before the step, where the objective needs them."""
        gap = FreshGap()
        if self._recomputes:
            for index, logprobs in self._engine.forward_logprobs(batch.rows, plan.whole.micro_batches).items():
                values = batch.rows[index].values
                values["proximal_logprobs"] = logprobs
                if self._engine.place.counts:
                    gap.add(values["loss_mask"], values["staleness"], logprobs, values["rollout_logprobs"])
        return gap

    def _reference_logprobs(self, batch: Batch, plan: StepPlan) -> None:
        if self._reference is None:
            return
        with self._engine.using(self._reference):
            found = self._engine.forward_logprobs(batch.rows, plan.whole.micro_batches)
        for index, logprobs in found.items():
            batch.rows[index].values["reference_logprobs"] = logprobs

    def _update(
        self, batch: Batch, plan: StepPlan, gap: FreshGap
    ) -> tuple[list[MinibatchResult], list[UpdateResult]]:
        """The updates of the policy, and those of the critic if there is one."""
        algorithm = self._config.algorithm
        names = ["loss_mask", "rollout_logprobs", "staleness", "advantages"]
        names += ["proximal_logprobs"] if self._recomputes else []
        names += ["reference_logprobs"] if self._reference is not None else []
        results, critic_updates = [], []
        for number, (minibatch, share) in enumerate(zip(plan.minibatches, plan.shares, strict=True)):
            counts = [int(batch.masks[index].sum()) for index in minibatch]
            denominator = loss_denominator(algorithm, counts)
            # Only then are the weights still those the batch is compared with.
            measure = number == 0 and not self._recomputes and self._engine.place.counts

            def loss(micro_batch: MicroBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
                values = micro_batch.values
                if measure:
                    gap.add(*(values[name].numpy(force=True) for name in ("loss_mask", "staleness")),
                            logprobs.numpy(force=True), values["rollout_logprobs"].numpy(force=True))
                return policy_loss(
                    algorithm,
                    policy_logprobs=logprobs,
                    rollout_logprobs=values["rollout_logprobs"],
                    advantages=values["advantages"],
                    loss_mask=micro_batch.loss_mask,
                    cu_seqlens=micro_batch.cu_seqlens,
                    denominator=denominator,
                    proximal_logprobs=values.get("proximal_logprobs"),
                    reference_logprobs=values.get("reference_logprobs"),
                    entropy=entropy,
                    staleness=values["staleness"],
                )

            result = self._engine.train_minibatch(batch.rows, share.micro_batches, names, loss, entropy=True)
            for phase, (began, seconds) in result.phases.items():
                self._telemetry.record_span(f"train.{phase}", began, seconds, train_step=self._train_step)
            if self._critic is not None:
                critic = self._critic.update(batch, minibatch, share)
                result.sums.update(critic.sums)
                critic_updates.append(critic.update)
            results.append(result)
        return results, critic_updates

    def _describe(self, manifest: BatchManifest, batch: Batch, seconds: float) -> dict[str, float]:
        """Metrics that every rank knows without communication."""
        lengths = np.array([trajectory.num_tokens for trajectory in batch.trajectories])
        answers = np.array([trajectory.num_loss_tokens for trajectory in batch.trajectories])
        staleness = np.array([
            manifest.version - trajectory.min_version
            for trajectory in batch.trajectories if trajectory.num_loss_tokens
        ] or [0])
        place = self._engine.place
        metrics = {
            "reward_mean": float(np.mean([trajectory.reward for trajectory in batch.trajectories])),
            **describe_answers(self._config.rewards, ((t.reward, t.reward_parts) for t in batch.trajectories)),
            "staleness_mean": float(staleness.mean()),
            "staleness_max": float(staleness.max()),
            "num_sequences": float(len(lengths)),
            "num_tokens": float(lengths.sum()),
            "num_loss_tokens": float(sum(int(mask.sum()) for mask in batch.masks)),
            "length_mean": float(answers.mean()),
            "length_max": float(answers.max()),
            "truncated_fraction": float(np.mean([t.finish_reason == "length" for t in batch.trajectories])),
            "seconds": seconds,
            "tokens_per_s": float(lengths.sum() / seconds),
            **{f"seconds_{name}": value for name, value in self._seconds.items()},
        }
        peak = peak_flops(place.device, self._engine.options.dtype)
        if peak:
            hf = self._engine.hf
            passes = 3 + self._recomputes + (self._reference is not None)
            flops = passes * sum(model_flops(hf, int(length), hf.vocab_size) for length in lengths)
            if self._critic is not None:
                flops += 4 * sum(model_flops(hf, int(length), 1) for length in lengths)
            metrics["mfu"] = flops / seconds / (peak * place.layout.size)
        return metrics

    @contextmanager
    def _timed(self, name: str, manifest: BatchManifest) -> Iterator[None]:
        begin = time.perf_counter()
        with self._telemetry.span(f"train.{name}", train_step=manifest.train_step):
            yield
        self._seconds[name] = time.perf_counter() - begin


class FreshGap:
    """How far the trainer's log-probs lie from the engine's where both hold the same weights.

    If mask, temperature, versions and weights agree, this is numerical noise.
    """

    def __init__(self) -> None:
        self.total, self.count, self.largest = 0.0, 0, 0.0

    def add(self, mask: np.ndarray, staleness: np.ndarray, trainer: np.ndarray, engine: np.ndarray) -> None:
        gaps = np.abs(trainer - engine)[mask & (staleness == 0)]
        self.total += float(gaps.sum())
        self.count += gaps.size
        # NaN must show, and Python's max() may drop it.
        self.largest = float(np.max([self.largest, *gaps])) if gaps.size else self.largest

    def as_sums(self) -> dict[str, float]:
        return {"total": self.total, "count": float(self.count), "largest": self.largest}


def gather_metrics(results: list[MinibatchResult], gap: dict[str, float]) -> dict[str, float]:
    """Sums, counts and maxima of all ranks and minibatches as metrics; the same on every rank."""
    mine = (
        [result.loss for result in results], [result.sums for result in results],
        [result.maxima for result in results], gap,
    )
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    totals: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    maxima: dict[str, float] = {}
    for _, sums, highest, _ in everyone:
        for part in sums:
            for name, (total, count) in part.items():
                totals[name] = (totals[name][0] + total, totals[name][1] + count)
        for part in highest:
            for name, value in part.items():
                maxima[name] = max(maxima.get(name, value), value)
    metrics = {_MEANS.get(name, name): total / count for name, (total, count) in totals.items() if count}
    metrics |= maxima
    # A minibatch's loss is the sum over its dp ranks.
    metrics["loss"] = float(np.mean(np.sum([losses for losses, *_ in everyone], axis=0)))
    metrics |= update_metrics([result.update for result in results])
    gaps = [gap for *_, gap in everyone]
    count = sum(gap["count"] for gap in gaps)
    metrics["behave_gap_fresh_count"] = count
    metrics["behave_gap_fresh_max"] = float(np.max([gap["largest"] for gap in gaps]))
    metrics["behave_gap_fresh_mean"] = sum(gap["total"] for gap in gaps) / count if count else 0.0
    return metrics


def update_metrics(updates: list[UpdateResult], prefix: str = "") -> dict[str, float]:
    """Of one model's updates in a step, which are the same on every rank."""
    norms = [update.grad_norm for update in updates if not update.skipped]
    return {
        f"{prefix}grad_norm": float(np.mean(norms)) if norms else float("inf"),
        f"{prefix}lr": updates[-1].lr,
        f"{prefix}skipped_updates": float(len(updates) - len(norms)),
    }


_MEANS = {
    "ratio": "ratio_mean",
    "importance_weight": "importance_weight_mean",
    "staleness": "token_staleness_mean",
    "behaviour_gap_fresh": "behaviour_gap_fresh_mean",
}
"""Names of sums as metrics, where the plain name would not say that it is a mean."""
