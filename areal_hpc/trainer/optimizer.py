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


INITIAL_LOSS_SCALE = 2.0**16
"""torch.amp's. Megatron's 2**32 overflows in every of the first dozen updates or more: as many are skipped."""


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
        self._rates = {"max_lr": config.lr, "min_lr": config.min_lr}
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
                initial_loss_scale=INITIAL_LOSS_SCALE,
                params_dtype=dtype,
                use_distributed_optimizer=True,
            ),
            [model],
        )
        self._prepare_torch_adam()
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

    def _prepare_torch_adam(self) -> None:
        """With torch's AdamW (no Apex, no Transformer Engine): state from the start, and its step.

        Megatron's checkpoints need the state to exist before the first update, and look
        for "step" among the loaded tensors, where it is not: it stays what it is.
        """
        for part in self.optimizer.chained_optimizers:
            adam = part.optimizer
            if not isinstance(adam, torch.optim.AdamW):
                continue
            for group in adam.param_groups:
                # One pass over memory instead of about ten.
                group["fused"], group["foreach"] = True, False
                for parameter in group["params"]:
                    adam.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
            part._set_main_param_and_optimizer_states = _with_step(part)

    def load(self, optimizer_state: dict, schedule_state: dict) -> None:
        """Restore what a checkpoint holds; learning rates follow this run's configuration."""
        self.optimizer.load_state_dict(optimizer_state)
        for group in self.optimizer.param_groups:
            group.update(self._rates)
        for part in self.optimizer.chained_optimizers:
            if isinstance(part.optimizer, torch.optim.AdamW):
                for state in part.optimizer.state.values():
                    # Megatron loads one tensor for all: each update would count it up many times.
                    state["step"] = state["step"].clone()
        self.schedule.num_steps = 0
        self.schedule.load_state_dict(schedule_state)

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


def _with_step(part):
    assign = part._set_main_param_and_optimizer_states

    def assign_with_step(model_param, tensors):
        group, order = part.model_param_group_index_map[model_param]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
        return assign(model_param, {"step": state["step"], **tensors})

    return assign_with_step
