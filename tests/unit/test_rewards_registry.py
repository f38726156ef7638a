"""Rewards by name and path, their contract, weights and options."""

import pytest

from areal_hpc.config.schema import RewardsConfig
from areal_hpc.rewards import registry
from areal_hpc.rewards.registry import RewardError, call_reward, per_sample, reward_specs
from areal_hpc.rewards.shaping import format_reward, length_reward
from areal_hpc.types import Prompt

PROMPT = Prompt(17, "q")
FOUR = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ([1.0], "1 values for 4 responses"),
        (1.0, "must return a list of 4 numbers"),
        (None, "must return a list of 4 numbers"),
        ("1111", "must return a list of 4 numbers"),
        ([1, 2, float("nan"), 4], "nan for response 2"),
        ([1, 2, 3, float("inf")], "inf for response 3"),
        ([1, "2", 3, 4], "'2' for response 1"),
        ([1, None, 3, 4], "None for response 1"),
        ([[1], [2], [3], [4]], "[1] for response 0"),
    ],
)
def test_wrong_results_name_function_and_prompt(result, said):
    with pytest.raises(RewardError) as error:
        call_reward("mine", lambda prompt, responses: result, PROMPT, FOUR)
    assert "mine" in str(error.value) and "17" in str(error.value) and said in str(error.value)


@pytest.mark.parametrize("kind", [ValueError, SystemExit, ZeroDivisionError])
def test_exceptions_name_function_and_prompt(kind):
    def broken(prompt, responses):
        raise kind("no luck")

    with pytest.raises(RewardError, match=f"mine raised {kind.__name__} on prompt 17: no luck"):
        call_reward("mine", broken, PROMPT, FOUR)


def test_plain_async_and_numpy_results():
    import numpy as np

    async def slow(prompt, responses):
        return [float(len(text)) for text in responses]

    @per_sample
    async def one(prompt, response):
        return np.float32(ord(response))

    assert call_reward("slow", slow, PROMPT, FOUR) == (1.0,) * 4
    assert call_reward("one", one, PROMPT, FOUR) == (97.0, 98.0, 99.0, 100.0)
    assert call_reward("array", lambda p, r: np.arange(4), PROMPT, FOUR) == (0.0, 1.0, 2.0, 3.0)
    assert call_reward("flags", lambda p, r: [True, False, True, False], PROMPT, FOUR) == (1.0, 0.0, 1.0, 0.0)


def test_names_weights_and_options():
    specs = reward_specs(
        RewardsConfig(weights={"math": 1.0, "length": 0.5}, options={"length": {"target": 5}})
    )
    assert [(s.name, s.weight, s.options) for s in specs] == [
        ("math", 1.0, {}),
        ("length", 0.5, {"target": 5}),
    ]
    assert registry.target_of("my_pkg.my_mod:reward") == "my_pkg.my_mod:reward"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (RewardsConfig(fn="mth"), "did you mean math"),
        (RewardsConfig(fn="a:b:c"), "not of the form"),
        (RewardsConfig(fn="os.system"), "is no built-in reward"),
        (RewardsConfig(weights={"math": float("nan")}), "finite"),
        (RewardsConfig(weights={"math": 1.0}, options={"maths": {}}), "none of math"),
        (RewardsConfig(weights={"math": 1.0}, options={"math": 3}), "must be a mapping"),
    ],
)
def test_mistakes_in_the_configuration(config, said):
    with pytest.raises(ValueError, match=said):
        reward_specs(config)


def test_missing_functions_and_options():
    with pytest.raises(RewardError, match="cannot be imported: ModuleNotFoundError"):
        registry.load_reward("no_such_module_here:reward")
    with pytest.raises(RewardError, match="not a function"):
        registry.load_reward("math:pi")
    with pytest.raises(RewardError, match="does not take rewards.options"):
        registry.check_options("length", length_reward, {"goal": 3})


def test_shaping():
    assert length_reward(PROMPT, "x" * 10, target=10, limit=20) == 0.0
    assert length_reward(PROMPT, "x" * 15, target=10, limit=20) == -0.5
    assert length_reward(PROMPT, "x" * 99, target=10, limit=20) == -1.0
    with pytest.raises(ValueError, match="0 <= target < limit"):
        length_reward(PROMPT, "x", target=10, limit=10)
    assert format_reward(PROMPT, r"so \boxed{3}") == 1.0
    assert format_reward(PROMPT, "so 3") == 0.0
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    assert format_reward(PROMPT, "<think>a\nb</think>\n<answer>3</answer>", pattern=pattern) == 1.0
    assert format_reward(PROMPT, "<answer>3</answer>", pattern=pattern) == 0.0
