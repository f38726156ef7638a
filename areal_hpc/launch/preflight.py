"""Finds on the login node what would fail later: model, layout, prompts, run folder.

Called by `run`, `submit` and `check` before anything starts. Every problem is one
ConfigError. Imports neither torch nor MPI; prompts are tokenized with `tokenizers`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from areal_hpc import runlock
from areal_hpc.config.load import ConfigError, config_digest, read_config
from areal_hpc.config.model_rules import check_model, num_experts
from areal_hpc.config.schema import Config, OnExisting
from areal_hpc.data.datasets import PromptSets, load_prompt_sets
from areal_hpc.data.identity import check_prompts
from areal_hpc.launch.checks import check_links
from areal_hpc.launch.status import active_job
from areal_hpc.paths import RunPaths

PROMPT_SAMPLE = 20_000
"""At most this many prompts of a set are tokenized here; the rollouts check every one."""


@dataclass(frozen=True)
class Preflight:
    """What the checks found out, for the lines that `run` and `check` print."""

    model_type: str
    num_parameters: int
    prompts: PromptSets
    longest_prompt: int


def check_files(config: Config) -> Preflight:
    """All checks that read the model and the data. Raises ConfigError."""
    model = read_model_config(config)
    check_model_layout(config, model)
    prompts = load_prompt_sets(config.data)
    longest = check_prompt_lengths(config, prompts)
    return Preflight(str(model.get("model_type")), count_parameters(model), prompts, longest)


def read_model_config(config: Config) -> dict:
    """The config.json of model.path."""
    return read_model_folder(config.model.path, "model.path")


def read_model_folder(path: str, key: str) -> dict:
    """The config.json of a Hugging Face folder with weights; `key`: the configuration's name for it."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{key}={path} is no folder; give a Hugging Face folder")
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{key}={path} has no config.json: not a Hugging Face folder")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{key}={path} has no *.safetensors file")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None


def check_model_layout(config: Config, model: dict) -> None:
    """Refuse a model that trainer or engine cannot compute in the configuration's layout."""
    trainer, split = config.trainer, config.rollout.tensor_parallel
    check_model(
        model, tp=trainer.tp, pp=trainer.pp, dp=trainer.dp, ep=trainer.ep, sequence_parallel=trainer.sequence_parallel
    )
    heads = model["num_attention_heads"]
    groups = model.get("num_key_value_heads") or heads
    if heads % split:
        raise ConfigError(
            f"rollout.tensor_parallel={split} does not divide the model's {heads} attention heads: "
            "change rollout.tensor_parallel"
        )
    if groups % split and split % groups:
        raise ConfigError(
            f"rollout.tensor_parallel={split} and the model's {groups} key-value heads do not divide each other: "
            "change rollout.tensor_parallel"
        )
    limit = model.get("max_position_embeddings")
    if limit and config.model.max_context > limit:
        raise ConfigError(
            f"model.max_context={config.model.max_context} is more than the model's "
            f"max_position_embeddings {limit}: lower model.max_context"
        )


def count_parameters(model: dict) -> int:
    """Parameters of a dense or MoE decoder, from its config.json."""
    hidden, layers = model.get("hidden_size", 0), model.get("num_hidden_layers", 0)
    heads = model.get("num_attention_heads", 1)
    head_dim = model.get("head_dim") or hidden // max(heads, 1)
    kv_heads = model.get("num_key_value_heads") or heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    experts = num_experts(model)
    if experts:
        feed_forward = 3 * hidden * model.get("moe_intermediate_size", 0) * experts + hidden * experts
    else:
        feed_forward = 3 * hidden * model.get("intermediate_size", 0)
    vocabulary = model.get("vocab_size", 0) * hidden * (1 if model.get("tie_word_embeddings") else 2)
    return layers * (attention + feed_forward + 2 * hidden) + vocabulary + hidden


def check_prompt_lengths(config: Config, prompts: PromptSets) -> int:
    """Tokens of the longest prompt; ConfigError if it leaves no room for an answer."""
    file = Path(config.model.tokenizer).expanduser() / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"model.tokenizer={config.model.tokenizer} has no tokenizer.json")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    longest = 0
    room = config.model.max_context - config.rollout.max_new_tokens
    for name, members in (("data.train", prompts.train), ("data.heldout", prompts.heldout)):
        sample = members[:PROMPT_SAMPLE]
        for prompt, encoding in zip(sample, tokenizer.encode_batch([item.text for item in sample])):
            length = len(encoding.ids)
            longest = max(longest, length)
            if length > room:
                raise ConfigError(
                    f"prompt {prompt.prompt_id} of {name} has {length} tokens but model.max_context="
                    f"{config.model.max_context} less rollout.max_new_tokens={config.rollout.max_new_tokens} "
                    f"leaves {room}: raise model.max_context or lower rollout.max_new_tokens"
                )
    return longest


def check_idle(paths: RunPaths, *, take_over: bool) -> None:
    """Raises ConfigError if a run uses the folder now, or its job waits or runs; changes nothing.

    `take_over` takes a folder whose run only looks abandoned, and does not ask for its job.
    """
    runlock.check(paths.lock, take_over=take_over, job_id=os.environ.get("SLURM_JOB_ID", ""))
    job = None if take_over else active_job(paths)
    if job is not None:
        raise ConfigError(
            f"run folder {paths.root} has job {job.job_id}, which is {job.state}: end it first (areal-hpc job stop or "
            "cancel), or set run.take_over=true to start beside it"
        )


def check_run_folder(config: Config, prompts: PromptSets) -> bool:
    """Whether the run folder already holds this run and may be resumed.

    Raises ConfigError when it is in use, when it holds another run, or this one and
    run.on_existing is refuse, or this one with other prompts, and when a link in it leads
    outside.
    """
    from areal_hpc.controller.ledger import last_run

    paths = RunPaths(Path(config.run.folder).expanduser())
    if paths.root.exists() and not paths.root.is_dir():
        raise ConfigError(f"run.folder={config.run.folder} is a file")
    check_idle(paths, take_over=config.run.take_over)
    check_links(paths)
    if not paths.config.exists():
        if paths.root.is_dir() and any(paths.root.iterdir()):
            raise ConfigError(f"run.folder={config.run.folder} is not empty and holds no run; choose another")
        return False
    if config.run.on_existing is not OnExisting.resume:
        raise ConfigError(
            f"run.folder={config.run.folder} already holds a run; choose another run.folder "
            "or continue it with run.on_existing=resume"
        )
    before = read_config(paths.config)
    if before.run.name != config.run.name or before.model.path != config.model.path:
        raise ConfigError(
            f"run.folder={config.run.folder} holds another run ({before.run.name!r} of {before.model.path}, "
            f"digest {config_digest(before)[:12]}); choose another run.folder"
        )
    check_prompts(config, last_run(paths.ledger), prompts)
    return True
