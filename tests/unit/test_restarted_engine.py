"""An engine is replaced under an episode: what may generate before its weights are back, and who looks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_hpc.config.schema import Config
from areal_hpc.messages import WeightCall
from areal_hpc.rewards.service import RewardResult
from areal_hpc.rollout import supervisor as supervisor_module
from areal_hpc.rollout.engine import EngineDied, RolloutEngine
from areal_hpc.rollout.episode import EpisodeEngine, Services
from areal_hpc.rollout.generation import Generation
from areal_hpc.rollout.supervisor import EngineFailures, EngineSupervisor
from areal_hpc.rollout.updates import EngineUpdates, Served
from areal_hpc.rollout.workflow import MultiTurn
from areal_hpc.telemetry import Telemetry
from areal_hpc.types import Prompt, SamplingSpec


class FakeLLM:
    """vLLM's side of an engine; a process that was killed leaves its calls without an answer."""

    def __init__(self, engine: FakeEngine) -> None:
        self.errored = False
        self.killed = False
        self.cached: set[int] = set()
        """Weights under which prefixes were cached."""
        self.label = ""
        self.weights = 0
        self.staged = 0
        self._engine = engine
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[])))

    async def update_weight_version(self, version: str) -> None:
        await asyncio.sleep(0.001)
        self.label = version

    async def collective_rpc(self, method: str, args: tuple) -> list[str]:
        for name, arguments in args[0]:
            if name == "update_weights":
                self.staged = int(arguments["update_info"]["folder"])
            elif name == "finish_weight_update":
                await self._engine.loadable.wait()
                self.weights = self.staged
        if self.killed:
            await asyncio.Event().wait()
        return [self._engine.load_error]

    async def pause_generation(self, mode: str, clear_cache: bool) -> None: ...

    async def reset_prefix_cache(self) -> bool:
        self.cached.clear()
        return True

    def shutdown(self, timeout: int) -> None: ...


class FakeEngine(RolloutEngine):
    """The engine's own order of things over FakeLLM; a token tells which weights made it."""

    def __init__(self, config: Config, log: Path) -> None:
        super().__init__(config, log=log)
        self.loadable = asyncio.Event()
        self.loadable.set()
        self.load_error = ""
        self.llms: list[FakeLLM] = []

    def _construct(self) -> FakeLLM:
        self.llms.append(FakeLLM(self))
        return self.llms[-1]

    @property
    def alive(self) -> bool:
        return self._llm is not None and not self._llm.killed

    async def _answer(self, prompt: list[int], sampling: SamplingSpec, request_id: str, seed: int) -> Generation:
        llm = self._require()
        await asyncio.sleep(0)
        llm.cached.add(llm.weights)
        stale = llm.cached != {llm.weights}
        count = 3
        return Generation(
            np.full(count, llm.weights, np.int32),
            np.full(count, -9.0 if stale else -1.0, np.float32),
            np.full(count, int(llm.label), np.int32),
            "stop",
        )


class Rewards:
    """Never satisfied; the first score waits until it may come."""

    def __init__(self) -> None:
        self.scoring, self.scored = asyncio.Event(), asyncio.Event()

    async def score(self, prompt: Prompt, responses: list[str], truncated: list[bool]) -> list[RewardResult]:
        self.scoring.set()
        await self.scored.wait()
        return [RewardResult(0.0, {})]


class Encoder:
    def prompt(self, text: str) -> list[int]:
        return [100, 101]

    def feedback(self, text: str, last: int) -> list[int]:
        return [102]

    def decode(self, token_ids: np.ndarray) -> str:
        return ""


class Rank:
    """Engine, updates and supervisor of a rollout rank that serves version 5, in its place in the loop."""

    def __init__(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        self.log = tmp_path / "engine.log"
        self.log.write_text("last words\n")
        self.config = Config()
        self.config.model.path = str(tmp_path)
        self.config.weights.timeout_s = 0.3
        self.engine = FakeEngine(self.config, self.log)
        self.updates = EngineUpdates(self.config, self.engine, 0, Telemetry(tmp_path / "spans.jsonl"))
        self.updates._served = Served(5, {"folder": "5", "receive": False})
        self.supervisor = EngineSupervisor(self.config.rollout, self.engine, self.updates, self.log)

    def kill(self) -> None:
        self.engine.llms[-1].killed = True

    async def watch_until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10.0):
            while not condition():
                self.supervisor._next_look = 0.0
                self.supervisor.watch()
                await asyncio.sleep(0.002)


def play(tmp_path: Path, monkeypatch, scene: Callable[[Rank], Coroutine[Any, Any, None]]) -> None:
    monkeypatch.setattr(supervisor_module, "WATCH_INTERVAL_S", 0.005)

    async def act() -> None:
        rank = Rank(tmp_path)
        try:
            await scene(rank)
        finally:
            rank.updates.close()

    asyncio.run(act())


