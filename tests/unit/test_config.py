"""Configuration: overrides, refusals with the field to change, every shipped file parses."""

import dataclasses
from pathlib import Path

import pytest

from areal_hpc.config import ConfigError, load_config, save_config
from areal_hpc.config.load import config_digest, valid_keys

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text("model: {path: some/model}\n")
    return file


def test_overrides_replace_the_files_values(minimal):
    config = load_config(minimal, ["run.mode=sync", "trainer.optimizer.lr=3e-4", "rollout.stop=[a,b]"])
    assert config.run.mode.value == "sync"
    assert config.trainer.optimizer.lr == 3e-4
    assert config.rollout.stop == ["a", "b"]
    assert config.model.tokenizer == "some/model"


def test_an_override_without_a_value_is_the_empty_text(minimal):
    assert load_config(minimal, ["data.train.task=chain_sum", "data.train.size=1"]).data.train.task == "chain_sum"
    assert load_config(minimal, ["data.train.task="]).data.train.task == ""


def test_saved_file_gives_the_same_configuration(minimal, tmp_path):
    config = load_config(minimal, ["run.seed=7"])
    save_config(config, tmp_path / "resolved.yaml")
    again = load_config(tmp_path / "resolved.yaml")
    assert again == config
    assert config_digest(again) == config_digest(config)
    assert (tmp_path / "resolved.yaml").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.totl_steps=3", ["run.totl_steps", "run.total_steps"]),
        ("rollot.group_size=3", ["rollot", "rollout"]),
        ("trainer.optimizer.learning_rate=1", ["trainer.optimizer.learning_rate"]),
        ("trainer.tp=two", ["trainer.tp", "two"]),
        ("run.mode=fast", ["run.mode", "fast", "async, sync"]),
        ("trainer.tp=2", ["tp*pp*dp", "2*1*1 = 2", "1 trainer ranks", "groups.trainer"]),
        ("trainer.batch_size=20", ["trainer.batch_size=20", "rollout.group_size=8"]),
        ("groups.controller.nodes=2", ["groups.controller", "one rank"]),
        ("algorithm.max_staleness=-1", ["algorithm.max_staleness=-1"]),
        ("rollout.max_new_tokens=2048", ["rollout.max_new_tokens=2048", "model.max_context"]),
        ("run.total_steps=0", ["run.total_steps=0", "at least 1"]),
        ("data.train.template=hello", ["data.train.template", "{prompt}"]),
        ("no_equals_sign", ["no_equals_sign", "key=value"]),
    ],
)
def test_a_mistake_is_one_line_that_names_the_field(minimal, override, words):
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, [override])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_missing_model_path_is_named(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("run: {seed: 1}\n")
    with pytest.raises(ConfigError, match="model.* has no value; set it"):
        load_config(file)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("run: [unclosed\n")
    with pytest.raises(ConfigError, match="broken.yaml is not readable YAML"):
        load_config(broken)


def test_valid_keys_cover_nested_groups():
    keys = valid_keys()
    assert {"run.seed", "trainer.optimizer.lr", "groups.rollout.nodes", "data.train.path"} <= set(keys)
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.name)
def test_every_shipped_config_parses(file):
    if "sft" in file.name:
        pytest.skip("read by its own schema, see test_sft_config.py")
    config = load_config(file)
    assert dataclasses.is_dataclass(config)
