"""Reads a YAML file and `key=value` overrides into a typed `Config`; refuses what cannot work.

Called by the CLI on the login node and by each rank on the resolved copy. Imports no
torch, mpi4py, h5py or vllm. Every refusal is one ConfigError line: value, constraint,
field to change.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import typing
from importlib.util import find_spec
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_hpc.config.algorithm import check_algorithm
from areal_hpc.config.errors import ConfigError
from areal_hpc.config.schema import Config, Mode
from areal_hpc.durable import write_durably

T = typing.TypeVar("T")
ENGINE_OPTIONS_IN_DETERMINISTIC_RUNS = ("enable_prefix_caching", "enable_chunked_prefill", "max_num_batched_tokens")


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """The configuration in `path` with `key=value` overrides applied, resolved and checked.

    Raises ConfigError for an unreadable file, an unknown key (with the nearest valid
    one), a wrong type, a missing value or a layout that cannot work.
    """
    config = read_config(path, overrides)
    check_config(config)
    return config


def read_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """As `load_config` without the cross-key checks."""
    return merge_config(Config, path, overrides)


def merge_config(schema: type[T], path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> T:
    """A YAML file and overrides as an instance of the dataclass `schema`."""
    try:
        given = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist") from None
    except IsADirectoryError:
        raise ConfigError(f"configuration file {path} is a folder") from None
    except Exception as error:  # OmegaConf passes YAML's own exceptions through
        raise ConfigError(f"configuration file {path} is not readable YAML: {_one_line(error)}") from None
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"override {override!r} is not of the form key=value")
    try:
        # `key=` means the empty text, not YAML's null.
        given_here = [f'{override}""' if override.endswith("=") else override for override in overrides]
        merged = OmegaConf.merge(
            OmegaConf.structured(schema), given if given else {}, OmegaConf.from_dotlist(given_here)
        )
        OmegaConf.resolve(merged)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, schema)) from None
    except ValueError as error:
        raise ConfigError(_one_line(error)) from None
    assert isinstance(config, schema)
    return config


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML, private to the user. Raises DiskFullError."""
    write_durably(path, OmegaConf.to_yaml(OmegaConf.structured(config)).encode())


def config_digest(config: Config) -> str:
    """Sha256 of the resolved configuration."""
    return hashlib.sha256(OmegaConf.to_yaml(OmegaConf.structured(config)).encode()).hexdigest()


