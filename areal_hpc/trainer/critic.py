"""PPO's critic: a second model with a value head, and what the training step asks of it.

Built by `build` where algorithm.advantage is `gae`. The critic starts from the policy's
folder with a head of zeros, has its own optimizer and lies in the same layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.trainer.batch import MicroBatch
from areal_hpc.trainer.gae import gae, moments, normalise, reward_at_last_token, value_loss
from areal_hpc.trainer.megatron import MegatronTrainer, MinibatchResult
from areal_hpc.trainer.objective import LossOutput

if TYPE_CHECKING:
    from areal_hpc.trainer.plan import Share, StepPlan
    from areal_hpc.trainer.step import Batch


class ValueHead(torch.nn.Module):
    """Takes the place of the output layer: hidden states [T, 1, h] -> values [T, 1, 1]."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self._sequence_parallel = sequence_parallel

    def forward(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None):
        if self._sequence_parallel:
            # Every rank goes on with all tokens and the same numbers.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden @ self.weight.t(), None


class ValueModel(MegatronTrainer):
    """A trainer whose per-token result is a value: that of the text before the token."""

    tied = False
    exports = False

    def _replace_head(self) -> None:
        if self.place.is_last_stage:
            head = ValueHead(self.hf.hidden_size, self.options.dtype, self.options.sequence_parallel)
            self.module.output_layer = head.to(self.place.device)

    def _token_results(self, outputs: Tensor, micro_batch: MicroBatch, entropy: bool) -> tuple[Tensor, None]:
        empty = outputs.new_zeros(micro_batch.tokens.shape, dtype=torch.float32)
        return empty.index_copy(0, micro_batch.places + 1, outputs[:, 0].float()), None


class Critic:
    """Advantages of a step from the critic's values, and the critic's own updates."""

    def __init__(self, algorithm: AlgorithmConfig, engine: ValueModel) -> None:
        self._algorithm = algorithm
        self.engine = engine

    def estimate(self, batch: Batch, plan: StepPlan, rewards: np.ndarray) -> None:
        """Put "values", "returns" and normalised "advantages" into this rank's rows.

        rewards [R] of the whole batch. Only ranks of the last pipeline stage hold values. A rank
        without rows (fewer rows in a minibatch than dp ranks) takes part in the sum all the same.
        """
        found = self.engine.forward_logprobs(batch.rows, plan.whole.micro_batches)
        if not self.engine.place.is_last_stage:
            return
        chosen = sorted(found)
        lengths = [batch.rows[index].num_tokens for index in chosen]
        cu_seqlens = torch.tensor(np.cumsum([0, *lengths]))
        flat = {
            "values": torch.from_numpy(np.concatenate([found[index] for index in chosen] or [np.zeros(0, "f4")])),
            "mask": torch.from_numpy(np.concatenate([batch.masks[index] for index in chosen] or [np.zeros(0, bool)])),
        }
        per_token = reward_at_last_token(torch.from_numpy(rewards[chosen]), flat["mask"], cu_seqlens)
        advantages, returns = gae(self._algorithm, per_token, flat["values"], flat["mask"], cu_seqlens)
        total = moments(advantages, flat["mask"]).to(self.engine.place.device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        advantages = normalise(advantages, flat["mask"], total.cpu())
        columns = {"values": flat["values"], "returns": returns, "advantages": advantages}
        bounds = cu_seqlens.tolist()
        for name, column in columns.items():
            for index, start, end in zip(chosen, bounds[:-1], bounds[1:], strict=True):
                batch.rows[index].values[name] = column[start:end].float().numpy()

    def update(self, batch: Batch, minibatch: tuple[int, ...], share: Share) -> MinibatchResult:
        """One update of the critic."""
        num_tokens = float(sum(int(batch.masks[index].sum()) for index in minibatch)) or 1.0

        def loss(micro_batch: MicroBatch, values: Tensor, _entropy: None) -> LossOutput:
            result = value_loss(
                self._algorithm,
                values=values,
                old_values=micro_batch.values["values"],
                returns=micro_batch.values["returns"],
                loss_mask=micro_batch.loss_mask,
                num_tokens=num_tokens,
            )
            count = micro_batch.loss_mask.sum().float()
            return LossOutput(result, {"value_loss": (result.detach() * num_tokens, count)}, {})

        names = ["loss_mask", "values", "returns"]
        return self.engine.train_minibatch(batch.rows, share.micro_batches, names, loss)
