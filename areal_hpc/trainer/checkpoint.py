"""Saves and loads the trainer: Megatron's distributed checkpoint, whole or not at all.

Owns the folder `checkpoints` of a run. Saving copies the state at once; a thread of each
rank writes it beside training, over a process group of its own, and the lead renames the
folder when every rank's files are on disk. Loading reshards to the present layout. Called
by the trainer's loop on all ranks alike.
"""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from areal_hpc.config.load import config_digest
from areal_hpc.config.schema import Config
from areal_hpc.durable import DiskFullError, find_disk_full
from areal_hpc.paths import RunPaths
from areal_hpc.trainer.checkpoint_folder import (
    Manifest,
    describe_file,
    find_checkpoint,
    prune,
    publish,
    remove_leftovers,
)
from areal_hpc.trainer.megatron import MegatronTrainer

log = logging.getLogger(__name__)

SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}
"""Megatron's optimizer state in a form that any other layout can load."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole under its final name."""

    train_step: int
    path: Path
    seconds: float


class Checkpoints:
    """Checkpoints of one run; `engines` by name (the policy, and a critic if there is one)."""

    def __init__(self, config: Config, paths: RunPaths, engines: dict[str, MegatronTrainer], timeout_s: float) -> None:
        import datetime

        self._config, self._paths, self._engines = config, paths, engines
        self._place = next(iter(engines.values())).place
        # Its own: the writing threads communicate while training uses the other groups.
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self._thread: threading.Thread | None = None
        self._outcome: queue.SimpleQueue[Saved | BaseException] = queue.SimpleQueue()

    # ---- saving ----------------------------------------------------------------------

    def save(self, train_step: int, version: int) -> None:
        """Begin to save; returns when the state is copied. `finished` tells of the end."""
        assert self._thread is None, "a save is in progress: wait() first"
        begin = time.perf_counter()
        final = self._paths.checkpoint(train_step)
        temporary = final.with_name(f".{final.name}.tmp")
        if self._place.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            for name in self._engines:
                (temporary / name).mkdir(mode=0o700, parents=True)
        dist.barrier()
        try:
            parts = {name: _Part(engine, temporary / name) for name, engine in self._engines.items()}
        except Exception as error:  # Megatron writes what all ranks have in common while it plans
            raise find_disk_full(error, temporary, sum(map(_about_bytes, self._engines.values()))) or error from None

        def write() -> None:
            try:
                files = self._write(parts, temporary)
                if self._place.rank == 0:
                    manifest = Manifest(train_step, version, config_digest(self._config),
                                        str(self._place.layout), files)
                    self._publish(temporary, final, manifest)
                self._outcome.put(Saved(train_step, final, time.perf_counter() - begin))
            except BaseException as error:
                num_bytes = sum(part.num_bytes for part in parts.values())
                self._outcome.put(find_disk_full(error, temporary, num_bytes) or error)

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def finished(self) -> Saved | None:
        """The save that has ended since the last call, if any; raises what went wrong in it."""
        try:
            outcome = self._outcome.get_nowait()
        except queue.Empty:
            return None
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        if isinstance(outcome, BaseException):
            raise RuntimeError(f"the checkpoint could not be written: {outcome}") from outcome
        return outcome

    def wait(self, timeout_s: float) -> Saved | None:
        """As `finished`, waiting for a save in progress; TimeoutError after `timeout_s` seconds."""
        if self._thread is None:
            return None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"waited {timeout_s:.0f} s for the checkpoint to be written by all trainer ranks")
        return self.finished()

    def _write(self, parts: dict[str, _Part], temporary: Path) -> dict:
        """This rank's files; on the lead the entries of all ranks' files."""
        results, mine, error, code = {}, {}, "", 0
        try:
            results = {name: part.write() for name, part in parts.items()}
            mine = {
                str(file.relative_to(temporary)): describe_file(file)
                for part in parts.values() for file in part.files
            }
        except Exception as failure:  # told to all ranks: they wait in the next line
            num_bytes = sum(part.num_bytes for part in parts.values())
            full = find_disk_full(failure, temporary, num_bytes)
            error = f"trainer rank {self._place.rank}: {full.strerror if full else failure}"
            code = full.errno if full else 0
        everyone: list = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, (results, mine, error, code), group=self._group)
        errors = [failure for *_, failure, _ in everyone if failure]
        codes = [full for *_, full in everyone if full]
        if codes:
            raise DiskFullError(codes[0], "; ".join(errors))
        if errors:
            raise RuntimeError("; ".join(errors))
        if self._place.rank != 0:
            return {}
        files = {name: entry for _, theirs, *_ in everyone for name, entry in theirs.items()}
        for name, part in parts.items():
            part.finish([theirs[name] for theirs, *_ in everyone])
        for file in sorted(temporary.rglob("*")):
            name = str(file.relative_to(temporary))
            if file.is_file() and name not in files:
                files[name] = describe_file(file)
        return files

    def _publish(self, temporary: Path, final: Path, manifest: Manifest) -> None:
        publish(temporary, final, manifest)
        keep = self._config.checkpoint
        for folder in prune(self._paths, keep.keep_last, keep.keep_every):
            log.info("removed checkpoint %s", folder.name)

    # ---- loading ---------------------------------------------------------------------

    def load_newest(self) -> int:
        """Load the newest whole checkpoint, if there is one; returns its step, else 0."""
        found: list = [None]
        if self._place.rank == 0:
            remove_leftovers(self._paths)
            checkpoint = find_checkpoint(self._paths, set_aside=True)
            if checkpoint is not None:
                folder, manifest = checkpoint
                if manifest.version != manifest.train_step:
                    raise RuntimeError(f"{folder}: version {manifest.version} is not its step {manifest.train_step}")
                found = [(manifest.train_step, str(folder))]
        dist.broadcast_object_list(found, src=0)
        if found[0] is None:
            return 0
        train_step, folder = found[0]
        for name, engine in self._engines.items():
            load_state(engine, Path(folder) / name)
        log.info("loaded checkpoint %s", folder)
        return train_step


