"""Where a run's numbers are shown beside its own files: TensorBoard, and Weights & Biases if wanted.

Owned by `progress`, which hands over one record a step or evaluation. Both write into the
run folder only; nothing here reaches out to a network.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Protocol

from areal_hpc.config.schema import Config
from areal_hpc.paths import RunPaths


class Board(Protocol):
    def resume(self, step: int) -> None:
        """What was shown of training step `step` and later ones is trained again; before the first `scalars`."""

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars in TensorBoard's own format, without torch or tensorflow.

    Everything shown is in metrics.jsonl too: trouble (a full disk) ends the board, not the run.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._writer: Any = None
        self._stopped = False
        self._resumed: int | None = None

    def resume(self, step: int) -> None:
        self._resumed = step

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        if self._stopped:
            return
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        try:
            # At the first number, so that a start that fails leaves no empty file.
            if self._writer is None:
                self._writer = EventFileWriter(self._folder, flush_secs=10)
            for event in self._events(values, step):
                self._writer.add_event(event)
        except Exception as error:  # of its own thread too, which failed at an earlier step
            self._stop(error)

    def _events(self, values: Mapping[str, float], step: int) -> list[Any]:
        """Before the first numbers of a resumed run: the mark at which readers drop what is repeated."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        events = [Event(wall_time=time.time(), step=step, summary=summary)]
        if self._resumed is not None:
            start = SessionLog(status=SessionLog.START)
            events.insert(0, Event(wall_time=time.time(), step=self._resumed, session_log=start))
            self._resumed = None
        return events

    def close(self) -> None:
        if self._stopped or self._writer is None:
            return
        try:
            self._writer.close()
        except Exception as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        logging.getLogger(__name__).warning("TensorBoard stopped: %s", error)
        self._stopped = True


class OfflineWandb:
    """A run of Weights & Biases in its offline mode: `wandb sync RUN/wandb/offline-run-*` sends it later.

    Each attempt at a run is a run of its own, all in one group; trouble ends the board, not the run.
    """

    def __init__(self, config: Config, paths: RunPaths) -> None:
        self._run: Any = None
        try:
            self._run = self._begin(config, paths)
        except Exception as error:
            self._stop(error)

    @staticmethod
    def _begin(config: Config, paths: RunPaths) -> Any:
        import wandb
        from omegaconf import OmegaConf

        quiet = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, save_code=False,
            x_disable_stats=True, x_disable_meta=True, x_save_requirements=False,
        )  # fmt: skip
        return wandb.init(
            mode="offline",
            dir=str(paths.root),
            project="areal_hpc",
            name=config.run.name,
            group=config.run.name,
            config=OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True),
            settings=quiet,
        )

    def resume(self, step: int) -> None:
        """Nothing to do: its run is of this attempt alone."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        if self._run is None:
            return
        try:
            self._run.log(dict(values), step=step)
        except Exception as error:
            self._stop(error)

    def close(self) -> None:
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        """A library of somebody else's, beside the run: it may raise whatever it likes."""
        logging.getLogger(__name__).warning("wandb stopped: %s", error)
        self._run = None


def open_boards(config: Config, paths: RunPaths) -> list[Board]:
    """The boards beside TensorBoard. Called while the ranks load: wandb takes seconds to begin."""
    return [OfflineWandb(config, paths)] if config.run.wandb else []
