"""`areal-hpc plan`: what it prints, what it refuses, and that it marks the best split."""

import io
import json
from pathlib import Path

import pytest

from areal_hpc.cli import main
from areal_hpc.config.errors import ConfigError
from areal_hpc.plan.cli import plan_main

CONFIG = """
run: {device: cuda, total_steps: 40}
model: {dtype: bfloat16, max_context: 4096}
rollout: {group_size: 8, max_new_tokens: 3072, max_num_seqs: 64}
trainer: {batch_size: 256, micro_batch_tokens: 8192, dp: 8, recompute: true}
groups:
  trainer: {nodes: 2, ranks_per_node: 4, gpus_per_rank: 1}
  rollout: {nodes: 3, ranks_per_node: 4, gpus_per_rank: 1}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return str(file)


def planned(config_file: str, *overrides: str, code: int = 0, **options) -> dict:
    out = io.StringIO()
    options = {"model_size": "1.5B"} | options
    assert plan_main(config_file, overrides, as_json=True, out=out, **options) == code
    return json.loads(out.getvalue())


def test_every_split_is_simulated_and_the_best_marked(config_file):
    splits = planned(config_file)["splits"]
    assert [(split["trainer_nodes"], split["rollout_nodes"]) for split in splits] == [
        (1, 4),
        (2, 3),
        (3, 2),
        (4, 1),
    ]
    best = [split for split in splits if split["best"]]
    fastest = max(splits, key=lambda split: split["async"]["tokens_per_s"])
    assert best == [fastest]
    assert [split["configured"] for split in splits] == [False, True, False, False]
    for split in splits:
        assert split["async"]["tokens_per_s"] > split["sync"]["tokens_per_s"]
        assert split["sync"]["staleness_max"] == 0 and split["async"]["staleness_max"] <= 4
        # The controller's node is paid for too.
        assert split["async"]["node_hours"] == pytest.approx(6 * split["async"]["hours"])


def test_the_same_plan_twice(config_file):
    assert planned(config_file) == planned(config_file)
    assert planned(config_file) != planned(config_file, "run.seed=7")


def test_hours_are_tokens_over_speed(config_file):
    data = planned(config_file, "run.total_steps=2000")
    split = data["splits"][1]["async"]
    tokens = 2000 * 256 * data["lengths"]["mean"]
    assert split["hours"] * 3600 == pytest.approx(tokens / split["tokens_per_s"], rel=0.03)


def test_sync_mode_has_no_async_columns(config_file):
    assert all("async" not in split for split in planned(config_file, "run.mode=sync")["splits"])


def test_what_does_not_fit_is_said_and_told_by_the_exit_code(config_file):
    data = planned(config_file, code=1, gpu_memory_gib=16)
    assert not data["memory"]["trainer"]["fits"] and data["memory"]["trainer"]["advice"]
    assert all(split["problem"].startswith("trainer does not fit") for split in data["splits"])
    data = planned(config_file, code=1, gpu_memory_gib=16, model_size="14B")
    assert "splits" not in data and "KV cache" in data["memory"]["rollout"]["advice"]


def test_layouts_that_do_not_divide_have_no_result(config_file):
    splits = planned(config_file, "trainer.tp=8", "trainer.dp=1")["splits"]
    assert ["does not divide" in split["problem"] for split in splits] == [True, False, True, False]


def test_mistakes_are_named(config_file, tmp_path):
    for options, words in (
        ({"gpu_memory_gib": 0.0}, "--gpu-memory-gib=0"),
        ({"answer_tokens": 9999.0}, "--answer-tokens=9999"),
        ({"model_size": "2B"}, "--model-size=2B"),
        ({"from_run": str(tmp_path / "no")}, "--from="),
    ):
        with pytest.raises(ConfigError, match=words):
            plan_main(config_file, [], **({"model_size": "1.5B"} | options))


def test_the_command(config_file, capsys):
    command = ["plan", config_file, "--model-size", "1.5B", "--gpu-memory-gib", "80", "run.total_steps=30"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "KV cache" in text and "2 + 3" in text and "configured" in text and "best" in text
    assert "30 steps" in text
    assert main(["plan", config_file, "model.path=/nowhere"]) == 2
    assert "--model-size" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", config_file, "--model-size", "1.5B", "stray"])


def test_on_a_terminal_the_tables_are_drawn(config_file):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    assert plan_main(config_file, ["run.total_steps=10"], model_size="1.5B", out=out) == 0
    assert "│" in out.getvalue() and "best" in out.getvalue()


def test_the_copy_of_overlap_is_shown_and_said(config_file):
    out = io.StringIO()
    plan_main(config_file, ["weights.overlap=true"], model_size="1.5B", gpu_memory_gib=None, answer_tokens=None,
              from_run=None, as_json=False, out=out)  # fmt: skip
    assert "published copy" in out.getvalue() and "weights.overlap publishes from" in out.getvalue()
    parts = planned(config_file, "weights.overlap=true")["memory"]["trainer"]["parts_bytes"]
    assert parts["published copy"] == 2 * planned(config_file)["model"]["parameters"]
