"""The rollout's end of a publication: stage, load under a pause, then serve or go back.

`EngineUpdates` answers the trainer lead's WeightCalls for one engine, one after the
other. It owns the stages (two memfds, used in turn) and remembers what the engine
serves: the committed update can be loaded again at any time, into this engine when a
publication is abandoned, into a new one when this one died. An engine that dies between
its finish and the commit changes neither: what it had loaded is still staged here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.config.schema import Config
from areal_hpc.messages import WeightCall, WeightReturn
from areal_hpc.rollout.deadline import deadline
from areal_hpc.rollout.engine import EngineDied, RolloutEngine
from areal_hpc.telemetry import Telemetry
from areal_hpc.weights.stage import CONTROL_BYTES, Stage, TransferControl

logger = logging.getLogger(__name__)

TRANSFER_POLL_S = 0.001
CANCEL_GRACE_S = 10.0
"""An engine that is still busy with a cancelled transfer after this is ended."""
TRANSFER_CALLS = ("init_weight_transfer_engine", "update_weights")
"""Calls in which an engine waits for the trainer; in others it is busy with itself."""

SERVE_DEADLINE_S = 30.0
"""To resume takes milliseconds; an engine that needs longer is stuck."""


@dataclass
class Served:
    """Weights that can be loaded: an update info that needs no sender."""

    version: int
    info: dict[str, Any]


@dataclass
class _Update:
    """A publication between `start_weight_update` and its commit."""

    version: int
    info: dict[str, Any] | None = None
    paused: bool = False
    loaded: bool = False
    finished: bool = False
    """The trainer was told that it is loaded and may decide for it."""
    lost: bool = False
    """The engine that had loaded it is gone."""
    timings: dict[str, float] = field(default_factory=dict)
    pause_start: float = 0.0


class EngineUpdates:
    """Serves WeightCalls; the caller serialises nothing, calls queue behind a lock."""

    def __init__(self, config: Config, engine: RolloutEngine, role_rank: int, telemetry: Telemetry) -> None:
        self._engine = engine
        self._role_rank = role_rank
        self._telemetry = telemetry
        self._timeout_s = config.weights.timeout_s
        self._lock = asyncio.Lock()
        self._stages = [Stage("areal-weights"), Stage("areal-weights")]
        self._control_memory = Stage("areal-control", CONTROL_BYTES)
        self._control = TransferControl(self._control_memory.path)
        self._attempt = 0
        self._aliases = tied_names(Path(config.model.path))
        self._served = Served(0, {"folder": config.model.path, "receive": False, "aliases": self._aliases})
        self._update: _Update | None = None
        self._current_call = ""
        self._connected = False
        self._serving = asyncio.Event()

    @property
    def version(self) -> int:
        return self._served.version

    @property
    def in_progress(self) -> bool:
        """An update is under way: no tokens for a while is no sign of a hang."""
        return self._update is not None and not self._update.lost

    async def restore(self) -> None:
        """Give a freshly started engine the committed weights, then let requests and calls reach it.

        Raises TimeoutError after weights.timeout_s, and whatever the engine raises.
        """
        loaded: Served | None = None
        async with deadline(self._timeout_s, "load the weights that serve"):
            # A commit does not wait for this: it may name others meanwhile.
            while loaded is not self._served:
                loaded = self._served
                if loaded.version > 0:
                    await self._load_served()
                    await self._engine.clear_cache()
                else:
                    await self._engine.set_version(0)
        self._engine.admit()
        self._serving.set()

    def engine_lost(self) -> None:
        """The engine is gone, and an update that it was busy with; one that it had finished is staged here."""
        self._serving.clear()
        self._connected = False
        if self._update is not None and self._update.finished:
            self._update.lost = True
        else:
            self._update = None

    async def handle(self, call: WeightCall) -> WeightReturn:
        """Answer one call; errors travel in the answer."""
        if call.method == "abandon":
            await self._cancel_transfer()
        try:
            async with self._lock:
                self._current_call = call.method
                if call.method != "commit":
                    await self._until_serving()
                result = await getattr(self, f"_on_{call.method}")(json.loads(call.payload))
            return WeightReturn(call.call_id, self._role_rank, json.dumps(result), "")
        except Exception as error:  # whatever went wrong here, the trainer has to hear of it
            logger.warning("weight call %s failed: %s", call.method, error)
            text = " ".join(str(error).split()) or type(error).__name__
            return WeightReturn(call.call_id, self._role_rank, "", text[:2000])

    async def _until_serving(self) -> None:
        """A restart is worth waiting for, or every attempt to publish would fail within the same moment."""
        if not self._engine.alive:
            # Not noticed yet.
            self._serving.clear()
        async with deadline(self._timeout_s, "serve again"):
            await self._serving.wait()

    # -- the calls, in the order of a publication ----------------------------------

    async def _on_init_weight_transfer_engine(self, init_info: dict[str, Any]) -> dict[str, Any]:
        self._connected = False
        await self._engine.connect_weights(init_info)
        self._connected = True
        return {}

    async def _on_start_weight_update(self, payload: dict[str, Any]) -> dict[str, Any]:
        if self._update is not None:
            # The lead gave up an earlier attempt without being heard.
            await self._go_back()
        self._update = _Update(int(payload["version"]))
        return {"connected": self._connected}

    async def _on_update_weights(self, info: dict[str, Any]) -> dict[str, Any]:
        update = self._expect_update()
        info = {**info, "aliases": self._missing_aliases(info)}
        self._attempt += 1
        info |= {"control": self._control_memory.path, "attempt": self._attempt}
        if not info.get("folder"):
            from areal_hpc.weights.source import Layout

            stage = self._free_stage()
            stage.reserve(Layout.of(info["names"], info["dtype_names"], info["shapes"]).total_bytes)
            info["stage"] = stage.path
        start = time.perf_counter()
        # No pause: running answers keep their KV, and with gloo even go on meanwhile.
        await self._engine.stage_weights(info)
        await self._transfer_end()
        update.info = {**info, "receive": False}
        update.timings["stage_s"] = time.perf_counter() - start
        return {}

    async def _on_finish_weight_update(self, payload: dict[str, Any]) -> dict[str, Any]:
        update = self._expect_update()
        if update.info is None or int(payload["version"]) != update.version:
            raise RuntimeError(f"version {payload['version']} is not what was staged")
        update.pause_start = paused = time.perf_counter()
        update.paused = True
        try:
            async with deadline(self._timeout_s, "pause and load the weights"):
                await self._engine.pause()
                paused = time.perf_counter()
                update.loaded = True
                await self._engine.load_weights()
        except Exception as error:
            if update.loaded:
                # Part of the model is new, part is old: no way back but a new engine.
                self._end_engine(error)
            raise
        self._expect_update()
        update.timings["pause_s"] = paused - update.pause_start
        update.timings["load_s"] = time.perf_counter() - paused
        update.finished = True
        return {}

    async def _on_commit(self, payload: dict[str, Any]) -> dict[str, Any]:
        update = self._expect_update()
        assert update.finished and update.info is not None
        # The decision is made: an engine that dies from here on is restarted with these weights.
        self._served = Served(update.version, update.info)
        if not update.lost:
            await self._serve()
        elif self._serving.is_set():
            update.lost = False
            await self._change_over()
        # Else the restart that is under way ends with these weights.
        self._update = None
        update.timings["pause_to_resume_s"] = time.perf_counter() - update.pause_start
        self._telemetry.record_span(
            "rollout.update", time.time() - update.timings["pause_to_resume_s"],
            update.timings["pause_to_resume_s"], version=update.version, **update.timings,
        )
        return update.timings

    async def _on_abandon(self, payload: dict[str, Any]) -> dict[str, Any]:
        self._connected = False
        await self._go_back()
        return {}

    async def _transfer_end(self) -> None:
        """Wait until the transfer is over; RuntimeError with its error."""
        end = time.monotonic() + self._timeout_s
        while (error := self._control.outcome(self._attempt)) is None:
            if not self._serving.is_set():
                raise EngineDied("the engine died during the transfer")
            if time.monotonic() > end:
                raise TimeoutError(f"the transfer of weights did not end in {self._timeout_s:.0f} s")
            await asyncio.sleep(TRANSFER_POLL_S)
        if error:
            raise RuntimeError(error)

    # -- helpers -------------------------------------------------------------------

    def _expect_update(self) -> _Update:
        if self._update is None:
            raise RuntimeError("no weight update was started (the engine may have been restarted since)")
        return self._update

    async def _cancel_transfer(self) -> None:
        """Free an engine that waits for buckets which will not come.

        One that drains or loads is let alone: it does that within a deadline of its own.
        """
        end = time.monotonic() + CANCEL_GRACE_S
        while self._lock.locked() and self._serving.is_set():
            # At every turn: the call that is cancelled may only just be starting.
            self._control.cancel(self._attempt)
            if self._current_call in TRANSFER_CALLS and time.monotonic() > end:
                logger.error("the engine does not come back from a cancelled transfer")
                self._engine.kill()
                return
            await asyncio.sleep(0.002)

    async def _go_back(self) -> None:
        """Serve the committed weights, whatever part of an update has been done."""
        update, self._update = self._update, None
        if update is None:
            return
        self._renew_free_stage()
        if update.lost:
            # The engine that came after it has never seen the update.
            return
        try:
            async with deadline(self._timeout_s, "go back to the version before"):
                await self._engine.unstage_weights()
                if update.loaded:
                    await self._load_served()
        except Exception as error:
            self._end_engine(error)
            raise
        if update.paused:
            await self._serve()

    def _end_engine(self, error: Exception) -> None:
        """After an error that leaves the engine of no use: the supervisor starts a new one."""
        # One that died may have been replaced by now: that one is not to be ended.
        if not isinstance(error, EngineDied):
            self._engine.kill()

    async def _load_served(self) -> None:
        await self._engine.stage_weights(self._served.info)
        await self._engine.load_weights()
        await self._engine.set_version(self._served.version)

    async def _serve(self) -> None:
        """Resume under the committed version; an engine that cannot is restarted with it."""
        try:
            async with deadline(SERVE_DEADLINE_S, "resume"):
                await self._engine.set_version(self._served.version)
                await self._engine.resume()
        except Exception as error:
            logger.warning("the engine failed as version %d went live: %s", self._served.version, error)
            self._end_engine(error)

    async def _change_over(self) -> None:
        """Load the committed weights into an engine that serves those before; else it is restarted with them."""
        try:
            # The trainer waits weights.timeout_s for the commit's answer.
            async with deadline(self._timeout_s / 2, "change over to the new weights"):
                await self._engine.pause()
                await self._load_served()
        except Exception as error:
            logger.warning("the engine failed before version %d went live: %s", self._served.version, error)
            self._end_engine(error)
            return
        await self._serve()

    def _free_stage(self) -> Stage:
        served = self._served.info.get("stage")
        return next(stage for stage in self._stages if stage.path != served)

    def _renew_free_stage(self) -> None:
        """A bucket of the abandoned transfer may still be written into the old memory."""
        stage = self._free_stage()
        self._stages[self._stages.index(stage)] = Stage("areal-weights")
        stage.close()

    def _missing_aliases(self, info: dict[str, Any]) -> dict[str, str]:
        return {alias: name for alias, name in self._aliases.items() if alias not in info["names"]}

    def close(self) -> None:
        for memory in (*self._stages, self._control, self._control_memory):
            memory.close()


def tied_names(model: Path) -> dict[str, str]:
    """{"lm_head.weight": embedding} of a Hugging Face folder whose embeddings are tied.

    vLLM's CPU engine keeps a repacked copy of the head, which an update of the embedding
    alone would leave behind.
    """
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if not settings.get("tie_word_embeddings", False):
        return {}
    return {"lm_head.weight": "model.embed_tokens.weight"}