def test_an_episode_between_two_turns_waits_for_the_weights_of_the_new_engine(tmp_path, monkeypatch):
    """It scores while the engine dies, and goes on while the new one still holds the first weights."""

    async def scene(rank: Rank) -> None:
        await rank.supervisor.start()
        rewards = Rewards()
        episode = EpisodeEngine(
            Services(rank.config, rank.engine, rewards, Encoder()),
            group_id=1,
            group_size=1,
            sampling=SamplingSpec(max_new_tokens=50),
            seed_parts=(1,),
            request_prefix="lease-1",
        )
        running = asyncio.create_task(MultiTurn().arun_episode(episode, Prompt(prompt_id=1, text="", gold="7")))
        await rewards.scoring.wait()
        rank.kill()
        rank.engine.loadable.clear()
        await rank.watch_until(lambda: len(rank.engine.llms) == 2 and rank.engine.llms[1].staged == 5)
        rewards.scored.set()
        await asyncio.sleep(0.02)
        assert not running.done()
        rank.engine.loadable.set()
        await rank.watch_until(running.done)
        [sample] = running.result()
        chosen = sample.loss_mask > 0
        assert sample.tokens[chosen].tolist() == sample.versions[chosen].tolist() == [5] * 6
        # Nothing that was cached under the first weights is used.
        assert (sample.rollout_logprobs[chosen] == -1.0).all()

    play(tmp_path, monkeypatch, scene)


def test_an_answer_that_waits_for_an_engine_that_does_not_come_up_is_lost(tmp_path, monkeypatch):
    async def scene(rank: Rank) -> None:
        await rank.supervisor.start()
        rank.kill()
        rank.engine.loadable.clear()
        await rank.watch_until(lambda: len(rank.engine.llms) == 2 and rank.engine.llms[1].staged == 5)
        answer = asyncio.create_task(rank.engine.generate([1], SamplingSpec(max_new_tokens=9), "lease-1", 0))
        await asyncio.sleep(0.02)
        rank.kill()
        rank.engine.loadable.set()
        with pytest.raises(EngineDied):
            await answer

    play(tmp_path, monkeypatch, scene)


def test_an_engine_that_is_killed_while_its_weights_are_restored_is_started_again(tmp_path, monkeypatch):
    """vLLM never answers the call that was under way."""

    async def scene(rank: Rank) -> None:
        await rank.supervisor.start()
        rank.config.weights.timeout_s = rank.updates._timeout_s = 60.0
        rank.kill()
        rank.engine.loadable.clear()
        await rank.watch_until(lambda: len(rank.engine.llms) == 2 and rank.engine.llms[1].staged == 5)
        rank.kill()
        await rank.watch_until(lambda: len(rank.engine.llms) == 3)
        rank.engine.loadable.set()
        await rank.watch_until(rank.supervisor.ready.is_set)
        assert rank.supervisor.num_restarts == 1 and rank.engine.llms[-1].label == "5"

    play(tmp_path, monkeypatch, scene)


def test_a_restore_that_hangs_or_fails_counts_as_a_failure_of_the_engine(tmp_path, monkeypatch):
    async def scene(rank: Rank) -> None:
        await rank.supervisor.start()
        rank.kill()
        rank.engine.loadable.clear()
        await rank.watch_until(lambda: len(rank.engine.llms) == 3)  # the second one was stopped
        rank.engine.load_error = "RuntimeError: no memory to load into"
        rank.engine.loadable.set()
        with pytest.raises(EngineFailures, match="failed 3 times.*no memory to load into(.*\n)*.*last words"):
            await rank.watch_until(lambda: False)
        assert len(rank.engine.llms) == 3

    play(tmp_path, monkeypatch, scene)


def test_one_death_is_one_failure_even_in_the_middle_of_a_load(tmp_path, monkeypatch):
    """The call that fails with the old engine must not end the new one, which starts at that moment."""

    async def scene(rank: Rank) -> None:
        await rank.supervisor.start()
        await rank.updates.handle(WeightCall(1, "start_weight_update", '{"version": 6}'))
        rank.updates._update.info = {"folder": "6"}
        rank.engine.loadable.clear()
        finish = WeightCall(2, "finish_weight_update", '{"version": 6}')
        call = asyncio.create_task(rank.updates.handle(finish))
        await asyncio.sleep(0.02)
        rank.kill()
        rank.engine.loadable.set()
        await rank.watch_until(lambda: not rank.supervisor.ready.is_set())
        await rank.watch_until(rank.supervisor.ready.is_set)
        assert "the engine was ended" in (await call).error
        assert len(rank.engine.llms) == 2 and rank.supervisor.num_restarts == 1

    play(tmp_path, monkeypatch, scene)
