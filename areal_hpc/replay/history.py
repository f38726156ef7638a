"""What a run trained on, step by step, from its journal alone. Pure.

Read by `command`, to check that everything is still there, and by every rank, which makes
each step's manifest of it: the very manifest that the run's trainers were sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.changes import describe_changes
from areal_hpc.config.schema import Config
from areal_hpc.controller.batcher import ReadyGroup, make_manifest
from areal_hpc.controller.selection import keep_group
from areal_hpc.controller.surviving import SurvivingVersions
from areal_hpc.types import BatchManifest, ShardRow


TRAINING = ("algorithm.", "trainer.", "model.", "rollout.temperature", "rollout.max_new_tokens", "run.total_steps")
"""Settings on which a training step depends, beside its batch."""


@dataclass(frozen=True)
class RecordedStep:
    """The groups that one step was trained on, in the batch's order."""

    train_step: int
    version: int
    groups: tuple[ReadyGroup, ...]


@dataclass
class History:
    """The steps that survive in the run's last weights; `changes`: step from which on an attempt
    had other settings for training -> these."""

    steps: list[RecordedStep] = field(default_factory=list)
    changes: dict[int, list[str]] = field(default_factory=dict)


def read_history(records: Iterable[dict[str, Any]], last_step: int | None) -> History:
    """The surviving steps up to `last_step`, in order; None: up to the last version that was served.

    What was trained after a checkpoint from which the run then went on again is left out:
    the weights that learnt from it are lost. Raises ValueError if steps are missing.
    """
    history = History()
    committed: dict[int, ReadyGroup] = {}
    surviving = SurvivingVersions()
    steps: dict[int, RecordedStep] = {}
    before: dict[str, Any] = {}
    live = 0
    for record in records:
        surviving.take(record)
        match record["k"]:
            case "run":
                live = record["train_step"]
                steps = {step: entry for step, entry in steps.items() if step <= live}
                after = {key: value for key, value in record.get("settings", {}).items() if key.startswith(TRAINING)}
                if before and before != after:
                    history.changes[record["train_step"]] = describe_changes(before, after)
                before = after
            case "committed":
                for group in record["groups"]:
                    rows = tuple(msgspec.convert(row, ShardRow) for row in group["rows"])
                    committed[group["group"]] = ReadyGroup(group["group"], group["epoch"], record["path"], rows)
            case "consumed":
                chosen = [committed[group] for group in record["groups"]]
                groups = tuple(replace(group, newest_version=surviving.newest(group.path)) for group in chosen)
                steps[record["train_step"]] = RecordedStep(record["train_step"], record["version"], groups)
            case "unconsumed":
                del steps[record["train_step"]]
            case "live":
                live = record["version"]
    last_step = live if last_step is None else last_step
    history.steps = [entry for step, entry in sorted(steps.items()) if step <= last_step]
    found = [entry.train_step for entry in history.steps]
    if found != list(range(1, last_step + 1)):
        raise ValueError(f"the journal tells of {len(found)} steps up to step {last_step}, not of every one of them")
    return history


def select_groups(algorithm: AlgorithmConfig, step: RecordedStep, max_staleness: int | None) -> list[ReadyGroup]:
    """The groups that a run with these options would have trained on at this step.

    Left out are groups whose oldest token is staler than `max_staleness` versions (None: no
    bound) and, with algorithm.dynamic_sampling, groups of equal rewards.
    """
    return [
        group
        for group in step.groups
        if (max_staleness is None or step.version - group.min_version <= max_staleness)
        and keep_group(group.rewards, algorithm)
    ]


def step_manifest(config: Config, step: RecordedStep, groups: list[ReadyGroup]) -> BatchManifest:
    """As the controller makes it; `groups` must not be empty."""
    return make_manifest(groups, train_step=step.train_step, version=step.version, dp=config.trainer.dp)
