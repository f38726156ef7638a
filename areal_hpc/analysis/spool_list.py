"""`areal-hpc spool ls RUN`: the shards of a run, or its trajectories, from the heads alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np

from areal_hpc.analysis.spool_filter import Filter
from areal_hpc.analysis.spool_read import Selected, Spool
from areal_hpc.analysis.spool_text import printable
from areal_hpc.plan.tables import Report, Table

ROW_COLUMNS = (
    ("trajectory", 14), ("prompt", 8), ("reward", 8), ("finish", 8), ("tokens", 7), ("trained", 7), ("versions", 10),
)  # fmt: skip


@dataclass
class Total:
    """Sums over what was listed."""

    shards: int = 0
    trajectories: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    bytes: int = 0
    reward_sum: float = 0.0
    min_version: int | None = None
    max_version: int | None = None

    def add(self, selected: Selected) -> dict[str, Any]:
        """Count one shard; returns what is said of it."""
        table = selected.table
        trained = table[table["num_loss_tokens"] > 0]
        oldest, newest = (
            (int(trained["min_version"].min()), int(trained["max_version"].max())) if len(trained) else (None, None)
        )
        values = {
            "shard": selected.name,
            "digest": selected.digest,
            "writer_rank": selected.head.writer_rank,
            "trajectories": len(table),
            "groups": len(np.unique(table["group_id"])),
            "tokens": int(table["num_tokens"].sum()),
            "trained_tokens": int(table["num_loss_tokens"].sum()),
            "min_version": oldest,
            "max_version": newest,
            "reward_mean": float(table["reward"].mean(dtype=float)),
            "bytes": selected.num_bytes,
        }
        self.shards += 1
        self.reward_sum += float(table["reward"].sum(dtype=float))
        for name in ("trajectories", "tokens", "trained_tokens", "bytes"):
            setattr(self, name, getattr(self, name) + values[name])
        if oldest is not None:
            self.min_version = oldest if self.min_version is None else min(oldest, self.min_version)
            self.max_version = newest if self.max_version is None else max(newest, self.max_version)
        return values

    @property
    def data(self) -> dict[str, Any]:
        mean = self.reward_sum / self.trajectories if self.trajectories else None
        return {name: value for name, value in vars(self).items() if name != "reward_sum"} | {"reward_mean": mean}


def list_shards(spool: Spool, kept: Filter, *, as_json: bool, out: TextIO | None = None) -> int:
    """A row a shard, of the trajectories that are kept; 1 if a shard is damaged, else 0."""
    total = Total()
    shards = [total.add(selected) for selected in spool.walk(kept)]
    report = Report()
    columns = ["shard", "rows", "groups", "tokens", "trained", "versions", "reward", "kB"]
    rows = [
        [printable(values["shard"]), *map(str, (values["trajectories"], values["groups"], values["tokens"])),
         str(values["trained_tokens"]), _range(values), f"{values['reward_mean']:.3f}", f"{values['bytes'] / 1e3:.0f}"]
        for values in shards
    ]  # fmt: skip
    report.table(Table(f"spool of {printable(str(spool.root))}", columns, rows))
    report.line(_summary(spool, total))
    report.data = {
        "run": str(spool.root),
        "shards": shards,
        "total": total.data,
        "quarantined": spool.quarantined(),
        "damaged": spool.damaged,
    }
    report.print(out or sys.stdout, as_json=as_json)
    return report_damage(spool)


def list_rows(spool: Spool, kept: Filter, *, limit: int, as_json: bool, out: TextIO | None = None) -> int:
    """A line a trajectory, at most `limit` (0: all), written while the spool is read."""
    out = out or sys.stdout
    total = Total()
    if as_json:
        print('{"trajectories": [', file=out)
    else:
        print("  ".join(name.rjust(width) for name, width in ROW_COLUMNS) + "  shard:row", file=out)
    separator = ""
    for selected in spool.walk(kept):
        listed = total.trajectories
        total.add(selected)
        for row in row_values(selected, limit - listed if limit else None):
            if as_json:
                out.write(separator + json.dumps(row))
                separator = ",\n"
            else:
                cells = (row["trajectory"], row["prompt_id"], f"{row['reward']:.3f}", printable(row["finish_reason"]),
                         row["tokens"], row["trained_tokens"], _range(row))  # fmt: skip
                line = "  ".join(str(cell).rjust(width) for cell, (_, width) in zip(cells, ROW_COLUMNS, strict=True))
                out.write(f"{line}  {printable(row['shard'])}:{row['row']}\n")
    if as_json:
        rest = {"total": total.data, "quarantined": spool.quarantined(), "damaged": spool.damaged}
        print(f"\n], {json.dumps(rest)[1:]}", file=out)
    else:
        if limit and total.trajectories > limit:
            print(f"... and {total.trajectories - limit:,} more (--limit 0 lists all)", file=out)
        print(_summary(spool, total), file=out)
    return report_damage(spool)


def row_values(selected: Selected, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """What the head says of each kept row, the first `limit` of them."""
    reasons = selected.head.labels.finish_reasons
    rows = selected.rows if limit is None else selected.rows[: max(0, limit)]
    table = selected.head.trajectories[rows]
    columns = [table[name].tolist() for name in table.dtype.names if name != "checksum"]
    for row, *values in zip(rows.tolist(), *columns, strict=True):
        group, prompt, sample, tokens, trained, oldest, newest, reward, reason = values
        yield {
            "trajectory": f"{group}.{sample}", "group_id": group, "sample_index": sample, "prompt_id": prompt,
            "reward": reward, "finish_reason": reasons[reason], "tokens": tokens, "trained_tokens": trained,
            "min_version": oldest if trained else None, "max_version": newest if trained else None,
            "shard": selected.name, "row": row,
        }  # fmt: skip


def report_damage(spool: Spool) -> int:
    """Name every damaged shard on standard error; 1 if there is one."""
    for reason in spool.damaged.values():
        print(f"areal-hpc: {printable(reason)}", file=sys.stderr)
    return 1 if spool.damaged else 0


def _summary(spool: Spool, total: Total) -> str:
    mean = "" if not total.trajectories else f", mean reward {total.reward_sum / total.trajectories:.3f}"
    versions = "" if total.min_version is None else f", versions {_range(total.data)}"
    text = (
        f"{total.trajectories:,} trajectories of {total.tokens:,} tokens in {total.shards:,} shards, "
        f"{total.bytes / 1e6:,.1f} MB{mean}{versions}"
    )
    quarantined = spool.quarantined()
    return text + (f"; {len(quarantined)} shards in quarantine" if quarantined else "")


def _range(values: dict[str, Any]) -> str:
    oldest, newest = values["min_version"], values["max_version"]
    if oldest is None:
        return "-"
    return str(oldest) if oldest == newest else f"{oldest}..{newest}"
