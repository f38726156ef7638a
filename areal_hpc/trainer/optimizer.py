"""Megatron's distributed optimizer, its schedule, and the step that refuses bad gradients.

Built and called by `megatron`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from areal_hpc.config.schema import OptimizerConfig


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer update. `skipped`: the gradient was not finite, nothing changed."""

    grad_norm: float
    lr: float
    skipped: bool


class Updater:
    """Optimizer and learning-rate schedule of one model; one `step` is one update."""

    def __init__(self, model, config: OptimizerConfig, dtype: torch.dtype, total_updates: int,
                 updates_per_step: int = 1) -> None:
        self._clip = config.clip_grad
        self.optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                bf16=dtype is torch.bfloat16,
                fp16=dtype is torch.float16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
            ),
            [model],
            use_gloo_process_groups=False,
        )
        warmup = config.warmup_steps * updates_per_step
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            # Counted from 1, so that the first update of a warm-up does not have a rate of 0.
            init_lr=config.lr / (warmup + 1) if warmup else 0.0,
            max_lr=config.lr,
            min_lr=config.lr if config.schedule == "constant" else config.min_lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=max(total_updates, warmup + 1),
            lr_decay_style=config.schedule,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=max(total_updates, 1),
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )

    @property
    def loss_scale(self) -> torch.Tensor:
        return self.optimizer.get_loss_scale()

    def step(self) -> UpdateResult:
        """Apply the gradients, or skip on every rank alike if their norm is not finite.

        The norm is summed over all ranks that hold parts of the gradient, so every rank sees
        the same number and decides the same.
        """
        lr = float(self.optimizer.param_groups[0]["lr"])
        overflow = self.optimizer.prepare_grads()
        norm = math.inf if overflow else float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return UpdateResult(norm, lr, skipped=True)
        if self._clip > 0:
            for part in self.optimizer.chained_optimizers:
                parameters = part.get_parameters()
                if parameters:
                    clip_grad_by_total_norm_fp32(parameters, self._clip, norm)
        self.optimizer.step_with_ready_grads()
        self.schedule.step(increment=1)
        return UpdateResult(norm, lr, skipped=False)
