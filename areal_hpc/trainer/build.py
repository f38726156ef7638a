"""Puts the engine and the training step together from the configuration. Called by `loop` and `export`."""

from __future__ import annotations

import torch

from areal_hpc.config.schema import Config
from areal_hpc.paths import RunPaths
from areal_hpc.telemetry import Telemetry
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


def build_engine(config: Config, place: Place) -> MegatronTrainer:
    """The policy with its optimizer, holding the weights of model.path."""
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True)
    return MegatronTrainer(
        place,
        config.model.path,
        model_options(config),
        temperature=config.rollout.temperature,
        optimizer=config.trainer.optimizer,
        total_updates=config.run.total_steps * config.algorithm.minibatches,
        updates_per_step=config.algorithm.minibatches,
    )


def build_step(
    config: Config, place: Place, paths: RunPaths, telemetry: Telemetry
) -> tuple[MegatronTrainer, TrainStep]:
    """Engine and training step. The reference policy of a KL penalty is the starting model."""
    engine = build_engine(config, place)
    reference = engine.snapshot() if config.algorithm.kl_coef else None
    return engine, TrainStep(config, paths, engine, telemetry, reference)
