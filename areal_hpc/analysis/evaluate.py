"""`areal-hpc eval`: accuracy of a model on the held-out prompts, without a run."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.schema import Config
from areal_hpc.rewards.right import PART, describe_evaluation


def evaluate_and_print(config: Config, model: Path, output: str | None) -> int:
    """Answer, score and print; one scored answer a line into `output` if given."""
    if not (config.data.heldout.path or config.data.heldout.task):
        raise ConfigError("data.heldout has neither path nor task; set one")
    from areal_hpc.rollout.evaluate import evaluate

    samples = evaluate(config, model)
    if output:
        with open(output, "w", encoding="utf-8") as stream:
            for sample in samples:
                stream.write(json.dumps(msgspec.to_builtins(sample)) + "\n")
    if not samples:
        print("no answer could be scored")
        return 1
    figures, k = describe_evaluation(config.rewards, samples), config.eval.num_samples
    shown = {f"mean@{k}": figures["accuracy"]}
    # One reward alone would say the same again.
    shown |= {name: value for name, value in figures.items()
              if name.startswith("pass@") or name.startswith(PART) and config.rewards.weights}  # fmt: skip
    line = ", ".join(f"{name} {value:.3f}" for name, value in shown.items())
    print(f"{line} over {figures['num_prompts']:.0f} prompts ({model})")
    return 0
