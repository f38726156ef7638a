"""Weight calls and an engine that dies or is slow: what waits for it, and what it serves in the end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from areal_hpc.config.schema import Config
from areal_hpc.messages import WeightCall
from areal_hpc.rollout import updates as updates_module
from areal_hpc.rollout.engine import EngineDied
from areal_hpc.rollout.updates import EngineUpdates
from areal_hpc.telemetry import Telemetry
from areal_hpc.weights.stage import TransferControl


class Engine:
    """An engine that can be dead without anybody having looked, and slow to transfer or to load."""

    def __init__(self) -> None:
        self.alive = True
        self.connections = 0
        self.version = -1
        self.folder = self.staged = ""
        self.paused = False
        self.transferable, self.loadable = asyncio.Event(), asyncio.Event()
        self.transferable.set()
        self.loadable.set()
        self.events: list[str] = []

    async def set_version(self, version: int) -> None:
        self.version = version

    async def connect_weights(self, info: dict) -> None:
        if not self.alive:
            raise RuntimeError("the engine is not running")
        self.connections += 1

    async def stage_weights(self, info: dict) -> None:
        self.staged = info["folder"]
        if info.get("receive", True):
            await self.transferable.wait()
            control = TransferControl(info["control"])
            control.end(info["attempt"], "")
            control.close()

    async def load_weights(self) -> None:
        self.events.append(f"load {self.staged}")
        folder = self.staged
        await self.loadable.wait()
        if not self.alive:
            raise EngineDied("the engine was ended")
        self.folder = folder

    async def unstage_weights(self) -> None:
        self.staged = ""

    async def clear_cache(self) -> None:
        self.events.append("clear")

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    def admit(self) -> None:
        self.events.append(f"admit {self.version}")

    def kill(self) -> None:
        self.alive = False
        self.events.append("kill")

    def start_again(self) -> None:
        self.alive, self.version, self.folder, self.paused = True, 0, "", False


@pytest.fixture
def parts(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    config = Config()
    config.model.path = str(tmp_path)
    config.weights.timeout_s = 1.0
    engine = Engine()
    updates = EngineUpdates(config, engine, 0, Telemetry(tmp_path / "spans.jsonl"))
    yield engine, updates
    updates.close()


def call(method: str, **payload: object) -> WeightCall:
    return WeightCall(7, method, json.dumps(payload))


def test_a_publication_waits_for_the_restart_of_an_engine_whose_death_nobody_saw_yet(parts):
    """Otherwise all attempts of weights.max_retries fail in the moment before the supervisor looks."""
    engine, updates = parts

    async def scene() -> None:
        await updates.restore()
        engine.alive = False
        answer = asyncio.create_task(updates.handle(call("init_weight_transfer_engine")))
        await asyncio.sleep(0.1)
        assert not answer.done()
        updates.engine_lost()  # the supervisor looks
        await asyncio.sleep(0.05)
        assert not answer.done()
        engine.alive = True
        await updates.restore()
        assert (await answer).error == "" and engine.connections == 1

    asyncio.run(scene())


def test_it_does_not_wait_longer_than_its_deadline(parts):
    engine, updates = parts

    async def scene() -> None:
        await updates.restore()
        engine.alive = False
        answer = await asyncio.wait_for(updates.handle(call("start_weight_update", version=1)), 10.0)
        assert answer.error == "the engine did not serve again within 1 s"

    asyncio.run(scene())


def test_a_commit_is_answered_at_once(parts):
    engine, updates = parts

    async def scene() -> None:
        await updates.restore()
        engine.alive = False
        answer = await asyncio.wait_for(updates.handle(call("commit", version=1)), 0.5)
        assert "no weight update was started" in answer.error

    asyncio.run(scene())


async def publish_up_to(updates: EngineUpdates, last: str, version: int = 1) -> None:
    """The calls of a publication until `last`; all succeed."""
    for method, payload in (
        ("start_weight_update", {"version": version}),
        ("update_weights", {"names": [], "folder": f"v{version}"}),
        ("finish_weight_update", {"version": version}),
        ("commit", {"version": version}),
    ):
        answer = await updates.handle(call(method, **payload))
        assert answer.error == "", (method, answer.error)
        if method == last:
            return


def lose(engine: Engine, updates: EngineUpdates) -> None:
    """What the supervisor does when it finds the engine dead."""
    engine.alive = False
    updates.engine_lost()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_an_engine_that_dies_before_the_commit_comes_back_with_the_new_version(parts):
    """All engines have loaded it, the others serve it from the commit on."""
    engine, updates = parts

    async def scene() -> None:
        await updates.restore()
        await publish_up_to(updates, "finish_weight_update")
        lose(engine, updates)
        answer = await asyncio.wait_for(updates.handle(call("commit", version=1)), 0.5)
        assert answer.error == ""
        timings = json.loads(answer.result)
        assert timings.keys() == {"stage_s", "pause_s", "load_s", "pause_to_resume_s"}
        engine.start_again()
        await updates.restore()
        assert (updates.version, engine.version, engine.folder) == (1, 1, "v1")
        # The next one is an ordinary publication.
        await publish_up_to(updates, "commit", version=2)
        assert (engine.version, engine.folder, engine.paused) == (2, "v2", False)

    asyncio.run(scene())


def test_a_commit_in_the_middle_of_a_restore_is_what_the_restore_ends_with(parts):
    engine, updates = parts

    async def scene() -> None:
        await updates.restore()
        await publish_up_to(updates, "commit", version=1)
        await publish_up_to(updates, "finish_weight_update", version=2)
        lose(engine, updates)
        engine.start_again()
        engine.loadable.clear()
        engine.events.clear()
        restore = asyncio.create_task(updates.restore())
        await settle()
        assert engine.events == ["load v1"]
        assert (await asyncio.wait_for(updates.handle(call("commit", version=2)), 0.5)).error == ""
        engine.loadable.set()
        await restore
        assert engine.events == ["load v1", "clear", "load v2", "clear", "admit 2"]
        assert engine.folder == "v2"

    asyncio.run(scene())


def test_a_commit_reaches_an_engine_that_was_restarted_with_the_version_before(parts):
    engine, updates = parts

    async def scene() -> None:
        await updates.restore()
        await publish_up_to(updates, "finish_weight_update")
        lose(engine, updates)
        engine.start_again()
        await updates.restore()
        assert engine.version == 0
        assert (await updates.handle(call("commit", version=1))).error == ""
        assert (engine.version, engine.folder, engine.paused, engine.alive) == (1, "v1", False, True)

    asyncio.run(scene())


def test_an_abandoned_update_does_not_touch_the_engine_that_came_after_it(parts):
    engine, updates = parts

    async def scene() -> None:
        await updates.restore()
        await publish_up_to(updates, "finish_weight_update")
        lose(engine, updates)
        engine.start_again()
        await updates.restore()
        engine.events.clear()
        assert (await updates.handle(call("abandon", version=1))).error == ""
        assert engine.events == [] and engine.version == updates.version == 0
        assert "no weight update" in (await updates.handle(call("commit", version=1))).error

    asyncio.run(scene())


def test_an_engine_that_dies_as_it_loads_has_finished_nothing(parts):
    """Nor is the engine that was started after it ended by the error of the one before."""
    engine, updates = parts

    async def scene() -> None:
        await updates.restore()
        await publish_up_to(updates, "update_weights")
        engine.loadable.clear()
        finish = asyncio.create_task(updates.handle(call("finish_weight_update", version=1)))
        await settle()
        lose(engine, updates)
        engine.loadable.set()
        assert "the engine was ended" in (await finish).error
        assert "kill" not in engine.events
        assert "no weight update" in (await updates.handle(call("commit", version=1))).error
        assert updates.version == 0

    asyncio.run(scene())


def test_an_abandon_waits_for_a_sound_load_and_ends_a_transfer(parts, monkeypatch):
    engine, updates = parts
    monkeypatch.setattr(updates_module, "CANCEL_GRACE_S", 0.05)

    async def scene() -> None:
        await updates.restore()
        await publish_up_to(updates, "update_weights")
        engine.loadable.clear()
        finish = asyncio.create_task(updates.handle(call("finish_weight_update", version=1)))
        await settle()
        abandon = asyncio.create_task(updates.handle(call("abandon", version=1)))
        await asyncio.sleep(0.2)
        assert engine.alive and not abandon.done()
        engine.loadable.set()
        assert (await finish).error == (await abandon).error == ""
        # The version before was loaded again.
        assert engine.alive and engine.version == 0 and engine.folder != "v1" and not engine.paused

        engine.transferable.clear()
        assert (await updates.handle(call("start_weight_update", version=1))).error == ""
        update = call("update_weights", names=[], folder="v1")
        calls = [asyncio.create_task(updates.handle(each)) for each in (update, call("abandon", version=1))]
        await asyncio.sleep(0.2)
        assert not engine.alive
        for task in calls:
            task.cancel()

    asyncio.run(scene())


def test_a_load_has_a_deadline_of_its_own(parts):
    engine, updates = parts

    async def scene() -> None:
        await updates.restore()
        await publish_up_to(updates, "update_weights")
        engine.loadable.clear()
        answer = await asyncio.wait_for(updates.handle(call("finish_weight_update", version=1)), 10.0)
        assert answer.error == "the engine did not pause and load the weights within 1 s"
        assert not engine.alive

    asyncio.run(scene())


def test_a_restore_has_a_deadline(parts):
    engine, updates = parts

    async def scene() -> None:
        await updates.restore()
        await publish_up_to(updates, "commit")
        lose(engine, updates)
        engine.start_again()
        engine.loadable.clear()
        with pytest.raises(TimeoutError, match="did not load the weights that serve within 1 s"):
            await asyncio.wait_for(updates.restore(), 10.0)
        assert engine.events[-1] != "admit 1"

    asyncio.run(scene())
