"""What a replay reads of a run's journal, what it leaves out, and how it tells the difference."""

from __future__ import annotations

import json

import pytest

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import save_config
from areal_hpc.config.schema import Config
from areal_hpc.controller.ledger import Ledger
from areal_hpc.paths import RunPaths
from areal_hpc.replay.command import check_history, replay_config
from areal_hpc.replay.compare import line_of, means, num_equal_steps, step_records
from areal_hpc.replay.history import read_history, select_groups, step_manifest


def run_record(step: int = 0, **settings: object) -> dict:
    settings = {"algorithm.clip_eps": 0.2, "eval.every": 1} | {key.replace("__", "."): settings[key] for key in settings}
    return {"k": "run", "attempt": 1, "train_step": step, "data": "d", "config": "c", "settings": settings}


def committed(group: int, *versions: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> dict:
    rows = [
        {"row": index, "group_id": group, "prompt_id": group, "sample_index": index, "num_tokens": 10 + index,
         "num_loss_tokens": 4, "min_version": version, "max_version": version, "reward": reward,
         "finish_reason": "stop", "checksum": 7}
        for index, (version, reward) in enumerate(zip(versions, rewards, strict=True))
    ]  # fmt: skip
    return {"k": "committed", "path": f"spool/rollout-00000/{group}.h5", "digest": "d",
            "groups": [{"group": group, "epoch": 0, "rows": rows}]}  # fmt: skip


def consumed(step: int, *groups: int) -> dict:
    return {"k": "consumed", "train_step": step, "version": step - 1, "groups": list(groups)}


def test_the_history_is_the_one_that_survives_in_the_last_weights():
    records = [
        run_record(), committed(0, 0, 0), committed(1, 0, 0), committed(2, 1, 1), consumed(1, 0), consumed(2, 1),
        {"k": "unconsumed", "train_step": 2}, consumed(2, 1), consumed(3, 2),
        # Went back to the checkpoint of step 1: the steps after it are trained again, otherwise.
        run_record(1, algorithm__clip_eps=0.3, eval__every=2), consumed(2, 2), consumed(3, 1),
    ]  # fmt: skip
    history = read_history(records, 3)
    assert [(step.train_step, step.version, [group.group_id for group in step.groups]) for step in history.steps] == [
        (1, 0, [0]), (2, 1, [2]), (3, 2, [1]),
    ]  # fmt: skip
    assert history.changes == {1: ["algorithm.clip_eps 0.2 -> 0.3"]}
    assert read_history([run_record(), run_record(0, eval__every=2)], 0).changes == {}
    assert len(read_history(records, 2).steps) == 2


def test_without_a_checkpoint_the_last_version_that_was_served_counts():
    live = [{"k": "live", "version": version} for version in (1, 2)]
    records = [run_record(), committed(0, 0, 0), committed(1, 0, 0), consumed(1, 0), live[0], consumed(2, 1), live[1]]
    assert [step.train_step for step in read_history(records, None).steps] == [1, 2]
    # Begun again from nothing: the steps of before are nobody's.
    assert read_history([*records, run_record()], None).steps == []
    again = read_history([*records, run_record(), consumed(1, 1), live[0], consumed(2, 0)], None)
    assert [(step.train_step, step.groups[0].group_id) for step in again.steps] == [(1, 1)]
    with pytest.raises(ValueError, match="0 steps up to step 2"):
        read_history([*records, run_record()], 2)


def test_a_journal_without_a_step_is_refused():
    with pytest.raises(ValueError, match="1 steps up to step 2"):
        read_history([run_record(), committed(0, 0, 0), consumed(2, 0)], 2)


def test_a_stricter_bound_and_dynamic_sampling_leave_groups_out():
    records = [run_record(), committed(0, 0, 3), committed(1, 2, 3), committed(2, 3, 3, rewards=(1.0, 1.0))]
    records += [consumed(step, step + 10) for step in range(1, 4)] + [consumed(4, 0, 1, 2)]
    records[1:1] = [committed(step + 10, 0, 0) for step in range(1, 4)]
    step = read_history(records, 4).steps[-1]
    config = Config()

    def kept(bound: int | None) -> list[int]:
        return [group.group_id for group in select_groups(config.algorithm, step, bound)]

    assert kept(None) == [0, 1, 2] and kept(3) == [0, 1, 2] and kept(2) == [1, 2] and kept(0) == [2]
    config.algorithm.dynamic_sampling = True
    assert kept(None) == [0, 1]
    manifest = step_manifest(config, step, select_groups(config.algorithm, step, None))
    assert [(row.group_id, row.sample_index) for row in manifest.rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (manifest.train_step, manifest.version) == (4, 3)


@pytest.fixture
def run(tmp_path):
    paths = RunPaths(tmp_path / "run")
    paths.create()
    config = Config()
    (tmp_path / "model").mkdir()
    shape = {"num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 8}
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2", **shape}))
    (tmp_path / "model" / "model.safetensors").touch()
    config.model.path = config.model.tokenizer = str(tmp_path / "model")
    save_config(config, paths.config)
    ledger = Ledger(paths.ledger)
    for record in (run_record(), committed(0, 0, 0), consumed(1, 0), {"k": "live", "version": 1}):
        ledger.add(record.pop("k"), **record)
    ledger.close()
    return paths


def test_the_configuration_is_the_runs_with_the_changes(run):
    config = replay_config(run, "run", ["algorithm.clip_eps=0.1", "trainer.dp=2", "groups.trainer.nodes=2"], None)
    assert config.algorithm.clip_eps == 0.1 and config.trainer.dp == 2
    assert config.run.folder == str(run.root) + "-replay"
    (run.root.parent / "run-replay").mkdir()
    assert replay_config(run, "run", [], None).run.folder == str(run.root) + "-replay-2"


@pytest.mark.parametrize(
    "override", ["rollout.temperature=0.5", "data.shuffle=false", "trainer.batch_size=8", "run.seed=1"]
)
def test_what_was_recorded_cannot_be_changed(run, override):
    with pytest.raises(ConfigError, match="cannot be changed in a replay"):
        replay_config(run, "run", [override], None)


def test_another_layout_must_fit_the_model_and_the_model_be_there(run):
    with pytest.raises(ConfigError, match="trainer.tp=4 does not divide the model's 2 attention heads"):
        replay_config(run, "run", ["trainer.tp=4", "groups.trainer.nodes=4"], None)
    (run.root.parent / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match="not a Hugging Face folder"):
        replay_config(run, "run", [], None)


def test_a_folder_that_is_no_run_a_run_without_a_step_and_a_lost_shard_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match="no run folder"):
        replay_config(RunPaths(tmp_path / "model"), "model", [], None)
    with pytest.raises(ConfigError, match="shard spool/rollout-00000/0.h5, which step 1 was trained on, is gone"):
        check_history(run, "run")
    shard = run.root / "spool/rollout-00000/0.h5"
    shard.parent.mkdir()
    shard.touch()
    assert len(check_history(run, "run").steps) == 1
    run.ledger.unlink()
    with pytest.raises(ConfigError, match="not finished a single training step"):
        check_history(run, "run")


def test_the_table_shows_both_values_only_where_they_differ(tmp_path):
    before = {"kind": "step", "train_step": 1, "reward_mean": 0.5, "trainer/loss": -0.25}
    after = before | {"trainer/loss": -0.5, "left_out_groups": 2}
    line = line_of(1, before, after).split()
    assert line[:2] == ["1", "2"] and "-0.25" in line and "-0.5" in line and line.count("0.5") == 1
    assert num_equal_steps({1: before}, {1: before}) == 1 and num_equal_steps({1: before}, {1: after}) == 0
    assert means([after, {"left_out_groups": 1, "reward_mean": 1.0}]) == {
        "left_out_groups": 3, "reward_mean": 0.75, "trainer/loss": -0.5,
    }  # fmt: skip
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in (before, after)) + "{")
    assert step_records(metrics) == {1: after}
    skipped = {"kind": "skipped", "train_step": 2, "left_out_groups": 8}
    metrics.write_text(json.dumps(skipped) + "\n" + json.dumps({"kind": "eval", "train_step": 3}) + "\n")
    assert step_records(metrics) == {2: skipped}
    assert line_of(2, before, skipped).split()[:2] == ["2", "8"] and "0.5 > -" in line_of(2, before, skipped)
