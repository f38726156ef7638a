"""A version's weights as a folder of safetensors files, which has its name once it is whole.

Called by the `file` backend; imports no vLLM.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from areal_hpc.durable import find_disk_full, sync_folder

FILE_BYTES = 4 * 1024**3
"""Tensors per file, so that a large model is never whole in the lead's memory."""


def write_weights(folder: Path, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Path:
    """Write (name, tensor) pairs as `folder`/vNNNNNNNN, private to the user; returns that.

    Raises DiskFullError, leaving nothing of this version, when there is no space.
    """
    final = folder / f"v{version:08d}"
    temporary = folder / f".v{version:08d}.tmp"
    pending: dict[str, torch.Tensor] = {}
    size, count = 0, 0
    try:
        for stale in (temporary, final):
            shutil.rmtree(stale, ignore_errors=True)
        temporary.mkdir(mode=0o700, parents=True)
        for name, tensor in tensors:
            # A copy: tied tensors share storage, which safetensors refuses.
            pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size += tensor.numel() * tensor.element_size()
            if size >= FILE_BYTES:
                _save(pending, temporary / f"weights-{count:05d}.safetensors")
                pending, size, count = {}, 0, count + 1
        if pending:
            _save(pending, temporary / f"weights-{count:05d}.safetensors")
        sync_folder(temporary)
        os.rename(temporary, final)
        sync_folder(folder)
    except Exception as error:
        full = find_disk_full(error, temporary, size)
        shutil.rmtree(temporary, ignore_errors=True)
        raise full or error from None
    return final


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fchmod(descriptor, 0o600)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
