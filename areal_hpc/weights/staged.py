"""The worker side that all backends share: weights are staged whole, then loaded.

Runs in vLLM's worker processes. An update has two halves. `update_weights` brings every
byte into host memory and touches no parameter, so that a transfer which fails leaves the
model as it is, and may go on in a thread while the engine generates. `finish_weight_update`
loads what is staged, under a pause. The stage is memory that the rollout rank owns: it
outlives this process, and a restarted engine is given the same weights again.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferUpdateInfo

from areal_hpc.weights.source import Layout
from areal_hpc.weights.stage import TransferControl

logger = logging.getLogger(__name__)

KEPT_MAPPINGS = 2
"""Stages that a rank uses in turn."""


@dataclass
class StagedUpdateInfo(WeightTransferUpdateInfo):
    """One update. `receive` is False when the stage (or folder) is whole already.

    stage: path of the host memory that holds the byte stream; "" when `folder` is given.
    folder: safetensors files to load instead. aliases: further names -> the tensor they
    share (tied embeddings: vLLM's CPU engine keeps a repacked head of its own). abandon:
    forget what was staged; the finish that follows loads nothing. control, attempt: where
    this transfer reports its end and learns that it was cancelled (stage.TransferControl).
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


class StageMap:
    """Maps stages by path and keeps the last few: mapping one anew costs a fault per page."""

    def __init__(self) -> None:
        self._mappings: dict[tuple[int, int], torch.Tensor] = {}

    def open(self, path: str, num_bytes: int) -> torch.Tensor:
        """The first `num_bytes` of a stage as a writable uint8 tensor."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            # A path may come to mean another memfd; its inode does not.
            key = (os.fstat(descriptor).st_ino, num_bytes)
            found = self._mappings.pop(key, None)
            if found is None:
                found = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        finally:
            os.close(descriptor)
        self._mappings[key] = found
        while len(self._mappings) > KEPT_MAPPINGS:
            del self._mappings[next(iter(self._mappings))]
        return found


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

    receives_in_background = False
    """True where a transfer may run beside the engine's own work."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending: StagedUpdateInfo | None = None
        self._stages = StageMap()

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
            if self.receives_in_background:
                threading.Thread(target=self._receive, args=(info,), daemon=True).start()
            else:
                self._receive(info)
        self._pending = info

    def _receive(self, info: StagedUpdateInfo) -> None:
        """Bring the bytes; the rank reads how it ended from the transfer's control."""
        error = ""
        try:
            self.receive_weights(info)
        except Exception as failure:  # reported, not raised: it may be in a thread
            logger.exception("the transfer of weights failed")
            error = f"{type(failure).__name__}: {failure}"
        if self._fills_stage:
            control = TransferControl(info.control)
            control.end(info.attempt, error)
            control.close()

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
            pairs = layout.views(self._stages.open(info.stage, layout.total_bytes))
        wanted = {shared: alias for alias, shared in info.aliases.items()}
        for name, tensor in pairs:
            yield name, tensor
            if name in wanted:
                yield wanted[name], tensor

    def shutdown(self) -> None:
        self._pending = None
