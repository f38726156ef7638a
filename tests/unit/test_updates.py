"""Weight calls and an engine that dies: what waits for its restart, and what must not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from areal_hpc.config.schema import Config
from areal_hpc.messages import WeightCall
from areal_hpc.rollout.updates import EngineUpdates
from areal_hpc.telemetry import Telemetry


class Engine:
    """An engine that can be dead without anybody having looked."""

    def __init__(self) -> None:
        self.alive = True
        self.connections = 0

    async def set_version(self, version: int) -> None: ...

    async def connect_weights(self, info: dict) -> None:
        if not self.alive:
            raise RuntimeError("the engine is not running")
        self.connections += 1


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
