"""Everything that a report shows of one run, gathered once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from areal_hpc.analysis.advice import advise, find_balance
from areal_hpc.analysis.cost import HOUR_S, Cost, find_cost
from areal_hpc.analysis.history import History, load_history
from areal_hpc.analysis.records import number
from areal_hpc.analysis.samples import Samples, load_samples
from areal_hpc.analysis.timeline import Timeline, load_timeline
from areal_hpc.analysis.trained import StepSums, Trained, load_trained


@dataclass
class RunData:
    """One run; `label` tells it from the other runs of the report."""

    label: str
    history: History
    trained: Trained
    timeline: Timeline
    cost: Cost
    samples: Samples
    slower: str
    """`generation`, `training`, or "" where they are balanced or it cannot be told."""
    advice: str

    @property
    def steps(self) -> list[int]:
        return list(self.history.steps)

    def column(self, name: str) -> list[float]:
        """A field of the step records, NaN where it is missing."""
        return [number(record, name, float("nan")) for record in self.history.steps.values()]

    def sums(self) -> list[StepSums]:
        """The journal's sums of each step, in the order of `steps`; empty sums where it has none."""
        return [self.trained.steps.get(step, StepSums()) for step in self.steps]

    def run_hours(self, records: dict[int, dict]) -> list[float]:
        """Run time at which each record was written, hours."""
        return [self.history.clock.run_s(number(record, "time")) / HOUR_S for record in records.values()]

    @property
    def replaced_s(self) -> float:
        """Seconds that went into steps which were trained again after a restart."""
        return sum(number(record, "step_seconds") for record in self.history.replaced)


def load_run(folder: str | Path, label: str = "") -> RunData:
    """Read a run folder; ConfigError if it is none. Memory is bounded, whatever the length of the run."""
    history = load_history(folder)
    trained = load_trained(history.paths.ledger, max(history.steps, default=0))
    timeline = load_timeline(history)
    balance = find_balance(history, timeline, trained)
    return RunData(
        label or history.name, history, trained, timeline, find_cost(history, timeline),
        load_samples(history, trained), balance.slower if balance else "", advise(history, timeline, balance),
    )  # fmt: skip


def unique_labels(folders: list[str]) -> list[str]:
    """The shortest ends of the paths that tell the folders apart."""
    parts = [Path(folder).resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-count:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{'/'.join(part)} ({index})" for index, part in enumerate(parts, 1)]
