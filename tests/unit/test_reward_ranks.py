"""Rewards on ranks of their own: keys, messages, whom a rollout asks, errors and deadlines; no processes."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from areal_hpc.analysis.history import load_history
from areal_hpc.analysis.timeline import IDLE, SCORE, START, load_timeline
from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import check_config
from areal_hpc.config.schema import Config, GroupConfig
from areal_hpc.messages import Scored, ScoreRequest, decode, encode
from areal_hpc.mpi.channel import LocalNetwork
from areal_hpc.mpi.world import World
from areal_hpc.paths import RunPaths
from areal_hpc.rewards import remote
from areal_hpc.rewards.registry import RewardError, UnscorableGold
from areal_hpc.rewards.remote import RemoteRewards
from areal_hpc.telemetry import Telemetry
from areal_hpc.types import Prompt, RewardResult
from controller_world import Disk, FakeWorld, make_config
from run_folders import T0, make_run, quicken, set_times, write_ranks

PROMPT = Prompt(7, "2+2?", gold="4", tests='{"inputs": ["\\u0000"]}')


@pytest.mark.parametrize(
    ("group", "deadline_s", "words"),
    [
        (GroupConfig(nodes=-1), 900.0, "groups.reward.nodes=-1 must be at least 0"),
        (GroupConfig(nodes=2, ranks_per_node=0), 900.0, "groups.reward.ranks_per_node=0 must be at least 1"),
        (GroupConfig(nodes=1), 5.0, "rewards.answer_deadline_s=5 must be longer than"),
    ],
)
def test_groups_that_cannot_score_are_refused(group, deadline_s, words):
    config = Config()
    config.rewards.answer_deadline_s = deadline_s
    config.groups.reward = group
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_config(config)


def test_without_nodes_nothing_is_checked_or_planned():
    config = Config()
    config.rewards.answer_deadline_s = 1.0
    assert config.groups.reward.ranks == 0
    check_config(config)


@pytest.mark.parametrize(
    "message",
    [
        ScoreRequest(3, PROMPT, ("", "\x00é\n" * 3), (False, True)),
        Scored(3, (RewardResult(0.1 + 0.2, {"math": 1.0, "length": -1e-30}, "math: timeout"),)),
        Scored(2**40, (), "unscorable", "reward math cannot score prompt 7"),
    ],
)
def test_requests_and_scores_survive_the_wire(message):
    assert decode(encode(message)) == message


# ---- a rollout's side ------------------------------------------------------------


class Side:
    """A rollout (world rank 2) that asks two reward ranks, which the test plays."""

    def __init__(self, deadline_s: float = 60.0, role_rank: int = 0) -> None:
        network = LocalNetwork(5)
        self.mine, *self._ranks = (network.channel(rank) for rank in (2, 3, 4))
        hosts = tuple(f"node{rank}" for rank in range(5))
        world = World("rollout", role_rank, 2, (1,), (2,), hosts, self.mine, reward_ranks=(3, 4))
        self.rewards = RemoteRewards(world, deadline_s)

    def asked(self) -> dict[int, list[ScoreRequest]]:
        return {rank: [entry.message for entry in channel.poll()] for rank, channel in zip((3, 4), self._ranks)}

    def answer(self, rank: int, message: Scored) -> None:
        self._ranks[rank - 3].send(2, message)
        for source, scored in self.mine.poll():
            self.rewards.receive(source, scored)


def play(scene):
    asyncio.run(asyncio.wait_for(scene, 20))


def test_requests_go_to_the_rank_with_fewest_and_answers_come_in_any_order():
    async def scene():
        side = Side()
        scores = [asyncio.create_task(side.rewards.score(Prompt(k, "?"), ["a", "\ud800"])) for k in range(4)]
        await asyncio.sleep(0)
        asked = side.asked()
        assert [len(asked[3]), len(asked[4]), side.rewards.num_scoring] == [2, 2, 4]
        assert asked[3][0].responses == ("a", "?") and asked[3][0].truncated == (False, False)
        for rank in (4, 3):
            for request in reversed(asked[rank]):
                value = float(request.prompt.prompt_id)
                side.answer(rank, Scored(request.request_id, (RewardResult(value, {}), RewardResult(-value, {}))))
        for number, score in enumerate(scores):
            assert [result.reward for result in await score] == [number, -number]
        assert side.rewards.stats() == {"answers": 4.0, "waiting": 0.0}
        # Two wait at rank 3: the next two go to rank 4, whatever their turn.
        waiting = [asyncio.create_task(side.rewards.score(PROMPT, ["a"])) for _ in range(4)]
        await asyncio.sleep(0)
        for request in side.asked()[4]:
            side.answer(4, Scored(request.request_id, (RewardResult(1.0, {}),)))
        waiting += [asyncio.create_task(side.rewards.score(PROMPT, ["a"])) for _ in range(2)]
        await asyncio.sleep(0)
        asked = side.asked()
        assert [len(asked[3]), len(asked[4])] == [0, 2]
        for task in waiting:
            task.cancel()

    play(scene())


def test_rollouts_begin_with_different_reward_ranks():
    async def scene(role_rank: int) -> int:
        side = Side(role_rank=role_rank)
        score = asyncio.create_task(side.rewards.score(PROMPT, ["a"]))
        await asyncio.sleep(0)
        score.cancel()
        return next(rank for rank, requests in side.asked().items() if requests)

    assert [asyncio.run(scene(role_rank)) for role_rank in range(4)] == [3, 4, 3, 4]


@pytest.mark.parametrize(
    ("problem", "kind", "words"),
    [
        ("unscorable", UnscorableGold, "^no gold in prompt 7$"),
        ("error", RewardError, r"^no gold in prompt 7 \(reward 0 on node3\)$"),
    ],
)
def test_errors_are_those_of_a_pool_beside_the_engine(problem, kind, words):
    async def scene():
        side = Side()
        score = asyncio.create_task(side.rewards.score(PROMPT, ["a"]))
        await asyncio.sleep(0)
        [request] = side.asked()[3]
        side.answer(3, Scored(request.request_id, (), problem, "no gold in prompt 7"))
        with pytest.raises(kind, match=words):
            await score
        with pytest.raises(ValueError, match="2 truncation flags for 1 responses"):
            await side.rewards.score(PROMPT, ["a"], [True, False])
        assert side.rewards.num_scoring == 0

    play(scene())


def test_a_reward_rank_that_answers_nothing_is_named(monkeypatch):
    monkeypatch.setattr(remote, "LAST_LOOK_S", 0.05)

    async def scene():
        side = Side(deadline_s=0.2)
        score = asyncio.create_task(side.rewards.score(PROMPT, ["a"]))
        with pytest.raises(TimeoutError, match=r"reward 0 on node3 .*rewards.answer_deadline_s=0.2.* prompt 7 "):
            await score

    play(scene())


def test_a_rank_that_answers_others_is_not_given_up_and_late_answers_are_dropped(monkeypatch):
    monkeypatch.setattr(remote, "LAST_LOOK_S", 0.05)

    async def scene():
        side = Side(deadline_s=0.5)
        scores = [asyncio.create_task(side.rewards.score(PROMPT, ["a"])) for _ in range(8)]
        await asyncio.sleep(0)
        requests = side.asked()[3]
        scores[2].cancel()
        for request in requests:  # one every 0.3 s, the last after 1.2 s
            await asyncio.sleep(0.3)
            side.answer(3, Scored(request.request_id, (RewardResult(1.0, {}),)))
        assert (await scores[6])[0].reward == 1.0

        for score in scores:
            score.cancel()

    play(scene())


# ---- the controller's side, and the report's --------------------------------------


def test_the_controller_waits_for_reward_ranks_shows_and_stops_them(tmp_path, monkeypatch):
    quicken(monkeypatch)
    config = make_config(tmp_path, groups__reward=GroupConfig(nodes=1, ranks_per_node=2), run__start_deadline_s=0.2)
    world = FakeWorld(config, RunPaths(tmp_path / "late"), Disk(), 0)
    world._inbox.pop()  # the second one's RewardReady
    with pytest.raises(TimeoutError, match=r"for reward 1 on node5 to load"):
        world.run()
    world = FakeWorld(config, RunPaths(tmp_path / "run"), Disk(), 0)
    world.run()
    assert {4, 5} <= world.stopped
    ranks = json.loads(world.paths.status.read_text())["ranks"]
    assert [ranks[rank]["role"] for rank in ("3", "4", "5")] == ["rollout", "reward", "reward"]
    assert ranks["5"]["checks"] > 0 and ranks["5"]["time"] > 0


def test_the_report_tells_scoring_from_idleness(tmp_path, monkeypatch):
    quicken(monkeypatch)
    paths = make_run(tmp_path).paths
    set_times(paths, [(T0, 1)])
    write_ranks(paths)
    telemetry = Telemetry(paths.spans("reward", 0))
    telemetry._write({"t": T0, "c": "start", "v": 1, "role": "reward", "rank": 0, "clock_s": 0.0, "clock_error_s": 0.1})
    telemetry._write({"t": T0 + 3.0, "c": "reward.seconds", "v": 0.0, "checks": 0})
    telemetry.record_span("reward.idle", T0 + 5.0, 10.0)
    telemetry.record_span("reward.score", T0 + 15.0, 2.0, queue=9)
    telemetry.record_span("reward.idle", T0 + 25.0, 4.0)
    telemetry.close()
    times = load_timeline(load_history(paths.root))
    [rank] = times.of("reward")
    assert dict(+rank.seconds) == pytest.approx({START: 3.0, IDLE: 14.0, SCORE: 12.0})
    assert times.reward_queue == 9 and not rank.waits
