"""Each wrong algorithm value is refused by one line that names value, constraint and key."""

from __future__ import annotations

import pytest

from areal_hpc.config.algorithm import CHOICES
from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import load_config


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: models/tiny}\n")
    return lambda *overrides: load_config(path, overrides)


def refused(load, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("key", CHOICES)
def test_an_unknown_method_is_answered_with_the_valid_ones(load, key):
    message = refused(load, f"algorithm.{key}=nonsense")
    assert f"algorithm.{key}=nonsense" in message
    assert all(choice in message for choice in CHOICES[key])


def test_a_misspelt_method_is_answered_with_the_nearest(load):
    assert "did you mean grpo?" in refused(load, "algorithm.advantage=gprpo")


@pytest.mark.parametrize("key", CHOICES)
def test_every_valid_method_is_accepted(load, key):
    for choice in CHOICES[key]:
        config = load(f"algorithm.{key}={choice}", "algorithm.aggregation_norm=256")
        assert getattr(config.algorithm, key) == choice


@pytest.mark.parametrize(
    "override, part",
    [
        ("clip_eps=0", "between 0 and 1"),
        ("clip_eps=1.5", "between 0 and 1"),
        ("clip_eps=nan", "between 0 and 1"),
        ("clip_eps_high=-0.1", "not be negative"),
        ("clip_eps_high=inf", "not be negative"),
        ("dual_clip=0.9", "above 1"),
        ("max_staleness=-1", "not be negative"),
        ("minibatches=0", "at least 1"),
        ("minibatches=65", "trainer.batch_size=64"),
        ("gamma=1.1", "[0, 1]"),
        ("gae_lambda=-0.1", "[0, 1]"),
        ("value_clip=-1", "not be negative"),
        ("kl_coef=-0.1", "not be negative"),
        ("entropy_coef=nan", "not be negative"),
        ("aggregation=constant", "aggregation_norm"),
        ("overlong_buffer=256", "rollout.max_new_tokens=256"),
        ("overlong_penalty=-1", "not be negative"),
        ("dynamic_sampling_max_attempts=0", "at least 1"),
    ],
)
def test_ranges(load, override, part):
    message = refused(load, f"algorithm.{override}")
    assert part in message and "algorithm." in message


@pytest.mark.parametrize(
    "overrides, part",
    [
        (["algorithm.objective=naive", "algorithm.behaviour_weight=mask"], "algorithm.objective=naive"),
        (["algorithm.objective=naive", "algorithm.proximal=interpolate"], "algorithm.objective=naive"),
        (["algorithm.surrogate=cispo", "algorithm.dual_clip=3"], "algorithm.surrogate=cispo"),
        (["algorithm.behaviour_weight=mask", "algorithm.behaviour_floor=3"], "algorithm.behaviour_floor=3"),
        (["rollout.group_size=1"], "algorithm.advantage=grpo"),
        (["rollout.group_size=1", "algorithm.advantage=reinforce", "algorithm.dynamic_sampling=true"],
         "algorithm.dynamic_sampling"),
    ],
)
def test_contradictions(load, overrides, part):
    assert part in refused(load, *overrides)


def test_a_group_of_one_suits_reinforce(load):
    assert load("rollout.group_size=1", "algorithm.advantage=reinforce").rollout.group_size == 1
