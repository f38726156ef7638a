"""Answers that a stop cuts short: kept, granted again with what they have, and audited."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

import controller_world
from areal_hpc.analysis.audit import audit
from areal_hpc.controller import loop, progress, shutdown, startup
from areal_hpc.controller.batcher import ReadyGroup
from areal_hpc.controller.leases import LeaseBook
from areal_hpc.controller.ledger import read_ledger
from areal_hpc.controller.recovery import committed_record, replay_ledger
from areal_hpc.paths import RunPaths
from areal_hpc.rollout.generation import Generation, join
from areal_hpc.rollout.unfinished import Turn, read_turns, to_rows
from areal_hpc.spool.shard import ShardWriter
from areal_hpc.types import Begun, Lease, Prompt, SamplingSpec, ShardRow, unfinished_run_id
from controller_world import Crash, Disk, Faults, FakeWorld, make_config

SAMPLING = SamplingSpec(max_new_tokens=9)
PROMPT = Prompt(3, "1+1=")


def generation(*tokens: int, version: int = 2, reason: str = "abort") -> Generation:
    count = len(tokens)
    return Generation(
        np.array(tokens, np.int32), -np.arange(count, dtype=np.float32), np.full(count, version, np.int32), reason
    )


def lease(**changes) -> Lease:
    values = {"lease_id": 1, "group_id": 7, "epoch": 0, "attempt": 1, "group_size": 2}
    return Lease(**values, prompt=PROMPT, sampling=SAMPLING, **changes)


# ---- the shard ---------------------------------------------------------------------------


def test_turns_come_back_from_the_shard_as_they_were(tmp_path):
    turns = {
        (0, 0): Turn([5, 6], generation(10, 11, reason="stop")),
        (0, 1): Turn([5, 6, 10, 11, 8], generation(12)),
        (1, 0): Turn([5, 6], generation()),  # nothing generated: nothing to keep
    }
    paths = RunPaths(tmp_path)
    info = ShardWriter(paths.unfinished(0), unfinished_run_id("run"), 0).commit(to_rows(turns, lease()))
    assert [(row.group_id, row.sample_index, row.num_loss_tokens, row.min_version) for row in info.rows] == [
        (7, 0, 2, 2), (7, 0, 1, 2),
    ]  # fmt: skip
    begun = Begun(paths.relative(info.path), (0, 1))
    found = read_turns(paths, "run", lease(begun=begun))
    assert found.keys() == {(0, 0), (0, 1)}
    for key, turn in found.items():
        assert turn.context == turns[key].context
        for name in ("token_ids", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(turn.generation, name), getattr(turns[key].generation, name))
        assert turn.generation.finish_reason == turns[key].generation.finish_reason
    # Of another run, damaged or gone: a warning, and the group is answered anew.
    assert read_turns(paths, "other", lease(begun=begun)) == {}
    data = bytearray(info.path.read_bytes())
    data[data.index(np.array([5, 6, 10, 11], np.int32).tobytes())] ^= 1
    info.path.write_bytes(data)
    assert read_turns(paths, "run", lease(begun=begun)) == {}


def test_parts_of_an_answer_and_the_tail_that_may_begin_a_stop_string():
    assert join([], "abort").token_ids.size == 0
    whole = join([generation(1, 2), generation(3, version=4)], "length")
    assert whole.token_ids.tolist() == [1, 2, 3] and whole.versions.tolist() == [2, 2, 4]
    assert generation(1, 2, 3, 4).without_tail(()).token_ids.tolist() == [1, 2, 3, 4]
    assert generation(1, 2, 3, 4).without_tail(("ab", "abc")).token_ids.tolist() == [1]
    assert generation(1).without_tail(("ab",)).token_ids.tolist() == []


# ---- leases ------------------------------------------------------------------------------


def begun_group(*versions: int) -> ReadyGroup:
    rows = tuple(
        ShardRow(row, 7, 3, row, 6, 4, version, version, 0.0, "abort", 1) for row, version in enumerate(versions)
    )
    return ReadyGroup(7, 0, "unfinished/rollout-00000/a.h5", rows)


def granted(book: LeaseBook, version: int, train_version: int | None = None) -> Lease:
    entry = book.grant_next(0.0, version, train_version)
    assert entry is not None
    return entry[1]


def test_a_lease_goes_on_with_what_the_bound_still_allows():
    book = LeaseBook(room={3: 9}, group_size=3, sampling=SAMPLING, deadline_s=9.0, max_attempts=9, max_staleness=2)
    book.admit(7, 0, PROMPT, 5, begun_group(2, 3, 5))
    first = granted(book, 5)
    assert first.begun == Begun("unfinished/rollout-00000/a.h5", (1, 2))
    assert list(book.classes()) == [(0, 3, 1)]  # a batch has to wait for it as for any group of version 3
    # Lost and granted again later: only what is still young enough, and nothing where the next
    # batch is trained from a newer version than the one that is served.
    book.fail(first.lease_id, retry=True)
    second = granted(book, 5, 6)
    assert second.begun == Begun("unfinished/rollout-00000/a.h5", (2,)) and list(book.classes()) == [(0, 5, 1)]
    book.fail(second.lease_id, retry=True)
    assert granted(book, 8).begun is None and list(book.classes()) == [(0, 8, 1)]


def test_the_journal_gives_back_what_belongs_to_groups_without_a_result():
    group = begun_group(2, 3)
    run = {"k": "run", "attempt": 1, "data": "", "config": "", "train_step": 0, "batch_size": 4}
    records = [run, {"k": "admitted", "group": 7, "epoch": 0, "version": 2}]
    records.append({"k": "unfinished", **committed_record(group.path, "d", [group])})
    assert replay_ledger(records, 3).unfinished == {7: group}
    # Of weights that are lost: version 3 will come again with others.
    assert replay_ledger(records, 2).unfinished == {}
    assert replay_ledger([*records, {**run, "train_step": 2}], 3).unfinished == {}
    finished = {"k": "committed", **committed_record("spool/x.h5", "d", [group])}
    assert replay_ledger([*records, finished], 3).unfinished == {}
    newer = begun_group(3)
    again = {"k": "unfinished", **committed_record(newer.path, "d", [newer])}
    assert replay_ledger([*records, again], 3).unfinished == {7: newer}


# ---- the whole controller ----------------------------------------------------------------


@pytest.fixture
def go(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "echo", lambda line: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for module, name in ((loop, "IDLE_S"), (shutdown, "POLL_S"), (startup, "POLL_S")):
        monkeypatch.setattr(module, name, 0.0)
    disk = Disk()

    def start(faults: Faults | None = None, seed: int = 0, *, crash: bool = False, **changes: object) -> FakeWorld:
        world = FakeWorld(make_config(tmp_path, **changes), RunPaths(tmp_path / "run"), disk, seed, faults)
        if crash:
            with pytest.raises(Crash):
                world.run()
        else:
            world.run()
        return world

    return start


def records(world: FakeWorld, kind: str) -> list[dict]:
    return [record for record in read_ledger(world.paths.ledger) if record["k"] == kind]


def test_a_stopped_run_goes_on_with_its_unfinished_answers(go):
    stops = [go(Faults(stop_at=turn, straggler=0.3), seed=turn, run__total_steps=30) for turn in (60, 70, 80)]
    assert all(records(world, "unfinished") for world in stops)
    world = go(seed=4, run__total_steps=30)
    continued = records(world, "continued")
    trained = {group for record in records(world, "consumed") for group in record["groups"]}
    assert len([record for record in continued if record["group"] in trained]) >= 3
    result = audit(world.paths)
    assert result.problems == [] and result.counts["continued"] >= 3
    assert result.counts["continued"] + 0 <= result.counts["unfinished"]
    assert max(step.version - low for step in world.history for low in step.min_versions) <= 2
    last = [record for record in controller_records(world) if record["kind"] == "step"][-1]
    assert last["answers_continued"] + last["answers_begun_again"] > 0 and last["tokens_continued"] > 0


def controller_records(world: FakeWorld) -> list[dict]:
    import json

    return [json.loads(line) for line in world.paths.metrics.read_text().splitlines()]


@pytest.mark.parametrize("seed", range(6))
def test_no_promise_is_broken_by_stops_and_crashes_in_turn(go, seed):
    for attempt in range(3):
        turn = 40 + 9 * seed + 13 * attempt
        faults = Faults(straggler=0.2, fail=0.05, restart=0.01, duplicate=0.1, silent=0.02)
        go(Faults(**{**vars(faults), "stop_at": turn}), seed=10 * seed + attempt, run__total_steps=40)
        go(Faults(**{**vars(faults), "crash_at": turn}), seed=99 * seed + attempt, crash=True, run__total_steps=40)
    world = go(seed=seed, run__total_steps=12)
    assert audit(world.paths).problems == []


def test_the_audit_finds_an_answer_that_was_not_gone_on_with_but_claims_old_tokens(go, monkeypatch):
    go(Faults(stop_at=60, straggler=0.3), run__total_steps=30)

    def forged(self, lease: Lease) -> dict:
        rows = FakeWorld._true_begun(self, lease)
        for row in rows.values():
            row.tokens[1] += 1
        return rows

    monkeypatch.setattr(FakeWorld, "_true_begun", FakeWorld._begun, raising=False)
    monkeypatch.setattr(FakeWorld, "_begun", forged)
    monkeypatch.setattr(controller_world, "read_rows", copied(controller_world.read_rows))
    world = go(seed=4, run__total_steps=8)
    assert any("that are not those saved in unfinished/" in problem for problem in audit(world.paths).problems)


def copied(read):
    from dataclasses import replace

    return lambda *args, **options: [replace(row, tokens=row.tokens.copy()) for row in read(*args, **options)]


def test_a_deterministic_run_keeps_nothing(go):
    world = go(Faults(stop_at=60, straggler=0.5), run__total_steps=30, run__mode="sync", run__deterministic=True)
    assert not records(world, "unfinished")


# ---- the episode -------------------------------------------------------------------------


class Engine:
    """Answers 20, 21, ... and remembers what it was asked."""

    def __init__(self, reason: str = "stop") -> None:
        self.reason = reason
        self.asked: list[tuple[list[int], Generation | None]] = []

    async def generate(self, token_ids, sampling, request_id, seed, begun=None) -> Generation:
        self.asked.append((list(token_ids), begun))
        new = generation(20, 21, version=5, reason=self.reason)
        return join([part for part in (begun, new) if part is not None], self.reason)


def test_an_episode_goes_on_where_its_context_is_the_same_and_only_there():
    from areal_hpc.config.schema import Config
    from areal_hpc.rollout.episode import EpisodeEngine, Services, Transcript

    engine = Engine()
    services = Services(Config(), engine, None, None)
    episode = EpisodeEngine(
        services, group_id=7, group_size=4, sampling=SAMPLING, seed_parts=(0,), request_prefix="lease-1"
    )
    episode.begun = {
        (0, 0): Turn([1, 2], generation(10, 11)),
        (1, 0): Turn([1, 2], generation(10, 11, reason="stop")),
        (2, 0): Turn([1, 9], generation(10, 11)),
    }
    transcripts = [Transcript([1, 2]) for _ in range(4)]
    for index, transcript in enumerate(transcripts):
        asyncio.run(episode.generate(transcript, index))
    assert [transcript.token_ids for transcript in transcripts] == [
        [1, 2, 10, 11, 20, 21], [1, 2, 10, 11], [1, 2, 20, 21], [1, 2, 20, 21],
    ]  # fmt: skip
    assert len(engine.asked) == 3, "a whole answer is not asked again"
    assert sorted(episode.turns) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert transcripts[0].finish_reason == "stop" and transcripts[0].num_generated == 4


def test_an_answer_that_was_cut_short_is_noted_and_never_returned():
    from areal_hpc.config.schema import Config
    from areal_hpc.rollout.episode import EpisodeEngine, Services, Transcript

    episode = EpisodeEngine(
        Services(Config(), Engine("abort"), None, None), group_id=7, group_size=1, sampling=SAMPLING, seed_parts=(0,),
        request_prefix="lease-1",
    )  # fmt: skip

    async def cut() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await episode.generate(Transcript([1, 2]), 0)

    asyncio.run(cut())
    [row] = to_rows(episode.turns, lease())
    assert row.tokens.tolist() == [1, 2, 20, 21] and row.finish_reason == "abort"
