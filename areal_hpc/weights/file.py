"""Weights through files, for clusters where trainer and rollouts share no fast network.

The trainer lead writes safetensors into a folder of the run, under a temporary name that
is renamed when all of it is on disk; each worker reads it there. The folder of the last
live version stays, so that a restarted engine can read it again.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferInitInfo,
)

from areal_hpc.weights.client import RolloutClient
from areal_hpc.weights.folder import write_weights
from areal_hpc.weights.source import ExportSource, describe_metadata
from areal_hpc.weights.staged import StagedEngine, StagedUpdateInfo


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """A worker needs nothing before the first update."""

    rank_offset: int = 1


@dataclass
class FileTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = "file"

    folder: str


class FileEngine(StagedEngine):
    """Worker side: `update_weights` looks at the files, `finish_weight_update` loads them."""

    init_info_cls = FileInitInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        pass

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        expected = dict(zip(update_info.names, map(tuple, update_info.shapes), strict=True))
        for path in sorted(Path(update_info.folder).glob("*.safetensors")):
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                    shape = tuple(tensors.get_slice(name).get_shape())
                    if expected.pop(name, None) != shape:
                        raise ValueError(f"{path} holds {name} {shape}, which was not announced so")
        if expected:
            first = next(iter(expected))
            raise ValueError(f"{update_info.folder} lacks {len(expected)} tensors, first {first}")


class FileTrainerEngine(TrainerWeightTransferEngine[FileTrainerInitInfo]):
    """Trainer side; only the lead writes."""

    init_info_cls = FileTrainerInitInfo
    client: RolloutClient
    source: ExportSource

    def __init__(self, *, client: RolloutClient, source: ExportSource, is_sender: bool, folder: Path) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._folder = folder

    @classmethod
    def trainer_init(
        cls,
        init_info: FileTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        assert isinstance(client, RolloutClient) and isinstance(source, ExportSource)
        engine = cls(
            client=client, source=source, is_sender=init_info.is_sender, folder=Path(init_info.folder)
        )
        if engine.is_sender:
            client.init_weight_transfer_engine({})
        return engine

    def send_weights(self) -> None:
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        self.client.start_weight_update()
        folder = write_weights(self._folder, self.client.version, self.source)
        description: dict[str, Any] = describe_metadata(self.source.metadata())
        self.client.update_weights({**description, "folder": str(folder)})
        self.client.finish_weight_update()

    def forget_before(self, version: int) -> None:
        """Remove the folders of versions older than `version`, which every engine has left."""
        for folder in self._folder.glob("v*"):
            if int(folder.name[1:]) < version:
                shutil.rmtree(folder, ignore_errors=True)