def valid_keys(schema: type = Config) -> list[str]:
    """Every dotted key of a schema."""

    def walk(node: type, prefix: str) -> list[str]:
        keys = []
        hints = typing.get_type_hints(node)
        for entry in dataclasses.fields(node):
            keys.append(prefix + entry.name)
            if dataclasses.is_dataclass(hints[entry.name]):
                keys += walk(hints[entry.name], f"{prefix}{entry.name}.")
        return keys

    return walk(schema, "")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _explain(error: OmegaConfBaseException, schema: type) -> str:
    key = getattr(error, "full_key", None) or ""
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "not in" in message or "not a valid" in message.lower() and "attribute" in message.lower():
        near = difflib.get_close_matches(key, valid_keys(schema), n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"unknown key {key}{hint}"
    if "Missing mandatory value" in message:
        return f"{key} has no value; set it in the configuration or as {key}=VALUE"
    return f"{key}: {message}" if key else message


def check_config(config: Config) -> None:
    """Refuse layouts that cannot work; needs no file but the configuration."""
    trainer, rollout, groups = config.trainer, config.rollout, config.groups
    _positive(
        {
            "run.total_steps": config.run.total_steps,
            "trainer.tp": trainer.tp,
            "trainer.pp": trainer.pp,
            "trainer.dp": trainer.dp,
            "trainer.ep": trainer.ep,
            "trainer.batch_size": trainer.batch_size,
            "trainer.micro_batch_tokens": trainer.micro_batch_tokens,
            "trainer.min_micro_batches": trainer.min_micro_batches,
            "trainer.vocab_divisor": trainer.vocab_divisor,
            "rollout.group_size": rollout.group_size,
            "rollout.max_new_tokens": rollout.max_new_tokens,
            "rollout.max_num_seqs": rollout.max_num_seqs,
            "rollout.tensor_parallel": rollout.tensor_parallel,
            "rewards.workers": config.rewards.workers,
            "eval.num_samples": config.eval.num_samples,
            "checkpoint.keep_last": config.checkpoint.keep_last,
            "groups.trainer.nodes": groups.trainer.nodes,
            "groups.rollout.nodes": groups.rollout.nodes,
        }
    )
    if groups.controller.ranks != 1:
        raise ConfigError(
            f"groups.controller has {groups.controller.ranks} ranks; the controller is one rank: "
            "set groups.controller.nodes=1 and ranks_per_node=1"
        )
    if groups.reward.nodes < 0:
        raise ConfigError(
            f"groups.reward.nodes={groups.reward.nodes} must be at least 0 (0: rewards are scored beside the engines)"
        )
    if groups.reward.nodes:
        _positive({"groups.reward.ranks_per_node": groups.reward.ranks_per_node})
    layout = trainer.tp * trainer.pp * trainer.dp
    if layout != groups.trainer.ranks:
        raise ConfigError(
            f"trainer.tp*pp*dp = {trainer.tp}*{trainer.pp}*{trainer.dp} = {layout} does not equal the "
            f"{groups.trainer.ranks} trainer ranks: change trainer.dp or groups.trainer.nodes*ranks_per_node"
        )
    if trainer.batch_size % rollout.group_size:
        raise ConfigError(
            f"trainer.batch_size={trainer.batch_size} is not a multiple of "
            f"rollout.group_size={rollout.group_size}: change trainer.batch_size"
        )
    check_algorithm(config)
    check_trainer(config)
    check_sampling(config)
    check_deterministic(config)
    if rollout.max_new_tokens >= config.model.max_context:
        raise ConfigError(
            f"rollout.max_new_tokens={rollout.max_new_tokens} leaves no room for a prompt in "
            f"model.max_context={config.model.max_context}: lower it or raise model.max_context"
        )
    for name, dataset in (("data.train", config.data.train), ("data.heldout", config.data.heldout)):
        if dataset.path and dataset.task:
            raise ConfigError(f"{name}.path and {name}.task are both set: remove one")
        if dataset.task and dataset.size <= 0:
            raise ConfigError(f"{name}.size={dataset.size}: a generated task needs the number of prompts")
        if "{prompt}" not in dataset.template:
            raise ConfigError(f"{name}.template={dataset.template!r} does not contain {{prompt}}")
    check_rewards(config)
    if config.eval.num_samples > 1 and config.eval.temperature <= 0:
        raise ConfigError(
            f"eval.num_samples={config.eval.num_samples} with eval.temperature={config.eval.temperature:g} gives "
            "every prompt the same answer so many times: set eval.temperature above 0, or eval.num_samples=1"
        )
    if config.run.wandb and find_spec("wandb") is None:
        raise ConfigError("run.wandb=true needs the package wandb, which is not installed: install it, or set false")


def check_rewards(config: Config) -> None:
    """Names, weights and limits of the rewards."""
    from areal_hpc.rewards.registry import reward_specs  # imports no reward

    rewards = config.rewards
    if not rewards.timeout_s > 0:
        raise ConfigError(f"rewards.timeout_s={rewards.timeout_s} must be positive")
    if config.groups.reward.nodes and not rewards.answer_deadline_s > rewards.timeout_s:
        raise ConfigError(
            f"rewards.answer_deadline_s={rewards.answer_deadline_s:g} must be longer than one check may take, "
            f"rewards.timeout_s={rewards.timeout_s:g}: raise rewards.answer_deadline_s"
        )
    if rewards.memory_bytes < 256 * 1024**2:
        raise ConfigError(f"rewards.memory_bytes={rewards.memory_bytes} must be at least 268435456 (256 MiB)")
    try:
        reward_specs(rewards)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if rewards.right_part and rewards.right_part not in (rewards.weights or (rewards.fn,)):
        raise ConfigError(
            f"rewards.right_part={rewards.right_part} is none of this run's rewards "
            f"({', '.join(rewards.weights or [rewards.fn])}): name one of them, or leave it empty"
        )


def check_deterministic(config: Config) -> None:
    """Refuse what makes two runs of one configuration differ, where run.deterministic promises the contrary."""
    if not config.run.deterministic:
        return
    rollout = config.rollout
    refusals = {
        "run.mode=async: which weights answer a prompt depends on time there; set run.mode=sync": (
            config.run.mode is not Mode.sync
        ),
        "algorithm.dynamic_sampling=true: which groups it refuses depends on their arrival; set it to false": (
            config.algorithm.dynamic_sampling
        ),
        "rollout.workflow=python_tool: what a program prints may depend on time; take another workflow": (
            rollout.workflow == "python_tool"
        ),
    }
    for name in ENGINE_OPTIONS_IN_DETERMINISTIC_RUNS:
        why = f"rollout.engine_options.{name}: the run sets it itself; remove it"
        refusals[why] = name in rollout.engine_options
    for why, refused in refusals.items():
        if refused:
            raise ConfigError(f"run.deterministic=true does not go with {why}")


def check_trainer(config: Config) -> None:
    """Refuse trainer settings outside their choices or ranges."""
    trainer, optimizer = config.trainer, config.trainer.optimizer
    choices = {
        "trainer.packing": (trainer.packing, ("balanced", "ffd", "padded")),
        "trainer.optimizer.schedule": (optimizer.schedule, ("constant", "linear", "cosine")),
        "model.dtype": (config.model.dtype, ("float32", "bfloat16", "float16")),
    }
    for key, (value, valid) in choices.items():
        if value not in valid:
            near = difflib.get_close_matches(value, valid, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{key}={value} is not one of {', '.join(valid)}{hint}")
    ranges = {
        "lr": optimizer.lr > 0,
        "beta1": 0 <= optimizer.beta1 < 1,
        "beta2": 0 <= optimizer.beta2 < 1,
        "eps": optimizer.eps > 0,
        "weight_decay": optimizer.weight_decay >= 0,
        "clip_grad": optimizer.clip_grad >= 0,
        "warmup_steps": optimizer.warmup_steps >= 0,
        "min_lr": 0 <= optimizer.min_lr <= optimizer.lr,
    }
    for name, holds in ranges.items():
        if not holds:
            value = getattr(optimizer, name)
            raise ConfigError(f"trainer.optimizer.{name}={value} is out of range: change trainer.optimizer.{name}")
    for name in ("weight_history", "critic_lr"):
        if getattr(trainer, name) < 0:
            raise ConfigError(f"trainer.{name}={getattr(trainer, name)} must not be negative: change trainer.{name}")
    if trainer.sequence_parallel and trainer.tp == 1:
        raise ConfigError("trainer.sequence_parallel=true needs trainer.tp > 1: set it to false")


def check_sampling(config: Config) -> None:
    """Refuse sampling parameters that an engine would refuse, or that leave nothing to learn from."""
    if config.rollout.temperature <= 0:
        raise ConfigError(
            f"rollout.temperature={config.rollout.temperature} must be above 0: training needs a distribution"
        )
    if config.eval.temperature < 0:
        raise ConfigError(f"eval.temperature={config.eval.temperature} must not be negative: 0 is greedy")
    for group, sampling in (("rollout", config.rollout), ("eval", config.eval)):
        if not 0 < sampling.top_p <= 1:
            raise ConfigError(f"{group}.top_p={sampling.top_p} must lie in (0, 1]: 1 turns it off")
        if sampling.top_k < -1:
            raise ConfigError(f"{group}.top_k={sampling.top_k} must be at least 1, or -1 to turn it off")


def training_warnings(config: Config) -> list[str]:
    """What may be wanted but changes what is learnt: `check` and `submit` print it, the run journals it at its start."""
    given = [f"rollout.top_p={config.rollout.top_p:g}"] if config.rollout.top_p < 1 else []
    given += [f"rollout.top_k={config.rollout.top_k}"] if config.rollout.top_k > 0 else []
    if not given:
        return []
    return [
        f"{' and '.join(given)}: importance weights are biased: answers are drawn from the kept tokens alone, with "
        "log-probabilities to match, while the trainer's count every token, so that pi_prox/pi_behav is at most 1 "
        "where both hold the same weights; train with rollout.top_p=1 and rollout.top_k=-1 "
        "(eval.top_p and eval.top_k cut evaluation alone)"
    ]


def _positive(values: dict[str, int]) -> None:
    for key, value in values.items():
        if value < 1:
            raise ConfigError(f"{key}={value} must be at least 1")
