"""Writes the trainer's weights as a Hugging Face folder. Called by `sft`, `checkpoint` and `loop`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from areal_hpc.durable import sync_folder

if TYPE_CHECKING:
    from areal_hpc.trainer.megatron import MegatronTrainer

MAX_FILE_BYTES = 4 * 1024**3
SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")


def export_hf(trainer: MegatronTrainer, output: Path) -> None:
    """Write `output`: config, tokenizer and safetensors. Called by all trainer ranks.

    Everything is written beside it and renamed when whole, so that a folder with its final
    name can be loaded. The lead writes; files hold at most MAX_FILE_BYTES.
    """
    lead = trainer.place.rank == 0
    temporary = output.with_name(f".{output.name}.tmp")
    if lead:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True, mode=0o700)
    chunk: dict[str, torch.Tensor] = {}
    files: list[list[str]] = []
    num_bytes = total = 0
    for name, tensor in trainer.named_hf_tensors():
        if not lead:
            continue
        size = tensor.numel() * tensor.element_size()
        if chunk and num_bytes + size > MAX_FILE_BYTES:
            files.append(_write(temporary, len(files), chunk))
            chunk, num_bytes = {}, 0
        # A copy: the exporter may yield views of live parameters or of one buffer.
        chunk[name] = tensor.detach().to("cpu", copy=True).contiguous()
        num_bytes, total = num_bytes + size, total + size
    if not lead:
        return
    files.append(_write(temporary, len(files), chunk))
    _name_files(temporary, files, total)
    for pattern in SIDE_FILES:
        for file in trainer.model_path.glob(pattern):
            if not file.name.endswith(".safetensors.index.json"):
                shutil.copyfile(file, temporary / file.name)
    sync_folder(temporary)
    if output.exists():
        shutil.rmtree(output)
    os.replace(temporary, output)
    sync_folder(output.parent)


def _write(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> list[str]:
    file = folder / f"part-{number}.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())
    return list(tensors)


def _name_files(folder: Path, files: list[list[str]], total_bytes: int) -> None:
    """Final names and, for several files, the index that transformers and vLLM look for."""
    if len(files) == 1:
        os.replace(folder / "part-0.safetensors", folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(files):
        final = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        os.replace(folder / f"part-{number}.safetensors", folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
