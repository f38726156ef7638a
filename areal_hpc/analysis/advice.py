"""Which side holds a run up, and what division of the machine would balance it. Pure.

Both sides are measured while they work: answer tokens per second of generating engines and
of training steps. The slower of the two, at their present size, is the bottleneck.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_hpc.analysis.history import History
from areal_hpc.analysis.records import number
from areal_hpc.analysis.timeline import (
    BETWEEN,
    BOUND,
    EVALUATE,
    GENERATE,
    IDLE,
    SAVE,
    START,
    WEIGHTS,
    Timeline,
)
from areal_hpc.analysis.trained import Trained

BALANCED = 1.15
"""Rates closer than this factor are balanced: batches differ by as much."""
MIN_STEPS = 4


@dataclass(frozen=True)
class Balance:
    """Answer tokens/s that each side could do if it never waited; `ranks` of trainer and rollout."""

    generate: float
    train: float
    trainer_ranks: int
    rollout_ranks: int

    @property
    def slower(self) -> str:
        if self.generate * BALANCED < self.train:
            return "generation"
        return "training" if self.train * BALANCED < self.generate else ""

    @property
    def best_rollout_share(self) -> float:
        """Share of the ranks that should generate, if speed grows with ranks on both sides."""
        per_rollout, per_trainer = self.generate / self.rollout_ranks, self.train / self.trainer_ranks
        return per_trainer / (per_trainer + per_rollout)


def find_balance(history: History, timeline: Timeline, trained: Trained) -> Balance | None:
    """The rates of both sides; None while there are too few steps to tell."""
    steps = [record for record in history.steps.values() if "trainer/seconds" in record]
    rollouts = timeline.of("rollout")
    generating_s = sum(rank.seconds[GENERATE] + rank.seconds[EVALUATE] for rank in rollouts)
    if len(steps) < MIN_STEPS or generating_s <= 0:
        return None
    # The first step of a life warms up.
    seconds = sum(number(record, "trainer/seconds") for record in steps[1:])
    tokens = sum(trained.steps[step].num_answer_tokens for step in list(history.steps)[1:] if step in trained.steps)
    generated = sum(rank.generated_tokens for rank in rollouts)
    if not (seconds > 0 and tokens and generated):
        return None
    num_rollouts = timeline.num_ranks["rollout"]
    return Balance(generated / generating_s * num_rollouts, tokens / seconds,
                   max(1, timeline.num_ranks["trainer"]), num_rollouts)  # fmt: skip


def advise(history: History, timeline: Timeline, balance: Balance | None) -> str:
    """One paragraph of advice in plain words."""
    if balance is None:
        return "The run has too few training steps to tell which side holds it up."
    text = [
        f"While they work, rollouts ({_count(balance.rollout_ranks, 'rank')}) generate {balance.generate:,.0f} answer "
        f"tokens/s and trainers ({_count(balance.trainer_ranks, 'rank')}) train {balance.train:,.0f}."
    ]
    shared = len({rank.host for rank in timeline.ranks}) <= 1
    if not balance.slower:
        text.append("The two sides are balanced: no other division of the machine would be much faster.")
    else:
        text.append(f"{balance.slower.capitalize()} is the bottleneck, by a factor of "
                    f"{max(balance.generate, balance.train) / min(balance.generate, balance.train):.1f}.")  # fmt: skip
        if shared:
            text.append(
                "All ranks share one machine, so that each side's speed also depends on what the other takes of it."
            )
        text.append(_division(history, balance))
    text += _losses(timeline)
    text.append(f"areal-hpc plan CONFIG --from {history.paths.root} predicts the speed of every other division.")
    return " ".join(text)


def _division(history: History, balance: Balance) -> str:
    groups = history.config.groups
    total = balance.trainer_ranks + balance.rollout_ranks
    wanted = min(total - 1, max(1, round(balance.best_rollout_share * total)))
    share = f"{balance.best_rollout_share:.0%} of the ranks should generate"
    if wanted == balance.rollout_ranks:
        return f"By these rates {share}, which with {total} ranks is the division that the run has."
    nodes = groups.trainer.nodes + groups.rollout.nodes
    if nodes > 2:
        per_node = groups.rollout.ranks_per_node
        rollout_nodes = min(nodes - 1, max(1, round(wanted / per_node)))
        return (f"By these rates {share}: of {nodes} nodes, groups.rollout.nodes={rollout_nodes} and "
                f"groups.trainer.nodes={nodes - rollout_nodes} instead of {groups.rollout.nodes} and "
                f"{groups.trainer.nodes}.")  # fmt: skip
    return f"By these rates {share}: about {wanted} of {total}, instead of {balance.rollout_ranks}."


def _losses(timeline: Timeline) -> list[str]:
    """The largest other uses of time, each with the key that changes it."""
    found = []
    trainer, rollout = timeline.share("trainer"), timeline.share("rollout")
    waits = timeline.waits("rollout")
    rollout_s = sum(rank.run_s for rank in timeline.of("rollout")) or 1.0
    trainer_s = sum(rank.run_s for rank in timeline.of("trainer")) or 1.0
    if waits[BOUND] / rollout_s > 0.1:
        found.append(f"Engines were idle for {waits[BOUND] / rollout_s:.0%} of their time because the staleness bound "
                     "was reached (algorithm.max_staleness).")  # fmt: skip
    if timeline.waits("trainer")[BETWEEN] / trainer_s > 0.1:
        found.append(f"Trainers waited for samples for {timeline.waits('trainer')[BETWEEN] / trainer_s:.0%} of their "
                     "time.")  # fmt: skip
    for name, share, key in (
        ("Publishing weights", trainer.get(WEIGHTS, 0.0), "weights.overlap=true trains on meanwhile"),
        ("Saving checkpoints", trainer.get(SAVE, 0.0), "checkpoint.every sets how often"),
        ("Starting up", rollout.get(START, 0.0), "a longer run pays it once"),
    ):
        if share > 0.1:
            found.append(f"{name} took {share:.0%} of the time; {key}.")
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def busy_share(timeline: Timeline, role: str) -> float:
    """Share of a role's run time in which it worked for the result: no waits, no start-up."""
    shares = timeline.share(role)
    return sum(share for name, share in shares.items() if name not in (IDLE, START, WEIGHTS, SAVE))
