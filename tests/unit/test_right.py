"""What counts as right: accuracy, mean@k and pass@k against figures worked out by hand."""

from __future__ import annotations

import json

import pytest

from areal_hpc.cli import main as cli
from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import check_config, save_config
from areal_hpc.config.schema import Config, RewardsConfig
from areal_hpc.controller.evaluation import Evaluation
from areal_hpc.messages import EvalResult
from areal_hpc.paths import RunPaths
from areal_hpc.rewards.right import describe_answers, describe_evaluation, is_right, right_part
from areal_hpc.types import EvalSample, Prompt
from controller_world import make_config

MATH = {"math": 1.0, "format": 0.1}


def sample(prompt: int, index: int, math: float, form: float) -> EvalSample:
    return EvalSample(prompt, index, math + 0.1 * form, 10 * (index + 1), "stop", 3, "text", {"math": math, "format": form})


# Right: one of three, none, two, all three. Every answer to prompt 1 is wrong and well-formed.
SAMPLES = [
    sample(prompt, index, float(math), float(form))
    for prompt, (rights, forms) in enumerate([((0, 1, 0), (0, 0, 1)), ((0, 0, 0), (1, 1, 1)), ((1, 0, 1), (1, 1, 0)), ((1, 1, 1), (0, 0, 0))])
    for index, (math, form) in enumerate(zip(rights, forms))
]  # fmt: skip
HAND = {
    "accuracy": 6 / 12, "pass@3": 3 / 4, "num_prompts": 4.0, "reward.math": 6 / 12, "reward.format": 6 / 12,
}  # fmt: skip


def test_accuracy_mean_at_k_and_pass_at_k_by_hand():
    assert describe_evaluation(RewardsConfig(weights=MATH), SAMPLES) == pytest.approx(HAND)
    assert describe_evaluation(RewardsConfig(weights=MATH), SAMPLES[::3]) == pytest.approx(
        {"accuracy": 2 / 4, "num_prompts": 4.0, "reward.math": 2 / 4, "reward.format": 2 / 4}
    )
    assert describe_evaluation(RewardsConfig(), []) == {"accuracy": 0.0, "num_prompts": 0.0}


@pytest.mark.parametrize(
    ("rewards", "reward", "parts", "right"),
    [
        (RewardsConfig(), 1.0, {"math": 1.0}, True),
        (RewardsConfig(), 0.0, {"math": 0.0}, False),
        # A wrong answer in the right form; a right one that is too long; a discount for the second try.
        (RewardsConfig(weights={"format": 0.1, "math": 1.0}), 0.1, {"format": 1.0, "math": 0.0}, False),
        (RewardsConfig(weights={"math": 1.0, "length": 0.5}), 0.5, {"math": 1.0, "length": -1.0}, True),
        (RewardsConfig(), 0.9, {"math": 1.0}, True),
        # All but one test passed.
        (RewardsConfig(fn="code"), 0.9, {"code": 0.9}, False),
        (RewardsConfig(weights={"math": 0.1, "format": 1.0}, right_part="math"), 1.0, {"math": 0.0, "format": 1.0}, False),
        # As stored in single precision; a workflow that keeps no parts; rewards from -1 to 1.
        (RewardsConfig(fn="m:f", right_at=0.7), 0.7, {"m:f": 0.699999988079071}, True),
        (RewardsConfig(), 1.0, {}, True),
        (RewardsConfig(fn="m:f"), -1.0, {"m:f": -1.0}, False),
    ],
)  # fmt: skip
def test_what_is_right(rewards, reward, parts, right):
    assert is_right(rewards, reward, parts) is right
    assert describe_answers(rewards, [(reward, parts)])["accuracy"] == right


def test_of_equal_weights_the_first_decides():
    assert right_part(RewardsConfig(weights={"math": 1.0, "code": 1.0})) == "math"


def test_a_part_is_averaged_over_the_answers_that_have_it():
    figures = describe_answers(RewardsConfig(), [(1.0, {"math": 1.0}), (0.0, {"math": 0.0, "format": 0.5}), (0.0, {})])
    assert figures == {"accuracy": 1 / 3, "reward.math": 0.5, "reward.format": 0.5}


def test_an_evaluation_of_a_run(tmp_path):
    config = make_config(tmp_path, rewards__weights=MATH, eval__num_samples=3)
    prompts = [Prompt(number, f"prompt {number}") for number in range(5)]
    evaluation = Evaluation(config, prompts, train_step=2, version=3, first_id=7)
    for request in evaluation.requests:
        asked = {prompt.prompt_id for prompt in request.prompts}
        found = tuple(entry for entry in SAMPLES if entry.prompt_id in asked)
        assert evaluation.receive(EvalResult(request.eval_id, 0, found))
    # Prompt 4 had a gold answer that could not be parsed.
    assert evaluation.finished and evaluation.summary() == pytest.approx(
        HAND | {"reward_mean": 6.6 / 12, "length_mean": 20.0, "truncated_fraction": 0.0, "num_unscored": 1.0}
    )


@pytest.mark.parametrize("is_run", [True, False])
def test_the_eval_command(tmp_path, monkeypatch, capsys, is_run):
    from areal_hpc.rollout import evaluate

    config = make_config(tmp_path, rewards__weights=MATH, eval__num_samples=3, eval__temperature=0.6)
    config.model.path = config.model.tokenizer = "unused"
    save_config(config, tmp_path / "given.yaml")
    paths = RunPaths(tmp_path / "model")
    model = paths.export(12) if is_run else paths.root
    for folder in (model, paths.export(6)) if is_run else (model,):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    command = ["eval", str(tmp_path / "given.yaml"), "--model", str(paths.root), "-o", str(tmp_path / "out.jsonl")]
    if is_run:
        save_config(config, paths.config)
    asked = []
    monkeypatch.setattr(evaluate, "evaluate", lambda config, path: asked.append(path) or SAMPLES)
    assert cli(command) == 0
    assert asked == [model]
    assert capsys.readouterr().out == (
        f"mean@3 0.500, reward.math 0.500, reward.format 0.500, pass@3 0.750 over 4 prompts ({model})\n"
    )
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == 12 and lines[0]["parts"] == {"math": 0.0, "format": 0.0}
    monkeypatch.setattr(evaluate, "evaluate", lambda config, path: [])
    assert cli(command) == 1 and "no answer could be scored" in capsys.readouterr().out
    for folder in paths.root.rglob("config.json"):
        folder.rename(folder.with_suffix(".gone"))
    assert cli(command) == 2
    assert "neither a run nor a Hugging Face folder" in capsys.readouterr().err


def test_figures_that_would_mean_nothing_are_refused():
    config = Config()
    config.model.path = "model"
    config.eval.num_samples = 4
    with pytest.raises(ConfigError, match=r"eval.num_samples=4 with eval.temperature=0 .* set eval.temperature above 0"):
        check_config(config)
    config.eval.temperature = 0.6
    check_config(config)
    config.rewards.right_part = "format"
    with pytest.raises(ConfigError, match=r"rewards.right_part=format is none of this run's rewards \(math\)"):
        check_config(config)
    config.rewards.weights = MATH
    check_config(config)
