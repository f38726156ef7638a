"""`areal-hpc eval`: accuracy of a model on the held-out prompts, without a run."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import msgspec

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.schema import Config


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
    right: dict[int, list[bool]] = defaultdict(list)
    for sample in samples:
        right[sample.prompt_id].append(sample.reward > 0)
    if not right:
        print("no answer could be scored")
        return 1
    k = config.eval.num_samples
    mean = sum(map(sum, right.values())) / sum(map(len, right.values()))
    line = f"mean@{k} {mean:.3f}"
    if k > 1:
        line += f", pass@{k} {sum(map(any, right.values())) / len(right):.3f}"
    print(f"{line} over {len(right)} prompts ({model})")
    return 0
