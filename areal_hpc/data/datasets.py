"""Reads prompts from JSONL, Parquet or a reasoning-gym task into `Prompt`s.

Called by the controller (training and held-out sets) and by the CLI's checks. A
prompt_id is the ordinal of the row in its file or task, so that it means the same in
every run over the same data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.config.load import ConfigError
from areal_hpc.config.schema import DataConfig, DatasetConfig
from areal_hpc.types import Prompt


@dataclass(frozen=True)
class PromptSets:
    """Training and held-out prompts; `num_removed` training prompts were also held out."""

    train: list[Prompt]
    heldout: list[Prompt]
    num_removed: int

    @property
    def digest(self) -> str:
        """Sha256 over the training prompts, in order: changes when the data does."""
        return prompts_digest(self.train)


def prompts_digest(prompts: list[Prompt]) -> str:
    state = hashlib.sha256()
    for prompt in prompts:
        state.update(json.dumps([prompt.prompt_id, prompt.text, prompt.gold, prompt.tests]).encode())
    return state.hexdigest()


def load_prompt_sets(config: DataConfig) -> PromptSets:
    """Both sets of a run; a training prompt with the text of a held-out one is left out.

    Raises ConfigError when the training set is missing or empty.
    """
    if not (config.train.path or config.train.task):
        raise ConfigError("data.train has neither path nor task; set one")
    heldout: list[Prompt] = []
    if config.heldout.path or config.heldout.task:
        heldout = load_prompts(config.heldout, name="data.heldout")
    held_texts = {prompt.text for prompt in heldout}
    train = load_prompts(config.train, name="data.train")
    kept = [prompt for prompt in train if prompt.text not in held_texts]
    if not kept:
        raise ConfigError(
            f"data.train has no prompt left after {len(train) - len(kept)} of {len(train)} were found "
            "in data.heldout"
        )
    return PromptSets(kept, heldout, len(train) - len(kept))


def load_prompts(config: DatasetConfig, *, name: str = "data.train") -> list[Prompt]:
    """The prompts of one set, at most `config.size` if that is positive.

    Raises ConfigError naming the file, row or column that does not fit.
    """
    rows = _task_rows(config, name) if config.task else _file_rows(config, name)
    prompts = []
    for ordinal, row in enumerate(rows):
        if config.size and ordinal >= config.size:
            break
        prompts.append(_prompt(config, name, ordinal, row))
    if not prompts:
        raise ConfigError(f"{name}: {config.path or config.task} has no prompts")
    return prompts


def _prompt(config: DatasetConfig, name: str, ordinal: int, row: dict) -> Prompt:
    text = _column(config, name, ordinal, row, config.prompt_column)
    gold = _column(config, name, ordinal, row, config.gold_column) if config.gold_column else ""
    tests = _column(config, name, ordinal, row, config.tests_column) if config.tests_column else ""
    meta = row.get("metadata", "")
    return Prompt(
        prompt_id=ordinal,
        text=config.template.replace("{prompt}", text),
        gold=gold,
        tests=tests,
        meta=meta if isinstance(meta, str) else json.dumps(meta, default=str),
    )


def _column(config: DatasetConfig, name: str, ordinal: int, row: dict, column: str) -> str:
    value: object = row
    for part in column.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ConfigError(
                f"{name}: row {ordinal} of {config.path or config.task} has no column {column!r} "
                f"(it has {', '.join(sorted(map(str, row)))}); "
                f"set {name}.prompt_column, gold_column or tests_column"
            )
        value = value[part]
    return value if isinstance(value, str) else json.dumps(value)


def _task_rows(config: DatasetConfig, name: str) -> Iterator[dict]:
    import difflib
    import warnings

    with warnings.catch_warnings():
        # Python 3.12 and a first compilation complain of code in a package it needs.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    if config.task not in DATASETS:
        near = difflib.get_close_matches(config.task, DATASETS, n=1, cutoff=0.0)
        raise ConfigError(f"{name}.task={config.task!r} is no reasoning-gym task; did you mean {near[0]}?")
    try:
        dataset = reasoning_gym.create_dataset(
            config.task, seed=config.task_seed, size=config.size, **config.task_options
        )
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"{name}.task_options do not fit the task {config.task}: {error}") from None
    return iter(dataset)


def _file_rows(config: DatasetConfig, name: str) -> Iterator[dict]:
    path = Path(config.path).expanduser()
    if not path.is_file():
        raise ConfigError(f"{name}.path={config.path} does not exist or is no file")
    if path.suffix in (".parquet", ".pq"):
        return _parquet_rows(path, name)
    return _jsonl_rows(path, name)


def _parquet_rows(path: Path, name: str) -> Iterator[dict]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{name}.path={path} is not a readable Parquet file: {error}") from None


def _jsonl_rows(path: Path, name: str) -> Iterator[dict]:
    with open(path, encoding="utf-8") as stream:
        try:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ConfigError(f"{name}.path={path}: line {number} is not a JSON object")
                yield row
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name}.path={path}: line {number} is not JSON: {error.msg}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name}.path={path} is not UTF-8 text: {error.reason}") from None
