"""What a publication sends: names, types and shapes, and where each tensor lies in the stream.

`ExportSource` is vLLM's WeightSource over the trainer's two functions. `Layout` cuts the
whole model into one byte stream, so that a chunk may end anywhere inside a tensor: sender
and receiver derive the same layout from the same metadata. Used by trainer ranks and by
vLLM's worker processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

ALIGNMENT = 64
"""Every tensor starts at a multiple of this in the stream, so that it can be viewed in its own type."""

MetadataFn = Callable[[], Sequence[tuple[str, torch.dtype, tuple[int, ...]]]]
TensorsFn = Callable[[], Iterator[tuple[str, torch.Tensor]]]


class ExportSource(WeightSource):
    """The trainer's weights under Hugging Face names; all trainer ranks iterate in lockstep.

    Each call of `tensors_fn` starts a fresh pass that holds collectives: a pass that was
    begun must be run to its end on every rank, whatever became of the transfer. `drain`
    does that; `interrupt` ends another thread's iteration first, so that nothing more is
    sent. After `take_snapshot` passes go over a copy and hold none.
    """

    def __init__(self, metadata_fn: MetadataFn, tensors_fn: TensorsFn) -> None:
        self._metadata_fn = metadata_fn
        self._tensors_fn = tensors_fn
        self._metadata: list[ParamMeta] | None = None
        self._pass: Iterator[tuple[str, torch.Tensor]] | None = None
        self._snapshot: list[tuple[str, torch.Tensor]] | None = None
        self._interrupted = False

    def metadata(self) -> list[ParamMeta]:
        if self._metadata is None:
            self._metadata = [
                ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in self._metadata_fn()
            ]
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """One pass; ValueError if it does not bring what `metadata` declared, in that order.

        Raises RuntimeError after `interrupt`.
        """
        declared = iter(self.metadata())
        self._pass = self._begin_pass()
        for name, tensor in self._pass:
            expected = next(declared, None)
            found = ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            if found != expected:
                raise ValueError(f"weight export brought {found} where its metadata declares {expected}")
            if self._interrupted:
                raise RuntimeError("the publication was given up")
            yield name, tensor
        missing = next(declared, None)
        if missing is not None:
            raise ValueError(f"weight export ended before {missing}, which its metadata declares")

    def begin_publication(self, *, from_snapshot: bool = False) -> None:
        self._pass, self._interrupted = None, False
        if not from_snapshot:
            self._snapshot = None

    def interrupt(self) -> None:
        """End the iteration of this publication's pass at its next tensor; from any thread."""
        self._interrupted = True

    def drain(self) -> None:
        """Run this publication's pass to its end without using it."""
        if self._pass is None:
            self._pass = self._begin_pass()
        for _ in self._pass:
            pass

    def take_snapshot(self, *, keep: bool) -> None:
        """Export once, on every rank; with `keep` (the lead) later passes go over a copy of it.

        The copy lies where the tensors lie, as large as the whole model.
        """
        copies = []
        for name, tensor in self._tensors_fn():
            if keep:
                copies.append((name, tensor.detach().clone()))
        self._snapshot = copies

    def _begin_pass(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors_fn() if self._snapshot is None else self._snapshot)


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in the byte stream."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    total_bytes: int

    @classmethod
    def of(
        cls, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> Layout:
        """From metadata as it travels (type names without "torch.")."""
        if not len(names) == len(dtype_names) == len(shapes):
            raise ValueError(
                f"weight metadata has {len(names)} names, {len(dtype_names)} types, {len(shapes)} shapes"
            )
        dtypes = tuple(getattr(torch, name) for name in dtype_names)
        offsets, total = [], 0
        for dtype, shape in zip(dtypes, shapes, strict=True):
            offsets.append(total)
            size = math.prod(shape) * dtype.itemsize
            total += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(tuple(names), dtypes, tuple(tuple(s) for s in shapes), tuple(offsets), total)

    def views(self, stream: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors inside a whole stream (uint8 [total_bytes]), without copying."""
        for name, dtype, shape, start in zip(
            self.names, self.dtypes, self.shapes, self.offsets, strict=True
        ):
            size = math.prod(shape) * dtype.itemsize
            yield name, stream[start : start + size].view(dtype).view(shape)


def describe_metadata(metadata: Sequence[ParamMeta]) -> dict[str, list]:
    """Metadata as JSON values: the form of vLLM's dense update info."""
    return {
        "names": [entry.name for entry in metadata],
        "dtype_names": [str(entry.dtype).removeprefix("torch.") for entry in metadata],
        "shapes": [list(entry.shape) for entry in metadata],
    }
