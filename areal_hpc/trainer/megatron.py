"""The trainer's engine: one Megatron-core model with its optimizer, at any TP x PP x DP.

`MegatronTrainer` owns this rank's part of the model and the optimizer. The training step
(`step`), supervised training (`sft`), checkpoints and weight publication call it; all
trainer ranks call the same methods in the same order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from areal_hpc.config.model_rules import check_model
from areal_hpc.config.schema import OptimizerConfig
from areal_hpc.trainer.attention import prepare_local
from areal_hpc.trainer.batch import MicroBatch, Row, pack, unpack
from areal_hpc.trainer.bridge import Exporter, load_weights, make_bridge
from areal_hpc.trainer.logprobs import token_logprobs
from areal_hpc.trainer.model import (
    ModelOptions,
    build_model,
    padded_vocab_size,
    read_hf_config,
    rotary_frequencies,
    transformer_overrides,
    uses_local_layers,
)
from areal_hpc.trainer.objective import LossOutput
from areal_hpc.trainer.optimizer import Updater, UpdateResult
from areal_hpc.trainer.parallel import Place

log = logging.getLogger(__name__)

LossFn = Callable[[MicroBatch, Tensor, Tensor | None], LossOutput]
"""(micro-batch, log-probabilities [T], entropies [T] or None) -> loss; last pipeline stage only."""


@dataclass(frozen=True)
class MinibatchResult:
    """One update. loss, sums and maxima are this rank's (0 and empty where `Place.counts` is False)."""

    loss: float
    sums: dict[str, tuple[float, float]]
    maxima: dict[str, float]
    update: UpdateResult
    phases: dict[str, tuple[float, float]]
    """(start since the epoch, seconds) of `forward_backward` and `optimizer`."""


