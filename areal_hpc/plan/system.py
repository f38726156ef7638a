"""What is simulated, what it costs, and what came out. Read by every module of the plan.

All times are seconds, all lengths tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """What each part costs. `train_tokens_s` is of the whole trainer, the rest of one engine."""

    decode_base_s: float
    decode_seq_s: float
    decode_kv_s: float
    prefill_tokens_s: float
    train_tokens_s: float
    train_step_s: float = 0.0
    """Part of a training step that does not grow with its tokens."""
    stage_s: float = 0.0
    """What the trainer does for a publication before the engines are touched."""
    load_s: float = 0.0
    """Standstill of an engine that receives new weights and loads them."""
    reward_s: float = 0.0
    reward_workers: int = 1
    commit_s: float = 0.0
    """From the last score of a group to its shard being known to the controller."""
    checkpoint_s: float = 0.0


@dataclass(frozen=True)
class System:
    """What is simulated."""

    num_engines: int
    slots: int
    """Sequences that one engine runs at once."""
    group_size: int
    batch_size: int
    """Trajectories of a training step, a multiple of group_size."""
    eta: int
    """Bound of Eq. 3; 0 is the synchronous system."""
    prompt_tokens: int
    rates: Rates
    total_steps: int = 0
    """Nothing is admitted that a run of so many steps does not need; 0 is a run without end."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves none."""
    queue_factor: float = 1.5
    """Sequences granted to an engine over its slots, counted in groups that are not ready yet."""
    bounded: bool = True
    """No batch is formed that would leave a group that could then only be trained older than eta."""
    drain: bool = False
    """Engines finish their answers before they load; else they are interrupted."""
    recompute_kv: bool = True
    resume_together: bool = True
    """Engines that have loaded stand still until all have (else each goes on by itself)."""
    trainer_waits: bool = True
    """The trainer starts no step before all engines serve the version before."""

    @property
    def room(self) -> int:
        """Groups that an engine is given at once."""
        return max(1, int(self.queue_factor * self.slots) // self.group_size)


@dataclass
class Step:
    start: float
    end: float
    tokens: int
    staleness_sum: int
    staleness_max: int


@dataclass
class Result:
    """One simulated run; rates are those after the warm-up."""

    steps: list[Step]
    warmup: int
    batch_size: int
    mean_tokens: float
    """Mean answer that the lengths promise; a short sample's batches may lie above or below."""
    generated_tokens: float
    unused_tokens: float
    """Generated but not trained on: ready, or in answers still being written."""
    trainer_busy: float
    """Fraction of the time in which the trainer computed."""
    rollout_busy: float
    """Fraction of the time in which an engine decoded or prefilled, mean over engines."""
    slots_filled: float
    """Running sequences over all slots, mean over time and engines."""

    @property
    def seconds(self) -> float:
        return self.steps[-1].end

    @property
    def trained_tokens(self) -> int:
        """Answer tokens of all batches."""
        return sum(step.tokens for step in self.steps)

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        counted = self.steps[self.warmup :]
        begin = self.steps[self.warmup - 1].end if self.warmup else 0.0
        return (counted[-1].end - begin) / len(counted)

    @property
    def tokens_per_s(self) -> float:
        counted = self.steps[self.warmup :]
        return sum(step.tokens for step in counted) / len(counted) / self.step_s

    @property
    def staleness_mean(self) -> float:
        counted = self.steps[self.warmup :]
        return sum(step.staleness_sum for step in counted) / (self.batch_size * len(counted))

    @property
    def staleness_max(self) -> int:
        return max(step.staleness_max for step in self.steps)

    def hours(self, total_steps: int) -> float:
        """Of a run of `total_steps`: the simulated steps as they came, the rest at tokens_per_s."""
        done = min(total_steps, len(self.steps))
        trained = sum(step.tokens for step in self.steps[:done])
        left = total_steps * self.batch_size * self.mean_tokens - trained if total_steps > done else 0.0
        return (self.steps[done - 1].end + max(0.0, left) / self.tokens_per_s) / 3600
