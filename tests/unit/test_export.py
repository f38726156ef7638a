"""Hugging Face folders: on disk before they have their name, and a full disk that is named."""

from __future__ import annotations

import errno
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from areal_hpc import durable
from areal_hpc.durable import DiskFullError
from areal_hpc.trainer import export


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """What is asked of an engine; two tensors of 400 bytes."""
    monkeypatch.setattr(export.dist, "barrier", lambda: None)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    (model / "tokenizer.json").write_text("{}")
    tensors = {"a": torch.arange(100.0), "b": torch.ones(100)}
    return SimpleNamespace(
        place=SimpleNamespace(rank=0), named_hf_tensors=tensors.items, model_path=model,
        options=SimpleNamespace(dtype=torch.float32),
    )  # fmt: skip


def test_every_file_is_on_disk_before_the_folder_has_its_name(tmp_path, engine, monkeypatch):
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 400)
    happened: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        happened.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_sync(descriptor)

    def rename(source, target):
        happened.append(f"{os.path.basename(source)} -> {os.path.basename(target)}")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    folder = tmp_path / "exports" / "step-00000003"
    export.export_hf(engine, folder)
    named = happened.index(".step-00000003.tmp -> step-00000003")
    files = [path.name for path in folder.iterdir()]
    assert len(files) == 5 and {*files, ".step-00000003.tmp"} <= set(happened[:named])
    assert happened[named + 1 :] == ["exports"]
    assert load_file(folder / "model-00002-of-00002.safetensors")["b"].sum() == 100
    assert json.loads((folder / "config.json").read_text()) == {"dtype": "float32"}
    (folder / "config.json").write_text("old")
    happened.clear()
    export.export_hf(engine, folder)
    renames = [entry for entry in happened if "step" in entry and "->" in entry]
    assert renames == ["step-00000003 -> .step-00000003.replaced", ".step-00000003.tmp -> step-00000003"]
    assert [path.name for path in folder.parent.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("where", ["tensors", "tokenizer", "sync"])
def test_a_full_disk_is_named_and_the_earlier_export_stays(tmp_path, engine, monkeypatch, where):
    folder = tmp_path / "exports" / "step-00000003"
    export.export_hf(engine, folder)
    (folder / "config.json").write_text("old")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_in_rust(*_: object, **__: object) -> None:
        monkeypatch.setattr(durable.os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=100))
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    module, name, failing = {
        "tensors": (export, "save_file", full_in_rust),
        "tokenizer": (shutil, "copyfile", full),
        "sync": (os, "fsync", full),
    }[where]
    monkeypatch.setattr(module, name, failing)
    with pytest.raises(DiskFullError, match="disk full: writing 800 bytes to .*step-00000003.* lacks at least"):
        export.export_hf(engine, folder)
    assert [path.name for path in folder.parent.iterdir()] == ["step-00000003"]
    assert (folder / "config.json").read_text() == "old"
