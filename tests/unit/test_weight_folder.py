"""Weights in files: whole under their name, and a full disk ends the run instead of a publication."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from areal_hpc.config.schema import WeightBackend
from areal_hpc.durable import DiskFullError
from areal_hpc.telemetry import Telemetry
from areal_hpc.weights import folder
from areal_hpc.weights.transfer import Publication, PublishError, TrainerWeights

TENSORS = {"a": torch.arange(100.0), "b": torch.ones(100), "c": torch.zeros(10)}


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_version_is_whole_and_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "FILE_BYTES", 400)
    made = folder.write_weights(tmp_path / "weights", 7, TENSORS.items())
    files = sorted(made.iterdir())
    assert made.name == "v00000007" and len(files) == 3
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert torch.equal(load_file(files[0])["a"], TENSORS["a"])


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    folder.write_weights(tmp_path, 1, TENSORS.items())
    monkeypatch.setattr(folder, "save_file", full)
    with pytest.raises(DiskFullError, match="disk full: writing 840 bytes to .*v00000002.* lacks at least"):
        folder.write_weights(tmp_path, 2, TENSORS.items())
    assert [path.name for path in tmp_path.iterdir()] == ["v00000001"]


def test_only_what_another_attempt_may_mend_is_a_failed_publication(tmp_path, monkeypatch):
    weights = TrainerWeights.__new__(TrainerWeights)
    weights._world = SimpleNamespace(is_trainer_lead=True)
    weights._source = SimpleNamespace(begin_publication=lambda: None)
    weights._client, weights._background, weights._backend = object(), None, WeightBackend.file
    weights._telemetry = Telemetry(tmp_path / "spans.jsonl")
    withdrawn: list[Exception] = []
    monkeypatch.setattr(weights, "_ensure_connected", lambda version: None)
    monkeypatch.setattr(weights, "_withdraw", lambda version, error: withdrawn.append(error))

    def fail(error: Exception):
        def send() -> None:
            raise error

        weights._engine = SimpleNamespace(send_weights=send)

    fail(RuntimeError("an engine left"))
    assert weights.attempt(3) == Publication(3, {}, "version 3 was not published: an engine left")
    assert len(withdrawn) == 1 and isinstance(withdrawn[0], RuntimeError)
    fail(DiskFullError(errno.ENOSPC, "disk full: writing 5 bytes"))
    with pytest.raises(DiskFullError, match="writing 5 bytes"):
        weights.attempt(3)
    assert not issubclass(DiskFullError, PublishError) and len(withdrawn) == 1
