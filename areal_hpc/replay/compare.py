"""A replay beside its run: lines of a table, the summary, and the verdict on the weights.

Read from the two metrics.jsonl files; `rank` adds how far the weights lie apart
(replay.json). Imports nothing heavy: `command` prints with it on a login node.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areal_hpc.paths import RunPaths
from areal_hpc.telemetry import replace_json

COLUMNS = {
    "loss": "trainer/loss",
    "reward": "reward_mean",
    "KL": "trainer/approx_kl",
    "clipped": "trainer/clip_fraction",
    "weight": "trainer/importance_weight_mean",
    "gap": "trainer/behave_gap_fresh_max",
}
"""Column -> key of a step's record."""
WIDTH = 21
HEADER = f"{'step':>6} {'left out':>8} " + " ".join(f"{name:>{WIDTH}}" for name in COLUMNS) + "   (run > replay)"


@dataclass(frozen=True)
class WeightGap:
    """How far two sets of weights lie apart: how many differ, by how much at most, and the
    norm of the difference relative to that of the run's weights."""

    num_unequal: int
    num_weights: int
    largest: float
    relative: float


def step_records(metrics: Path) -> dict[int, dict[str, Any]]:
    """The last record of each training step: a step that was done again counts as it was done last."""
    if not metrics.exists():
        return {}
    found: dict[int, dict[str, Any]] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # a line that a killed writer did not finish
        if record.get("kind") in ("step", "skipped"):  # skipped: a replay left out all of its groups
            found[record["train_step"]] = record
    return found


def line_of(label: object, before: dict[str, Any] | None, after: dict[str, Any]) -> str:
    """One line of the table: each column as `run > replay`, or once where they are equal."""
    cells = [f"{label!s:>6}", f"{after.get('left_out_groups', 0):>8g}"]
    for key in COLUMNS.values():
        old, new = _text((before or {}).get(key)), _text(after.get(key))
        same = before is not None and before.get(key) == after.get(key)
        cells.append(f"{new if same else f'{old} > {new}':>{WIDTH}}")
    return " ".join(cells)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def means(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of every column over the records that have it, and all groups left out."""
    result: dict[str, Any] = {"left_out_groups": sum(record.get("left_out_groups", 0) for record in records)}
    for key in COLUMNS.values():
        values = [record[key] for record in records if key in record and math.isfinite(record[key])]
        if values:
            result[key] = sum(values) / len(values)
    return result


def num_equal_steps(before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]]) -> int:
    """Steps in which every column is the same to the last bit."""
    return sum(
        step in before and all(before[step].get(key) == record.get(key) for key in COLUMNS.values())
        for step, record in after.items()
    )


def write_verdict(target: RunPaths, source: RunPaths, last_step: int, gap: WeightGap | None) -> None:
    """replay.json: what was replayed and how near it came."""
    before, after = step_records(source.metrics), step_records(target.metrics)
    replace_json(
        target.replay,
        {
            "run": str(source.root),
            "train_step": last_step,
            "equal_steps": num_equal_steps(before, after),
            "steps": len(after),
            "run_means": means([before[step] for step in after if step in before]),
            "replay_means": means(list(after.values())),
            "weights": asdict(gap) if gap else None,
        },
    )


def print_comparison(source: RunPaths, target: RunPaths) -> None:
    """The means over all steps, and how far the final weights lie from the run's."""
    verdict = json.loads(target.replay.read_text(encoding="utf-8"))
    print(HEADER)
    print(line_of("mean", verdict["run_means"], verdict["replay_means"]))
    print(f"{verdict['equal_steps']} of {verdict['steps']} steps have the run's values to the last bit")
    if verdict["equal_steps"] < verdict["steps"]:
        print("gap: in a replay whose weights have become others than the run's, the way between the two is part of it")
    gap = verdict["weights"]
    step = verdict["train_step"]
    if gap is None:
        print(f"the run has no checkpoint of step {step}: weights were not compared")
    elif gap["num_unequal"] == 0:
        print(f"weights of step {step}: all {gap['num_weights']} equal, bit for bit")
    else:
        print(
            f"weights of step {step}: {gap['num_unequal']} of {gap['num_weights']} differ, by {gap['largest']:.2e} at "
            f"most; relative distance {gap['relative']:.2e}"
        )
    print(f"replay folder: {target.root}", flush=True)
