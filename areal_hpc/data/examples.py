"""Prompt/response examples for supervised training. Read by `trainer.sft` and checked before the start."""

from __future__ import annotations

import json
from pathlib import Path

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.sft_schema import SftDataConfig
from areal_hpc.data.datasets import load_prompts
from areal_hpc.data.worked import worked_addition


def load_examples(config: SftDataConfig) -> list[tuple[str, str]]:
    """(prompt, response) pairs, those of held-out prompts left out. Raises ConfigError."""
    held = frozenset()
    if config.heldout.path or config.heldout.task:
        held = frozenset(prompt.text for prompt in load_prompts(config.heldout, name="data.heldout"))
    if not config.path:
        rows = worked_addition(config.worked.seed, config.worked.size, held, slips=config.worked.slips)
        return [(row["prompt"], row["response"]) for row in rows]
    examples = [pair for pair in _read(config) if pair[0] not in held]
    if not examples:
        raise ConfigError(f"data.path={config.path} has no example left")
    return examples


def _read(config: SftDataConfig) -> list[tuple[str, str]]:
    path = Path(config.path).expanduser()
    if not path.is_file():
        raise ConfigError(f"data.path={config.path} does not exist or is no file")
    pairs = []
    with open(path, encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                pair = row[config.prompt_column], row[config.response_column]
            except ValueError as error:
                raise ConfigError(f"data.path={config.path}: line {number} is not JSON: {error}") from None
            except (KeyError, TypeError):
                raise ConfigError(
                    f"data.path={config.path}: line {number} has no {config.prompt_column!r} and "
                    f"{config.response_column!r}; set data.prompt_column and data.response_column"
                ) from None
            if not all(isinstance(value, str) and value for value in pair):
                raise ConfigError(f"data.path={config.path}: line {number}: prompt and response must be text")
            pairs.append(pair)
    return pairs
