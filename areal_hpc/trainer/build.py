"""Puts the engine and the training step together from the configuration. Called by `loop` and `export`."""

from __future__ import annotations

import dataclasses
import os

import torch

from areal_hpc.config.schema import Config
from areal_hpc.paths import RunPaths
from areal_hpc.telemetry import Telemetry
from areal_hpc.trainer.critic import Critic, ValueModel
from areal_hpc.trainer.megatron import MegatronTrainer
from areal_hpc.trainer.model import ModelOptions
from areal_hpc.trainer.parallel import Place
from areal_hpc.trainer.step import TrainStep


def model_options(config: Config) -> ModelOptions:
    return ModelOptions(
        dtype=getattr(torch, config.model.dtype),
        sequence_parallel=config.trainer.sequence_parallel,
        recompute=config.trainer.recompute,
        vocab_divisor=config.trainer.vocab_divisor,
        deterministic=config.run.deterministic,
    )


def build_engine(config: Config, place: Place, kind: type[MegatronTrainer] = MegatronTrainer) -> MegatronTrainer:
    """A model with its optimizer, holding the weights of model.path."""
    if config.run.deterministic:
        # cuBLAS and NCCL read these when they are first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        torch.use_deterministic_algorithms(True)
    optimizer = config.trainer.optimizer
    if kind is ValueModel and config.trainer.critic_lr:
        optimizer = dataclasses.replace(optimizer, lr=config.trainer.critic_lr, min_lr=0.0)
    return kind(
        place,
        config.model.path,
        model_options(config),
        temperature=config.rollout.temperature,
        optimizer=optimizer,
        total_updates=config.run.total_steps * config.algorithm.minibatches,
        updates_per_step=config.algorithm.minibatches,
    )


def build_step(
    config: Config, place: Place, paths: RunPaths, telemetry: Telemetry
) -> tuple[MegatronTrainer, TrainStep]:
    """Engine and training step. The reference policy of a KL penalty is the starting model."""
    engine = build_engine(config, place)
    reference = engine.snapshot() if config.algorithm.kl_coef else None
    critic = None
    if config.algorithm.advantage == "gae":
        critic = Critic(config.algorithm, build_engine(config, place, ValueModel))
    return engine, TrainStep(config, paths, engine, telemetry, reference, critic)
