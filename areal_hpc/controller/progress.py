"""What a run tells: metrics.jsonl, boards, status.json and a line a step on the terminal.

Owned by the controller's loop, which is the only writer of these files. A resumed run
goes on in the same files; `attempt` tells repeated steps apart.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.controller.batcher import ReadyGroup
from areal_hpc.controller.boards import Board, TensorBoard
from areal_hpc.durable import open_own
from areal_hpc.messages import RolloutStatus
from areal_hpc.paths import RunPaths
from areal_hpc.rewards.right import PART
from areal_hpc.telemetry import append_jsonl, replace_json
from areal_hpc.terminal import echo

STATUS_INTERVAL_S = 1.0
MAX_LINE_BYTES = 1 << 20
HEADER = (
    f"{'step':>6} {'version':>7} {'reward':>7} {'accuracy':>8} {'gen tok/s':>9} {'train tok/s':>11} "
    f"{'staleness':>11} {'wait s':>6} {'gap':>8}"
)


@dataclass
class RankSign:
    """Last sign of life of one rank."""

    role: str
    host: str
    time: float = 0.0
    details: dict[str, float] = field(default_factory=dict)


def describe_batch(batch: list[ReadyGroup], version: int) -> dict[str, Any]:
    """What the groups of a batch trained from `version` say of the step."""
    rows = [row for group in batch for row in group.rows]
    stale = [
        version - row.oldest(group.newest_version) for group in batch for row in group.rows if row.num_loss_tokens
    ] or [0]
    return {
        "epoch": batch[0].epoch,
        "reward_mean": sum(row.reward for row in rows) / len(rows),
        "num_trajectories": len(rows),
        "staleness_mean": sum(stale) / len(stale),
        "staleness_max": max(stale),
    }


def name_metrics(trainer: dict[str, float]) -> dict[str, float]:
    """A step's metrics under their names in its record: those of training begin with trainer/, those of
    the answers (accuracy, each reward) do not."""
    return {
        name if name == "accuracy" or name.startswith(PART) else f"trainer/{name}": value
        for name, value in trainer.items()
    }


def cut_torn_line(path: Path) -> None:
    """Cut what a killed writer left of its last line, so that the next one begins a line."""
    if not path.exists():
        return
    with os.fdopen(open_own(path, os.O_RDWR), "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - MAX_LINE_BYTES)
        file.seek(start)
        tail = file.read()
        if not tail.endswith(b"\n"):
            file.truncate(start + tail.rfind(b"\n") + 1)


def counted_so_far(status: Path) -> Counter[str]:
    """What the attempt that wrote status.json had counted, and those before it; nothing without a readable one."""
    try:
        found = json.loads(status.read_text(encoding="utf-8"))["counters"]
        return Counter({str(name): int(value) for name, value in found.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Counter()


class Progress:
    """Collects rates and writes; knows nothing of decisions."""

    def __init__(self, paths: RunPaths, *, ranks: dict[int, RankSign], boards: Sequence[Board] = ()) -> None:
        """`ranks` by world rank; `boards` are shown the same numbers as TensorBoard."""
        self._paths = paths
        self._attempt = 1
        self._resumed_at: int | None = None
        self.ranks = ranks
        cut_torn_line(paths.metrics)
        self._boards = [TensorBoard(str(paths.tensorboard)), *boards]
        self._generated: dict[int, int] = {}
        self._tokens = 0
        self._rate_mark = (time.monotonic(), 0)
        self._step_mark = (time.monotonic(), 0)
        self._rate = 0.0
        self._next_status = 0.0
        self._lines = 0
        self._started = time.time()
        self.earlier = counted_so_far(paths.status)
        """Faults, refusals and the like that earlier attempts counted."""
        self.summary: dict[str, Any] = {}
        """Latest values for status.json: reward, accuracy, evaluations."""

    def set_attempt(self, attempt: int, train_step: int = 0, earlier: Mapping[str, int] | None = None) -> None:
        """Known once the journal is read. `train_step`: of the checkpoint that it goes on from; `earlier`: what
        the journal says was counted before the last attempt."""
        self._attempt = attempt
        self._resumed_at = train_step if attempt > 1 else None
        # Counts only grow, and a machine that went down may have left an older status.json or none.
        self.earlier |= Counter(earlier or {})

    def over_attempts(self, counted: Mapping[str, int]) -> dict[str, int]:
        """The counts of this attempt and of those before."""
        return {name: self.earlier[name] + counted.get(name, 0) for name in {**self.earlier, **counted}}

    # ---- signs of life -----------------------------------------------------------

    def heard(self, world_rank: int, **details: float) -> None:
        sign = self.ranks[world_rank]
        sign.time = time.time()
        sign.details.update(details)

    def rollout_status(self, world_rank: int, status: RolloutStatus) -> None:
        before = self._generated.get(world_rank, 0)
        # An engine that was restarted counts from 0 again.
        self._tokens += status.generated_tokens - (before if status.generated_tokens >= before else 0)
        self._generated[world_rank] = status.generated_tokens
        self.heard(
            world_rank,
            version=status.version,
            running=status.num_running,
            waiting=status.num_waiting,
            generated_tokens=status.generated_tokens,
            **status.counters,
        )

    # ---- records -----------------------------------------------------------------

    def step(self, values: dict[str, Any], trainer: dict[str, float]) -> None:
        """One training step is over. `trainer`: its metrics, `accuracy` among them."""
        now = time.monotonic()
        seconds = max(now - self._step_mark[0], 1e-9)
        gen_rate = (self._tokens - self._step_mark[1]) / seconds
        self._step_mark = (now, self._tokens)
        record = {
            "kind": "step",
            "time": time.time(),
            "attempt": self._attempt,
            **values,
            "step_seconds": seconds,
            "gen_tokens_per_s": gen_rate,
            **name_metrics(trainer),
        }
        self._append(record)
        self._scalars(record, values["train_step"])
        if self._lines % 20 == 0:
            echo(HEADER)
        self._lines += 1
        gap = trainer.get("behave_gap_fresh_max")
        echo(
            f"{values['train_step']:>6} {values['version']:>7} {values['reward_mean']:>7.3f} "
            f"{trainer['accuracy']:>8.3f} {gen_rate:>9.0f} {trainer.get('tokens_per_s', 0.0):>11.0f} "
            f"{values['staleness_mean']:>6.2f}/{values['staleness_max']:<4.0f} {values['wait_s']:>6.1f} "
            f"{'-' if gap is None else format(gap, '8.1e'):>8}"
        )
        self.summary |= {"reward": values["reward_mean"], "accuracy": trainer["accuracy"]}

    def evaluation(self, values: dict[str, Any]) -> None:
        record = {"kind": "eval", "time": time.time(), "attempt": self._attempt, **values}
        self._append(record)
        scalars = {f"eval/{name}": value for name, value in values.items() if isinstance(value, float)}
        self._scalars(scalars, values["train_step"])
        echo(
            f"evaluation at step {values['train_step']}: accuracy {values['accuracy']:.3f} "
            f"({values['num_prompts']:.0f} prompts, mean length {values['length_mean']:.0f}, {values['seconds']:.1f} s)"
        )
        self.summary["heldout_accuracy"] = values["accuracy"]
        self.summary.setdefault("heldout_accuracy_first", values["accuracy"])

    def event(self, text: str, **values: object) -> None:
        """Something worth a line: a restart, a checkpoint, a dropped prompt."""
        self._append({"kind": "event", "time": time.time(), "attempt": self._attempt, "text": text, **values})
        echo(text)

    def _append(self, record: dict[str, Any]) -> None:
        """Raises DiskFullError naming the file and the bytes missing."""
        append_jsonl(self._paths.metrics, record)

    def _scalars(self, record: dict[str, Any], step: int) -> None:
        if self._resumed_at is not None:
            for board in self._boards:
                board.resume(self._resumed_at + 1)
            self._resumed_at = None
        values = {name: float(value) for name, value in record.items() if isinstance(value, (int, float))}
        for board in self._boards:
            board.scalars(values, step)

    # ---- status ------------------------------------------------------------------

    def write_status(self, values: Callable[[], dict[str, Any]], *, force: bool = False) -> None:
        """Replace status.json about once a second; `values` is asked only then."""
        now = time.monotonic()
        if now < self._next_status and not force:
            return
        self._next_status = now + STATUS_INTERVAL_S
        if now - self._rate_mark[0] >= 2.0:
            self._rate = (self._tokens - self._rate_mark[1]) / (now - self._rate_mark[0])
            self._rate_mark = (now, self._tokens)
        replace_json(
            self._paths.status,
            {
                "time": time.time(),
                "started": self._started,
                "attempt": self._attempt,
                "pid": os.getpid(),
                "job_id": os.environ.get("SLURM_JOB_ID", ""),
                "gen_tokens_per_s": self._rate,
                "num_running": int(sum(sign.details.get("running", 0) for sign in self.ranks.values())),
                "counters": dict(self.earlier),
                **self.summary,
                **values(),
                "ranks": {
                    str(rank): {"role": sign.role, "host": sign.host, "time": sign.time, **sign.details}
                    for rank, sign in self.ranks.items()
                },
            },
        )

    def close(self) -> None:
        for board in self._boards:
            board.close()
