"""Writes Hugging Face folders: from a trainer in memory, or from a checkpoint of a run.

`export_hf` is called by the trainer's loop and by `sft` on all trainer ranks; `export_run`
by the command line in a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import read_config
from areal_hpc.durable import find_disk_full, replace_folder, restore_folder, sync_files
from areal_hpc.paths import RunPaths
from areal_hpc.trainer.checkpoint_folder import find_checkpoint

if TYPE_CHECKING:
    from areal_hpc.trainer.megatron import MegatronTrainer

MAX_FILE_BYTES = 4 * 1024**3
_COPIED = ("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
           "generation_config.json", "chat_template*")


def export_hf(engine: MegatronTrainer, folder: Path, tokenizer: Path | None = None) -> None:
    """Write the engine's weights as `folder`, with everything else copied from its model's folder.

    `tokenizer`: where tokenizer files come from, if not from there. The folder appears
    under its name when it is whole and on disk; one that is there stays until then. Raises
    DiskFullError, leaving nothing beside it, when there is no space.
    """
    if engine.place.rank == 0:
        _write(engine, folder, tokenizer or engine.model_path)
    else:
        for _ in engine.named_hf_tensors():  # a collective
            pass
    dist.barrier()


def _write(engine: MegatronTrainer, folder: Path, tokenizer: Path) -> None:
    """The lead's part: files in a temporary folder, which takes the place of `folder`."""
    restore_folder(folder)
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    writer = _Writer(temporary)
    try:
        temporary.mkdir(mode=0o700, parents=True)
        for name, tensor in engine.named_hf_tensors():
            writer.add(name, tensor)
        writer.close()
        _copy_rest(engine, tokenizer, temporary)
        sync_files(temporary)
        replace_folder(temporary, folder)
    except Exception as error:
        full = find_disk_full(error, temporary, writer.num_bytes)
        shutil.rmtree(temporary, ignore_errors=True)
        raise full or error from None


def export_run(paths: RunPaths, train_step: int | None = None, output: Path | None = None) -> Path:
    """Write a checkpoint of a run (the newest, or that of `train_step`) as a Hugging Face folder.

    Works in this process alone, on the CPU, whatever layout trained the run. Raises
    ConfigError where there is no such checkpoint.
    """
    from areal_hpc.trainer import parallel
    from areal_hpc.trainer.build import model_options
    from areal_hpc.trainer.checkpoint import load_state
    from areal_hpc.trainer.megatron import MegatronTrainer

    config = read_config(paths.config)
    found = find_checkpoint(paths, train_step)
    if found is None:
        which = "no whole checkpoint" if train_step is None else f"no checkpoint of step {train_step}"
        raise ConfigError(f"{paths.root} has {which}")
    folder, manifest = found
    target = output or paths.export(manifest.train_step)
    place = parallel.start(
        parallel.Layout(), rank=0, host="127.0.0.1", port=parallel.free_port(), device="cpu", timeout_s=60.0
    )
    try:
        options = dataclasses.replace(model_options(config), sequence_parallel=False)
        engine = MegatronTrainer(place, config.model.path, options)
        load_state(engine, folder / "policy")
        export_hf(engine, target, Path(config.model.tokenizer))
    finally:
        parallel.stop()
    return target


class _Writer:
    """Collects tensors into safetensors files of bounded size, with the index that names them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, torch.Tensor] = {}
        self._files: list[list[str]] = []
        self._pending_bytes = self.num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.itemsize
        if self._pending and self._pending_bytes + size > MAX_FILE_BYTES:
            self._flush()
        # A copy: the tensor may be a view of a parameter or of a buffer used again.
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size
        self.num_bytes += size

    def close(self) -> None:
        self._flush()
        total = len(self._files)
        names = ["model.safetensors"] if total == 1 else [
            f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)
        ]
        for number, name in enumerate(names):
            os.rename(self._folder / f"part-{number}", self._folder / name)
        if total > 1:
            index = {
                "metadata": {"total_size": self.num_bytes},
                "weight_map": {tensor: name for name, members in zip(names, self._files) for tensor in members},
            }
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")

    def _flush(self) -> None:
        path = self._folder / f"part-{len(self._files)}"
        save_file(self._pending, path, metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0


def _copy_rest(engine: MegatronTrainer, tokenizer: Path, target: Path) -> None:
    for source, patterns in ((tokenizer, _COPIED), (engine.model_path, ("generation_config.json",))):
        for pattern in patterns:
            for file in source.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, target / file.name)
    config = json.loads((engine.model_path / "config.json").read_text(encoding="utf-8"))
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = str(engine.options.dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
