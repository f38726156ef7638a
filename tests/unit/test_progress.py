"""What a run tells: every figure of a step, files that survive a kill, one status, TensorBoard."""

from __future__ import annotations

import json
import os

import pytest

from areal_hpc import telemetry
from areal_hpc.controller import progress as module
from areal_hpc.controller.batcher import ReadyGroup
from areal_hpc.controller.progress import Progress, RankSign, cut_torn_line, describe_batch
from areal_hpc.durable import DiskFullError
from areal_hpc.messages import RolloutStatus
from areal_hpc.paths import RunPaths
from areal_hpc.types import ShardRow

STEP = {
    "train_step": 3, "version": 2, "epoch": 0, "reward_mean": 0.5, "num_trajectories": 8,
    "staleness_mean": 1.5, "staleness_max": 2, "wait_s": 0.25,
}  # fmt: skip


@pytest.fixture
def lines(monkeypatch):
    printed: list[str] = []
    monkeypatch.setattr(module, "echo", printed.append)
    return printed


@pytest.fixture
def progress(tmp_path, lines):
    paths = RunPaths(tmp_path)
    paths.create()
    made = Progress(paths, ranks={0: RankSign("controller", "a"), 2: RankSign("rollout", "b")})
    yield made
    made.close()


def metrics(progress: Progress) -> list[dict]:
    return [json.loads(line) for line in progress._paths.metrics.read_text().splitlines()]


def test_a_batch_in_numbers():
    def row(version: int, reward: float, trained: int = 4) -> ShardRow:
        return ShardRow(0, 1, 1, 0, 9, trained, version, version, reward, "stop", 0)

    batch = [ReadyGroup(1, 2, "a", (row(5, 1.0), row(3, -0.5))), ReadyGroup(2, 2, "b", (row(5, 0.0), row(-1, 0.5, 0)))]
    assert describe_batch(batch, 5) == {
        "epoch": 2, "reward_mean": 0.25, "num_trajectories": 4,
        "staleness_mean": pytest.approx(2 / 3), "staleness_max": 2,
    }  # fmt: skip


def test_a_step_is_a_record_a_line_and_scalars(progress, lines):
    progress.set_attempt(2)
    progress.step(STEP, {"loss": 0.125, "tokens_per_s": 1234.0, "accuracy": 0.25, "reward.math": 0.75})
    (record,) = metrics(progress)
    assert (record["kind"], record["attempt"], record["trainer/loss"]) == ("step", 2, 0.125)
    assert {key: record[key] for key in STEP} == STEP
    assert (record["accuracy"], record["reward.math"]) == (0.25, 0.75)
    assert len(lines) == 2 and len(lines[0]) == len(lines[1])
    assert lines[1].split()[:4] == ["3", "2", "0.500", "0.250"]
    assert progress._paths.metrics.stat().st_mode & 0o777 == 0o600
    progress.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(progress._paths.tensorboard))
    board.Reload()
    (event,) = board.Scalars("reward_mean")
    assert (event.step, event.value) == (3, 0.5)
    assert {"staleness_max", "trainer/loss", "reward.math"} <= set(board.Tags()["scalars"])


def test_an_evaluation_and_an_event_are_lines_of_their_own(progress, lines):
    values = {"train_step": 0, "version": 0, "seconds": 1.0, "accuracy": 0.4, "num_prompts": 5.0, "length_mean": 7.0}
    progress.evaluation(values)
    progress.evaluation(values | {"train_step": 9, "accuracy": 0.9})
    progress.event("the engine was restarted", cause="test")
    assert [record["kind"] for record in metrics(progress)] == ["eval", "eval", "event"]
    assert lines[0] == "evaluation at step 0: accuracy 0.400 (5 prompts, mean length 7, 1.0 s)"
    assert progress.summary == {"heldout_accuracy": 0.9, "heldout_accuracy_first": 0.4}


def test_generated_tokens_are_counted_over_engine_restarts(progress, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    progress._step_mark = (100.0, 0)
    for tokens in (100, 400, 50, 80):  # the third engine counts from 0 again
        progress.rollout_status(2, RolloutStatus(0, 1, 3, 1, tokens, {"samples": 5.0}))
    now[0] = 110.0
    progress.step(STEP, {"accuracy": 0.5})
    assert metrics(progress)[0]["gen_tokens_per_s"] == pytest.approx(48.0)
    assert progress.ranks[2].details["samples"] == 5.0 and progress.ranks[2].details["running"] == 3


def test_the_status_is_whole_at_any_time_and_written_about_once_a_second(progress, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    asked = []
    for _ in range(50):
        progress.write_status(lambda: asked.append(1) or {"state": "running", "train_step": 4})
        now[0] += 0.1
    assert 4 <= len(asked) <= 6
    progress.heard(2)
    progress.write_status(lambda: {"state": "finished"}, force=True)
    status = json.loads(progress._paths.status.read_text())
    assert status["state"] == "finished" and status["ranks"]["2"]["host"] == "b" and status["ranks"]["2"]["time"] > 0
    assert {"time", "attempt", "pid", "gen_tokens_per_s", "num_running"} <= status.keys()
    assert [file.name for file in progress._paths.root.glob(".status*")] == []


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b""), (b'{"a": 1}\n', b'{"a": 1}\n'), (b'{"a": 1}\n{"b', b'{"a": 1}\n'), (b'{"a', b"")],
)
def test_what_a_killed_writer_left_is_cut(tmp_path, before, after):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before)
    cut_torn_line(path)
    assert path.read_bytes() == after
    cut_torn_line(tmp_path / "none")


def test_a_full_disk_is_named_and_leaves_whole_lines(progress, monkeypatch):
    progress.event("first")

    def fail(descriptor, data):
        os.write(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(telemetry, "write_all", fail)
    with pytest.raises(DiskFullError, match="disk full: writing .* bytes to .*metrics.jsonl"):
        progress.event("second")
    assert [record["text"] for record in metrics(progress)] == ["first"]
