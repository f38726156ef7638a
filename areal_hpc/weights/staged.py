"""The worker side that all backends share: weights are staged whole, then loaded.

Runs in vLLM's worker processes. An update has two halves. `update_weights` brings every
byte into host memory and touches no parameter, so that a transfer which fails leaves the
model as it is; `finish_weight_update` loads what is staged, under a pause. The stage is
memory that the rollout rank owns (a memfd, opened by path): it outlives this process,
and a restarted engine is given the same weights again.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferUpdateInfo

from areal_hpc.weights.plugin import CONTROL_BYTES
from areal_hpc.weights.source import Layout


@dataclass
class StagedUpdateInfo(WeightTransferUpdateInfo):
    """One update. `receive` is False when the stage (or folder) is whole already.

    stage: path of the host memory that holds the byte stream; "" when `folder` is given.
    folder: safetensors files to load instead. aliases: further names -> the tensor they
    share (tied embeddings: vLLM's CPU engine keeps a repacked head of its own). abandon:
    forget what was staged; the finish that follows loads nothing. control: path of a
    number in shared memory; an update whose `attempt` is not above it has been cancelled.
    """

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    stage: str = ""
    folder: str = ""
    receive: bool = True
    aliases: dict[str, str] = field(default_factory=dict)
    abandon: bool = False
    control: str = ""
    attempt: int = 0


class TransferCancelled(RuntimeError):
    """The trainer gave this update up."""


def cancellation(info: StagedUpdateInfo) -> Callable[[], None]:
    """A function that raises TransferCancelled once the update's rank has cancelled it."""
    descriptor = os.open(info.control, os.O_RDONLY)
    try:
        mapping = mmap.mmap(descriptor, CONTROL_BYTES, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)

    def raise_if_cancelled() -> None:
        if int.from_bytes(mapping[:CONTROL_BYTES], "little") >= info.attempt:
            raise TransferCancelled(f"attempt {info.attempt} of this update was cancelled")

    return raise_if_cancelled


def map_stage(path: str, num_bytes: int) -> torch.Tensor:
    """The stage as a writable uint8 tensor of exactly `num_bytes`; the mapping lives as long as it does."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        mapping = mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def read_folder(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the safetensors files in `folder`, in file order."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors")
    for path in files:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, tensors.get_tensor(name)


class StagedEngine(WeightTransferEngine[Any, StagedUpdateInfo]):
    """Base of the worker engines: subclasses say how bytes come into the stage."""

    update_info_cls = StagedUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending: StagedUpdateInfo | None = None

    @property
    def _fills_stage(self) -> bool:
        """One worker of an engine receives; the others read the same memory at the finish."""
        return self.parallel_config.rank == 0

    def start_weight_update(self) -> None:
        self._pending = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Overrides the base, which synchronises an accelerator that a CPU does not have.
        self._pending = None
        info = self.parse_update_info(update_info)
        if info.abandon:
            return
        if info.receive:
            self.receive_weights(info)
        self._pending = info

    def finish_weight_update(self) -> None:
        if self._pending is None:
            return
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        info, self._pending = self._pending, None
        initialize_layerwise_reload(self.model)
        self.model.load_weights(self._tensors(info))
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _tensors(self, info: StagedUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        if info.folder:
            pairs = read_folder(info.folder)
        else:
            layout = Layout.of(info.names, info.dtype_names, info.shapes)
            pairs = layout.views(map_stage(info.stage, layout.total_bytes))
        wanted = {shared: alias for alias, shared in info.aliases.items()}
        for name, tensor in pairs:
            yield name, tensor
            if name in wanted:
                yield wanted[name], tensor

    def shutdown(self) -> None:
        self._pending = None
