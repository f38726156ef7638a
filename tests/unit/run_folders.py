"""Run folders for the tools that read them: real controller, journal and spool, made-up clocks and ranks.

The controller's world is `controller_world`; what trainers and rollouts would have written of
themselves is written here by the real `Telemetry`, at round times, so that a test can work
out every figure by hand.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from areal_hpc.config.load import save_config
from areal_hpc.controller import loop, progress, shutdown, startup
from areal_hpc.controller.ledger import read_ledger
from areal_hpc.paths import RunPaths
from areal_hpc.telemetry import Telemetry
from controller_world import Crash, Disk, Faults, FakeWorld, make_config

T0 = 1_000_000.0
"""The first life begins here."""
STEP_S = 10.0
"""A training step: 2 s wait, then 6 s log-probs and update, 1 s publication, 1 s wait."""


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waits and no syncs: a whole run takes a second."""
    monkeypatch.setattr(progress, "echo", lambda line: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for module, name in ((loop, "IDLE_S"), (shutdown, "POLL_S"), (startup, "POLL_S")):
        monkeypatch.setattr(module, name, 0.0)


def make_run(
    folder: Path, *, crash_at: int = -1, seed: int = 0, disk: Disk | None = None, faults: Faults | None = None,
    **changes: object,
) -> FakeWorld:  # fmt: skip
    """One attempt at the run in folder/run; with `crash_at` its controller dies at that turn."""
    config = make_config(folder, **changes)
    config.model.path = config.model.tokenizer = "model"
    paths = RunPaths(folder / "run")
    paths.create()
    save_config(config, paths.config)
    world = FakeWorld(config, paths, disk or Disk(), seed, faults or Faults(crash_at=crash_at))
    if crash_at >= 0:
        with pytest.raises(Crash):
            world.run()
    else:
        world.run()
    return world


def set_times(paths: RunPaths, lives: list[tuple[float, int]]) -> None:
    """Give metrics, journal and controller round times. lives: (begin, first step) of each attempt."""
    records = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    for record in records:
        begin, first = lives[record["attempt"] - 1]
        record["time"] = begin + 5.0 + (record.get("train_step", first) - first) * STEP_S
    paths.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    path = paths.spans("controller", 0)
    path.write_text("".join(
        json.dumps({"t": begin, "c": "start", "v": number, "role": "controller", "rank": 0, "host": "node0",
                    "cpus": [0], "clock_s": 0.0, "clock_error_s": 0.001}, separators=(",", ":")) + "\n"
        for number, (begin, _) in enumerate(lives, 1)
    ))  # fmt: skip


def write_ranks(paths: RunPaths, life: float = T0, steps: range = range(1, 7), num_rollouts: int = 2) -> None:
    """Telemetry of one trainer and the rollouts of a life: each step as STEP_S says.

    A shard is answered before the first step that trains some of it. Rollout 1 is idle half of every step,
    rollout 0 never.
    """
    with_step = {entry["train_step"]: entry["groups"] for entry in _ledger(paths, "consumed")}
    trainer = Telemetry(paths.spans("trainer", 0))
    _start(trainer, life, "trainer", 0)
    rollouts = [Telemetry(paths.spans("rollout", rank)) for rank in range(num_rollouts)]
    for rank, telemetry in enumerate(rollouts):
        _start(telemetry, life, "rollout", rank)
    shards = {entry["path"]: [group["group"] for group in entry["groups"]] for entry in _ledger(paths, "committed")}
    trained_at = {group: step for step, groups in with_step.items() for group in groups}
    for index, step in enumerate(steps):
        begin = life + 5.0 + index * STEP_S
        trainer.record_span("train.wait", begin, 2.0)
        trainer.record_span("train.logprobs", begin + 2.0, 2.0, train_step=step)
        trainer.record_span("train.forward_backward", begin + 4.0, 3.0, train_step=step)
        trainer.record_span("train.optimizer", begin + 7.0, 1.0, train_step=step)
        trainer.record_span("train.update", begin + 4.0, 4.0, train_step=step)
        trainer.record_span("train.step", begin + 2.0, 6.0, train_step=step, num_tokens=60.0)
        trainer.record_span("weights.publish", begin + 8.0, 1.0, version=step, total_s=1.0, transfer_s=0.75)
        trainer.record_span("train.wait", begin + 9.0, 1.0)
        for rank, telemetry in enumerate(rollouts):
            if rank == 1:
                telemetry.record_span("rollout.idle", begin, 5.0, waiting="lease")
            num_written = 0
            for path, groups in shards.items():
                first = min((trained_at[group] for group in groups if group in trained_at), default=None)
                if first != step or not path.startswith(f"spool/rollout-{rank:05d}"):
                    continue
                for group in groups:
                    telemetry.record_span("reward.score", begin - 3.5, 0.25, prompt=group, num=2, sums={"math": 1.0})
                    telemetry.record_span("rollout.episode", begin - 4.5, 1.25, group=group, attempt=1, tokens=12)
                at = begin - 3.0 + 0.25 * num_written
                num_written += 1
                telemetry.record_span("rollout.spool", at, 0.25, path=path, num_bytes=100, rows=2)
            telemetry.record_span("rollout.update", begin + 8.75, 0.25, version=step, pause_to_resume_s=0.25)
            _value(telemetry, begin + 9.5, "rollout.generated_tokens", 100.0 * (index + 1))
            _value(telemetry, begin + 9.5, "rollout.running", 8, waiting=0)
    for telemetry in (trainer, *rollouts):
        _value(telemetry, life + 5.0 + len(steps) * STEP_S, "alive", 1.0)
        telemetry.close()


def _start(telemetry: Telemetry, time: float, role: str, rank: int) -> None:
    _value(telemetry, time, "start", 1, role=role, rank=rank, host=f"node-{role}-{rank}", cpus=[0, 1],
           clock_s=0.0, clock_error_s=0.001)  # fmt: skip


def _value(telemetry: Telemetry, time: float, name: str, value: float, **attributes: object) -> None:
    telemetry._write({"t": time, "c": name, "v": value, **attributes})


def _ledger(paths: RunPaths, kind: str) -> list[dict]:
    return [record for record in read_ledger(paths.ledger) if record["k"] == kind]
