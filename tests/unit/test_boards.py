"""Boards beside the run's own files: what they are shown, and that they cannot hurt a run."""

from __future__ import annotations

import json
import sys
import types

import pytest

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import check_config
from areal_hpc.config.schema import Config
from areal_hpc.controller import boards, progress
from areal_hpc.controller.progress import Progress, RankSign
from areal_hpc.paths import RunPaths


class FakeWandb(types.ModuleType):
    """The part of wandb that is called, with its signatures."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.logged: list[tuple[int, dict]] = []
        self.options: dict = {}
        self.finished = False
        self.fails: str = ""

    def Settings(self, **options):  # noqa: N802
        return options

    def init(self, **options):
        self.fail("init")
        json.dumps(options["config"])
        self.options = options
        return self

    def log(self, values, step):
        self.fail("log")
        self.logged.append((step, values))

    def finish(self):
        self.fail("finish")
        self.finished = True

    def fail(self, call: str) -> None:
        if self.fails == call:
            raise RuntimeError("the service is gone")


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(progress, "echo", lambda line: None)
    return fake


def config_with_wandb() -> Config:
    config = Config()
    config.model.path = "m"
    config.data.train.path = "p.jsonl"
    config.run.wandb = True
    return config


def test_off_by_default(tmp_path):
    assert boards.open_boards(Config(), RunPaths(tmp_path)) == [] and "wandb" not in sys.modules


def test_a_missing_package_is_found_with_the_configuration(monkeypatch):
    monkeypatch.setattr("areal_hpc.config.load.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="run.wandb=true"):
        check_config(config_with_wandb())
    monkeypatch.setattr("areal_hpc.config.load.find_spec", lambda name: object())
    check_config(config_with_wandb())


def test_every_step_and_evaluation_is_shown_offline(tmp_path, wandb):
    paths = RunPaths(tmp_path)
    paths.create()
    made = Progress(
        paths, ranks={0: RankSign("controller", "a")}, boards=boards.open_boards(config_with_wandb(), paths)
    )
    assert wandb.options["mode"] == "offline" and wandb.options["dir"] == str(tmp_path)
    assert wandb.options["config"]["run"]["mode"] == "async"
    values = {"train_step": 1, "version": 0, "reward_mean": 0.5, "staleness_mean": 0.0,
              "staleness_max": 0, "wait_s": 0.1}  # fmt: skip
    made.step(values, {"loss": 0.25, "accuracy": 0.5})
    made.evaluation({"train_step": 1, "accuracy": 0.75, "num_prompts": 5, "length_mean": 3.0, "seconds": 1.0})
    made.close()
    assert [step for step, _ in wandb.logged] == [1, 1] and wandb.finished
    assert wandb.logged[0][1]["reward_mean"] == 0.5 and wandb.logged[0][1]["trainer/loss"] == 0.25
    assert wandb.logged[1][1]["eval/accuracy"] == 0.75


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_trouble_ends_the_board_not_the_run(tmp_path, wandb, caplog, call):
    wandb.fails = call
    [board] = boards.open_boards(config_with_wandb(), RunPaths(tmp_path))
    for step in range(3):
        board.scalars({"x": 1.0}, step)
    board.close()
    assert len(caplog.records) == 1 and "wandb stopped" in caplog.text and not wandb.finished


def test_a_package_that_cannot_be_loaded_ends_the_board_only(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    [board] = boards.open_boards(config_with_wandb(), RunPaths(tmp_path))
    board.scalars({"x": 1.0}, 1)
    board.close()
    assert "wandb stopped" in caplog.text


def test_of_a_step_that_is_trained_again_tensorboard_shows_the_later_one(tmp_path, monkeypatch):
    """The second attempt goes on from step 2 and does not come as far as the first."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    paths = RunPaths(tmp_path)
    paths.create()
    monkeypatch.setattr(progress, "echo", lambda line: None)
    base = {"version": 0, "staleness_mean": 0.0, "staleness_max": 0, "wait_s": 0.1}
    for attempt, first, last in ((1, 0, 5), (2, 2, 4)):
        # Attempts begin more than a second apart, by which their files are named.
        monkeypatch.setattr(event_file_writer, "time", types.SimpleNamespace(time=lambda at=attempt: 1e9 + at))
        made = Progress(paths, ranks={})
        made.set_attempt(attempt, first)
        for step in range(first + 1, last + 1):
            made.step({**base, "train_step": step, "reward_mean": float(attempt)}, {"accuracy": 0.5})
        made.evaluation({"train_step": last, "accuracy": attempt / 4, "num_prompts": 5, "length_mean": 3.0,
                         "seconds": 1.0})  # fmt: skip
        made.close()
    board = EventAccumulator(str(paths.tensorboard))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("reward_mean")] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert [(event.step, event.value) for event in board.Scalars("eval/accuracy")] == [(4, 0.5)]


def test_the_real_package_writes_into_the_run_folder(tmp_path):
    pytest.importorskip("wandb")
    [board] = boards.open_boards(config_with_wandb(), RunPaths(tmp_path))
    board.scalars({"reward_mean": 0.5}, 1)
    board.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize("where", ["opening", "writing", "its thread", "closing"])
def test_a_full_disk_ends_tensorboard_not_the_run(tmp_path, monkeypatch, caplog, where):
    from tensorboard.summary.writer import event_file_writer

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    board = boards.TensorBoard(str(tmp_path / "tensorboard"))
    if where != "opening":
        board.scalars({"x": 1.0}, 0)
    if where == "its thread":
        board._writer._async_writer._worker.exception = OSError(28, "No space left on device")
    else:
        name = {"opening": "__init__", "writing": "add_event", "closing": "close"}[where]
        monkeypatch.setattr(event_file_writer.EventFileWriter, name, full)
    for step in range(1, 4):
        board.scalars({"x": 1.0}, step)
    board.close()
    board.close()
    assert [record.getMessage() for record in caplog.records] == [
        "TensorBoard stopped: [Errno 28] No space left on device"
    ]
