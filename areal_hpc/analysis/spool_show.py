"""`areal-hpc spool show RUN [TRAJECTORY]`: one trajectory, token by token.

Reads heads until the trajectory is found, then that shard's row, and the journal for what
became of it.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import TextIO

import numpy as np

from areal_hpc.analysis.spool_filter import Filter, Interval
from areal_hpc.analysis.spool_list import report_damage
from areal_hpc.analysis.spool_read import Selected, Spool
from areal_hpc.analysis.spool_text import Decode, pieces, printable
from areal_hpc.config.errors import ConfigError
from areal_hpc.controller.ledger import LedgerError, read_ledger
from areal_hpc.paths import RunPaths
from areal_hpc.plan.tables import Report, Table
from areal_hpc.spool.schema import ShardError
from areal_hpc.spool.shard import read_rows
from areal_hpc.types import Trajectory

MAX_TOKENS = 400
"""Rows of the token table where --tokens does not say which."""


@dataclass(frozen=True)
class Choice:
    """Where a trajectory lies."""

    shard: Selected
    row: int


def find_trajectory(spool: Spool, wanted: str | None, kept: Filter) -> Choice:
    """GROUP.SAMPLE, SHARD:ROW or, for None, the first that `kept` keeps. Raises ConfigError."""
    if wanted is None:
        for shard in spool.walk(kept):
            return Choice(shard, int(shard.rows[0]))
        raise ConfigError(f"no trajectory of {spool.root} passes the filters: areal-hpc spool ls lists what there is")
    name, colon, number = wanted.rpartition(":")
    if colon:
        return _by_shard(spool, wanted, name, number)
    try:
        group, sample = map(int, wanted.split("."))
    except ValueError:
        raise ConfigError(f"TRAJECTORY={wanted!r} is neither GROUP.SAMPLE nor SHARD:ROW, as spool ls --rows shows") from None
    for shard in spool.walk(replace(kept, group=Interval(group, group))):
        for row in shard.rows.tolist():
            if shard.head.trajectories["sample_index"][row] == sample:
                return Choice(shard, row)
    report_damage(spool)
    raise ConfigError(f"TRAJECTORY={wanted} is not in the spool of {spool.root}: areal-hpc spool ls --rows lists it")


def _by_shard(spool: Spool, wanted: str, name: str, number: str) -> Choice:
    fitting = [path for path in spool.shards() if name in (path.name, path.stem, spool.paths.relative(path))]
    if len(fitting) != 1 or not number.isdecimal():
        raise ConfigError(f"TRAJECTORY={wanted!r} names {len(fitting)} shards of {spool.root}: write SHARD:ROW")
    shard = spool.select(fitting[0])
    if shard is None:
        raise ConfigError(f"TRAJECTORY={wanted!r}: " + printable(next(iter(spool.damaged.values()), "it is quarantined")))
    if int(number) >= shard.head.num_rows:
        raise ConfigError(f"TRAJECTORY={wanted!r}: rows of that shard are 0 to {shard.head.num_rows - 1}")
    return Choice(shard, int(number))


def show_trajectory(
    spool: Spool,
    choice: Choice,
    decode: Decode | None,
    *,
    tokens: Interval | None = None,
    as_json: bool = False,
    out: TextIO | None = None,
) -> int:
    """Print it; 1 if its tokens are damaged. decode None: ids only. tokens: positions to show."""
    try:
        [trajectory] = read_rows(choice.shard.path, [choice.row], verify=True)
    except (ShardError, OSError) as error:
        spool.damaged[choice.shard.name] = str(error)
        return report_damage(spool)
    report = Report()
    fate = _fate(spool.paths, trajectory.group_id)
    _describe(report, choice, trajectory, fate)
    texts = pieces(decode, trajectory.tokens.tolist()) if decode else None
    if texts is not None:
        _show_text(report, trajectory, texts)
    _token_table(report, trajectory, texts, tokens)
    report.data |= {
        "tokens": trajectory.tokens.tolist(),
        "texts": texts,
        "loss_mask": trajectory.loss_mask.tolist(),
        "versions": trajectory.versions.tolist(),
        "rollout_logprobs": trajectory.rollout_logprobs.tolist(),
    }
    report.print(out or sys.stdout, as_json=as_json)
    return report_damage(spool)


def _describe(report: Report, choice: Choice, trajectory: Trajectory, fate: str) -> None:
    parts = ", ".join(f"{printable(name)} {value:g}" for name, value in trajectory.reward_parts.items())
    report.line(
        f"trajectory {trajectory.group_id}.{trajectory.sample_index} to prompt {trajectory.prompt_id}: "
        f"reward {trajectory.reward:g}" + (f" ({parts})" if parts else "")
    )
    report.line(
        f"{trajectory.num_tokens:,} tokens, {trajectory.num_loss_tokens:,} of them the policy's; "
        f"ended by {printable(trajectory.finish_reason)}"
    )
    report.line(f"row {choice.row} of {printable(choice.shard.name)}; {fate}")
    trained = trajectory.loss_mask != 0
    if trained.any():
        spans = sorted(Counter(trajectory.versions[trained].tolist()).items())
        logprobs = trajectory.rollout_logprobs[trained]
        lowest = int(np.flatnonzero(trained)[logprobs.argmin()])
        report.line("versions: " + ", ".join(f"{count:,} tokens of version {version}" for version, count in spans))
        report.line(
            f"log-probabilities: mean {logprobs.mean():.4f}, lowest {logprobs.min():.4f} at position {lowest}"
        )
    report.data = {
        "trajectory": f"{trajectory.group_id}.{trajectory.sample_index}", "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index, "prompt_id": trajectory.prompt_id, "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts, "finish_reason": trajectory.finish_reason,
        "shard": choice.shard.name, "row": choice.row, "fate": fate,
    }  # fmt: skip


def _show_text(report: Report, trajectory: Trajectory, texts: list[str]) -> None:
    """The text in stretches of given and of chosen tokens, each line marked by whose it is."""
    edges = np.flatnonzero(np.diff(trajectory.loss_mask)) + 1
    report.line("")
    for start, end in zip([0, *edges.tolist()], [*edges.tolist(), len(texts)], strict=True):
        mark = "policy |" if trajectory.loss_mask[start] else " given |"
        stretch = printable("".join(texts[start:end]), newlines=True)
        for line in stretch.removesuffix("\n").split("\n"):
            report.line(f"{mark} {line}")


def _token_table(
    report: Report, trajectory: Trajectory, texts: list[str] | None, wanted: Interval | None
) -> None:
    positions = np.arange(trajectory.num_tokens)
    shown = positions[wanted.holds(positions)] if wanted else positions[:MAX_TOKENS]
    rows = [
        [str(position), str(trajectory.tokens[position]), printable(texts[position]) if texts is not None else "",
         *((str(trajectory.versions[position]), f"{trajectory.rollout_logprobs[position]:.5f}")
           if trajectory.loss_mask[position] else ("-", "-"))]
        for position in shown.tolist()
    ]  # fmt: skip
    report.table(Table("tokens (those without a version were given)", ["position", "id", "text", "version", "log-prob"], rows))
    if wanted is None and trajectory.num_tokens > MAX_TOKENS:
        report.line(f"... and {trajectory.num_tokens - MAX_TOKENS:,} more tokens: --tokens {MAX_TOKENS}.. shows them")


def _fate(paths: RunPaths, group: int) -> str:
    """What the journal says of a group in the history that survives."""
    fate, trained = "not in the journal", None
    try:
        for record in read_ledger(paths.ledger):
            kind = record["k"]
            if kind == "run" and trained is not None and trained > record["train_step"]:
                # Trained after the checkpoint that this attempt goes on from.
                fate, trained = "committed, waits", None
            elif kind == "committed" and any(entry["group"] == group for entry in record["groups"]):
                fate = "committed, waits"
            elif kind == "consumed" and group in record["groups"]:
                trained = record["train_step"]
                fate = f"trained at step {trained} from version {record['version']}"
            elif kind == "unconsumed" and record["train_step"] == trained:
                fate, trained = "committed, waits", None
            elif kind in ("discarded", "damaged", "dropped") and group in record["groups"]:
                fate, trained = f"{kind}: {printable(record['reason'])}", None
    except LedgerError as error:
        return f"the journal cannot be read: {error}"
    return fate