class MegatronTrainer:
    """One model on all trainer ranks; every method is called by all of them in the same order."""

    tied: bool | None = None
    """Whether input and output embeddings are one; None takes the folder's word."""
    exports = True

    def __init__(
        self,
        place: Place,
        model_path: str | Path,
        options: ModelOptions,
        *,
        temperature: float = 1.0,
        optimizer: OptimizerConfig | None = None,
        total_updates: int = 1,
        updates_per_step: int = 1,
    ) -> None:
        """Build the model and load the folder's weights; without `optimizer` for inference only.

        Raises ConfigError for a model or layout that cannot work.
        """
        self.place, self.options, self.model_path = place, options, Path(model_path)
        self.temperature = temperature
        self.hf = read_hf_config(str(model_path))
        layout = place.layout
        check_model(
            self.hf.to_dict(), tp=layout.tp, pp=layout.pp, dp=layout.dp, ep=layout.ep,
            sequence_parallel=options.sequence_parallel,
        )
        rows = padded_vocab_size(self.hf.vocab_size, options.vocab_divisor, layout.tp)
        self._bridge = make_bridge(self.hf, options.dtype, rows, transformer_overrides(place, options))
        self.config = self._bridge.config
        tied = bool(self.hf.tie_word_embeddings) if self.tied is None else self.tied
        self.module = build_model(self.hf, self.config, place, rows, tied)
        self._replace_head()
        load_weights(self._bridge, self.module, model_path, place)
        self._exporter = Exporter(self._bridge, self.module, place) if self.exports else None
        self._frequencies = rotary_frequencies(self.hf) if uses_local_layers(place.device) else None
        self._places: Tensor | None = None
        # With sequence parallelism the output layer gathers the tokens itself.
        self._selects = place.is_last_stage and not options.sequence_parallel
        if self._selects:
            self.module.output_layer.register_forward_pre_hook(self._select_places)
        model = self.module
        if options.dtype is not torch.float32:
            model = Float16Module(self.config, model)
        self.updater: Updater | None = None
        if optimizer is not None:
            model = DistributedDataParallel(
                self.config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    use_distributed_optimizer=True,
                    overlap_grad_reduce=False,
                    check_for_nan_in_grad=False,
                ),
                model,
            )
            self.updater = Updater(model, optimizer, options.dtype, total_updates, updates_per_step)
            self.config.no_sync_func = model.no_sync
            self.config.grad_scale_func = self.updater.optimizer.scale_loss
            self.config.finalize_model_grads_func = finalize_model_grads
        self.model = model
        self.num_skipped = 0
        """Updates skipped because the gradient was not finite."""

    # ---- computing -----------------------------------------------------------------

    def forward_logprobs(self, rows: Sequence[Row], micro_batches: Sequence[Sequence[int]]) -> dict[int, np.ndarray]:
        """Log-probability of every token with loss_mask of every row under the current weights.

        Row index -> float32 [L], 0 at other tokens; on ranks of the last pipeline
        stage, empty elsewhere. All dp ranks give the same number of micro-batches.
        """
        self.model.eval()
        with torch.no_grad():
            outputs = self._run(rows, micro_batches, (), lambda mb, logprobs, _: (logprobs, None), forward_only=True)
        self.model.train()
        result: dict[int, np.ndarray] = {}
        for micro_batch, logprobs in outputs:
            result |= unpack(micro_batch, logprobs)
        return result

    def train_minibatch(
        self,
        rows: Sequence[Row],
        micro_batches: Sequence[Sequence[int]],
        names: Sequence[str],
        loss_fn: LossFn,
        *,
        entropy: bool = False,
    ) -> MinibatchResult:
        """One optimizer update from this rank's rows.

        `loss_fn` sees the per-token values `names` of each micro-batch; the sum of its losses
        over all micro-batches and dp ranks is what is minimised. All dp ranks give the same
        number of micro-batches (empty ones are fine).
        """
        assert self.updater is not None
        # Megatron divides by the number of micro-batches and its DDP by that of dp ranks.
        scale = len(micro_batches) * self.place.layout.dp

        def loss_of(micro_batch: MicroBatch, logprobs: Tensor, entropies: Tensor | None):
            output = loss_fn(micro_batch, logprobs, entropies)
            return output, output.loss * scale

        began, clock = time.time(), time.perf_counter()
        self.model.zero_grad_buffer()
        self.updater.optimizer.zero_grad()
        outputs = self._run(rows, micro_batches, names, loss_of, forward_only=False, entropy=entropy)
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)  # else the optimizer would seem to take the kernels' time
        computed_s = time.perf_counter() - clock
        update = self.updater.step()
        self.num_skipped += update.skipped
        phases = {
            "forward_backward": (began, computed_s),
            "optimizer": (began + computed_s, time.perf_counter() - clock - computed_s),
        }
        losses = [output for _, output in outputs] if self.place.counts else []
        return MinibatchResult(*_collect(losses), update, phases)

    def _run(self, rows, micro_batches, names, compute, *, forward_only: bool, entropy: bool = False) -> list:
        """Megatron's schedule over the micro-batches; [(micro-batch, first result of compute)]."""
        multiple = self.place.layout.tp if self.options.sequence_parallel else 1
        if not self.place.is_last_stage:
            names = ()  # only the loss reads them, and log-probs exist there only
        packed = (pack(rows, chosen, names, device=self.place.device, multiple=multiple) for chosen in micro_batches)

        def forward_step(batches: Iterator[MicroBatch], model):
            micro_batch = next(batches)
            if self._frequencies is not None:
                prepare_local(micro_batch.params, micro_batch.sizes, self._frequencies, self.options.dtype)
            self._places = micro_batch.places
            logits = model(
                input_ids=micro_batch.tokens[None],
                position_ids=micro_batch.params.positions[None],
                attention_mask=None,
                packed_seq_params=micro_batch.params,
            )

            def finish(logits: Tensor):
                logits = logits[0]
                if not self._selects:
                    logits = logits[micro_batch.places]
                result, loss = compute(micro_batch, *self._token_results(logits, micro_batch, entropy))
                return logits.new_zeros(()) if loss is None else loss, (micro_batch, result)

            return logits, finish

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=packed,
            model=self.model,
            num_microbatches=len(micro_batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _replace_head(self) -> None:
        """For models with another head than the vocabulary."""

    def _token_results(self, outputs: Tensor, micro_batch: MicroBatch, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probability and entropy of each token [T] from the outputs [K, V/tp] at `micro_batch.places`."""
        return token_logprobs(
            outputs, micro_batch.tokens, micro_batch.places, temperature=self.temperature,
            vocab_size=self.hf.vocab_size, tp_rank=self.place.tp_rank,
            group=parallel_state.get_tensor_model_parallel_group(), entropy=entropy,
        )

    def _select_places(self, _module, arguments: tuple) -> tuple:
        """Give the output layer only the positions [K, 1, h] whose logits are wanted."""
        hidden, *rest = arguments
        return hidden.index_select(0, self._places), *rest

    # ---- weights -------------------------------------------------------------------

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight whole, under its Hugging Face name, in the order of `hf_metadata`.

        Holds collectives: all trainer ranks iterate to the end. Tensors may be views of
        live parameters.
        """
        return self._exporter.tensors()

    def hf_metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, type, shape) of every weight; no communication."""
        return self._exporter.metadata()

    def snapshot(self) -> list[Tensor]:
        """A copy of this rank's weights, on the CPU."""
        return [parameter.detach().to("cpu", copy=True) for parameter in self.module.parameters()]

    @contextmanager
    def using(self, snapshot: list[Tensor]) -> Iterator[None]:
        """Compute with other weights for a while; no update may happen inside."""
        current = self.snapshot()
        self._assign(snapshot)
        try:
            yield
        finally:
            self._assign(current)

    def _assign(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.module.parameters(), values, strict=True):
                parameter.copy_(value)


def _collect(outputs: Sequence[LossOutput]) -> tuple[float, dict[str, tuple[float, float]], dict[str, float]]:
    """Loss, sums and maxima of all micro-batches."""
    loss = sum(float(output.loss) for output in outputs)
    sums: dict[str, tuple[float, float]] = {}
    maxima: dict[str, float] = {}
    for output in outputs:
        for name, (total, count) in output.sums.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + float(total), before[1] + float(count))
        for name, value in output.maxima.items():
            maxima[name] = max(maxima.get(name, float("-inf")), float(value))
    return loss, sums, maxima