class _Part:
    """One engine's state, copied and planned, ready to be written by a thread."""

    def __init__(self, engine: MegatronTrainer, folder: Path) -> None:
        # Megatron would start a manager process for this queue; here nobody else needs it.
        filesystem_async._results_queue = queue.SimpleQueue()
        strategy = _Planned("torch_dist", 1, thread_count=1)
        dist_checkpointing.save(_state(engine, loading=False), str(folder), strategy, async_sharded_save=True)
        assert strategy.writer is not None
        self._folder, self._writer, self._metadata = folder, strategy.writer, strategy.metadata
        # Copies: training goes on while they are written.
        self._buckets = [
            (path, key, (data, [(item, tensor.to("cpu", copy=True)) for item, tensor in tensors]))
            for path, key, (data, tensors) in strategy.writer.write_buckets or ()
        ]
        self.files = [Path(bucket[0]) for bucket in self._buckets]
        self.num_bytes = sum(
            tensor.nbytes for *_, (_, tensors) in self._buckets for _, tensor in tensors
        )

    def write(self) -> list:
        """Write this rank's file; returns torch's write results."""
        results: list = []
        for bucket in self._buckets:
            outcome: queue.SimpleQueue = queue.SimpleQueue()
            transforms = [self._writer.transforms] if hasattr(self._writer, "transforms") else []
            filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                transforms, 0, bucket, outcome, _Ignored(), True
            )
            _, written = outcome.get()
            if isinstance(written, BaseException):
                raise written
            results += written
        self._buckets = []
        return results

    def finish(self, results: list) -> None:
        """On the lead, with every rank's results: torch's and Megatron's own metadata files."""
        self._writer.finish(self._metadata, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))


def _about_bytes(engine: MegatronTrainer) -> int:
    """Size of this rank's part before it is planned: weights, their fp32 copy and Adam's two moments."""
    return sum(parameter.numel() * (parameter.element_size() + 12) for parameter in engine.module.parameters())


class _Planned(TorchDistSaveShardedStrategy):
    """Megatron's strategy up to the plan; writing and finishing are ours."""

    writer = None
    metadata = None

    def _get_save_and_finalize_callbacks(self, writer, save_state_dict_ret) -> AsyncRequest:
        self.writer, self.metadata = writer, save_state_dict_ret[1]
        return AsyncRequest(None, (), [])


class _Ignored:
    """Stands for the queue with which Megatron's writer processes report that they are done."""

    def get(self) -> None: ...

    def task_done(self) -> None: ...


def _state(engine: MegatronTrainer, *, loading: bool) -> dict:
    """The sharded state of an engine; without an optimizer the model alone."""
    metadata = dict(SHARDING)
    state: dict = {"model": engine.module.sharded_state_dict(metadata=metadata)}
    if engine.updater is not None:
        state["optimizer"] = engine.updater.optimizer.sharded_state_dict(
            state["model"], is_loading=loading, metadata=metadata
        )
        _drop_empty(state["optimizer"])
        state["schedule"] = engine.updater.schedule.state_dict()
        state["num_skipped"] = engine.num_skipped
        state["rng"] = {"cpu": torch.get_rng_state()}
        if engine.place.device.type == "cuda":
            state["rng"]["cuda"] = torch.cuda.get_rng_state()
    return state


def _drop_empty(optimizer_state: dict) -> None:
    """Ranks that hold no optimizer state have a None in its place, which Megatron would warn of."""
    for part in (optimizer_state, *optimizer_state.values()):
        if isinstance(part, dict) and part.get("param_state", ()) is None:
            del part["param_state"]


def load_state(engine: MegatronTrainer, folder: Path) -> None:
    """Load an engine's part of a checkpoint, whatever layout wrote it."""
    loaded = dist_checkpointing.load(_state(engine, loading=True), str(folder))
    engine.module.load_state_dict(loaded["model"])
    if engine.updater is not None:
        engine.updater.load(loaded["optimizer"], loaded["schedule"])
        engine.num_skipped = loaded["num_skipped"]
        torch.set_rng_state(loaded["rng"]["cpu"])
        if engine.place.device.type == "cuda" and "cuda" in loaded["rng"]:
            torch.cuda.set_rng_state(loaded["rng"]["cuda"])
