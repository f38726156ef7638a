"""Rows of a batch packed into the tensors of one micro-batch. Used by `megatron`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal_hpc.trainer.attention import PackedParams, packed_params


@dataclass(frozen=True)
class Row:
    """One sequence: `tokens` int [L] and any number of per-token arrays [L] by name.

    `loss_mask` must be among `values`: tokens without it get no log-probability.
    """

    tokens: np.ndarray
    values: dict[str, np.ndarray]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences one after the other; all per-token tensors have the shape [T].

    `params.cu_seqlens_q` also bounds the filler at the end (one masked sequence), if any.
    """

    tokens: Tensor
    values: dict[str, Tensor]
    params: PackedParams
    places: Tensor
    """Positions whose successor's log-probability is wanted: those before tokens with loss_mask."""
    rows: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """Lengths of all sequences, the filler among them."""
        filler = len(self.tokens) - sum(self.lengths)
        return [*self.lengths, filler] if filler else list(self.lengths)

    @property
    def cu_seqlens(self) -> Tensor:
        return self.params.cu_seqlens_q

    @property
    def loss_mask(self) -> Tensor:
        return self.values["loss_mask"]


def pack(rows: Sequence[Row], chosen: Sequence[int], names: Sequence[str], *, device: torch.device,
         multiple: int = 1) -> MicroBatch:
    """The rows `chosen` as one micro-batch with the per-token values `names`, loss_mask always among them.

    Filler tokens bring the length to a multiple of `multiple` (sequence parallelism) and
    to at least 2; no rows at all give a micro-batch of filler only. The mask of each
    sequence's first token is cleared: nothing predicts it.
    """
    lengths = [rows[index].num_tokens for index in chosen]
    total = sum(lengths)
    filler = -total % multiple
    if total + filler < 2:
        filler += multiple * -(-(2 - total - filler) // multiple)
    pieces = [rows[index].tokens for index in chosen] + [np.zeros(filler, np.int64)]
    tokens = torch.from_numpy(np.concatenate(pieces).astype(np.int64))
    values = {}
    for name in {"loss_mask", *names}:
        kind = np.dtype(bool) if name == "loss_mask" else None
        arrays = [np.asarray(rows[index].values[name]) for index in chosen]
        kind = kind or (arrays[0].dtype if arrays else np.dtype(np.float32))
        values[name] = torch.from_numpy(np.concatenate([*arrays, np.zeros(filler, kind)]).astype(kind))
    sizes = lengths + ([filler] if filler else [])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    values["loss_mask"][torch.from_numpy(starts)] = False
    places = values["loss_mask"].nonzero()[:, 0] - 1
    return MicroBatch(
        tokens=tokens.to(device),
        values={name: value.to(device) for name, value in values.items()},
        params=packed_params(sizes, device),
        places=places.to(device),
        rows=tuple(chosen),
        lengths=tuple(lengths),
    )


def unpack(micro_batch: MicroBatch, values: Tensor) -> dict[int, np.ndarray]:
    """Per-token results [T] back to their rows: index -> array [L] on the CPU."""
    flat = values.detach().float().cpu().numpy()
    result, start = {}, 0
    for index, length in zip(micro_batch.rows, micro_batch.lengths, strict=True):
        result[index] = flat[start : start + length].copy()
        start += length
    return result
