"""The real controller against fake trainers and rollouts (controller_world): whole runs in a second.

Each ends with the audit of its own folder, which reads journal and spool independently.
"""

from __future__ import annotations

import json
import os
from collections import Counter

import msgspec
import pytest

import controller_world
from areal_hpc.analysis.audit import audit
from areal_hpc.controller import loop, progress, shutdown, startup
from areal_hpc.config.errors import ConfigError
from areal_hpc.config.schema import OnChange, OnExisting
from areal_hpc.controller.evaluation import Evaluation
from areal_hpc.controller.ledger import read_ledger
from areal_hpc.data.datasets import load_prompt_sets
from areal_hpc.messages import Publish, SaveCheckpoint, TrainBatch
from areal_hpc.paths import RunPaths
from controller_world import Crash, Disk, Faults, FakeWorld, make_config


@pytest.fixture
def printed(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(progress, "echo", lines.append)
    # A crash here loses the process, not the machine; the disk's time would be most of the test.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for module, name in ((loop, "IDLE_S"), (shutdown, "POLL_S"), (startup, "POLL_S")):
        monkeypatch.setattr(module, name, 0.0)
    return lines


@pytest.fixture
def go(tmp_path, printed):
    """go(faults, seed, **configuration) runs one attempt in the test's folder; the disk is kept over calls."""
    disk = Disk()

    def start(faults: Faults | None = None, seed: int = 0, *, crash: bool = False, **changes: object) -> FakeWorld:
        config = make_config(tmp_path, **changes)
        world = FakeWorld(config, RunPaths(tmp_path / "run"), disk, seed, faults)
        if crash:
            with pytest.raises(Crash):
                world.run()
        else:
            world.run()
            assert world.stopped == {*world.trainer_ranks, *world.rollout_ranks, *world.reward_ranks}
        result = audit(world.paths)
        assert result.problems == []
        return world

    return start


def samples(world: FakeWorld) -> list[tuple[int, int]]:
    return [sample for step in world.history for sample in step.samples]


def records(world: FakeWorld) -> list[dict]:
    return [json.loads(line) for line in world.paths.metrics.read_text().splitlines()]


def status(world: FakeWorld) -> dict:
    return json.loads(world.paths.status.read_text())


def test_a_run_from_beginning_to_end(go, printed):
    world = go(checkpoint__every=2, eval__every=3, eval__num_samples=2, eval__temperature=0.6)
    assert [step.version for step in world.history] == [0, 1, 2, 3, 4, 5]
    assert all(len(step.samples) == 8 for step in world.history)
    assert len(set(samples(world))) == 48
    assert max(step.version - low for step in world.history for low in step.min_versions) <= 2
    # Every version is published once, saved at 2, 4, 6, and the last one exported.
    assert [command.version for command in world.commands if isinstance(command, Publish)] == [1, 2, 3, 4, 5, 6]
    saves = [command for command in world.commands if isinstance(command, SaveCheckpoint)]
    assert [(save.train_step, save.export_hf) for save in saves] == [(2, False), (4, False), (6, True)]
    # Evaluated before the first step, every third version and after the last, all 5 prompts.
    assert Counter(version for version, _ in world.evaluations) == {0: 3, 3: 3, 6: 3}
    evals = [record for record in records(world) if record["kind"] == "eval"]
    assert [(record["train_step"], record["num_prompts"]) for record in evals] == [(0, 5), (3, 5), (6, 5)]
    assert "pass@2" in evals[0]
    assert len((world.paths.evals / "step-00000003.jsonl").read_text().splitlines()) == 10
    steps = [record for record in records(world) if record["kind"] == "step"]
    assert [record["train_step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert {"version", "epoch", "time", "attempt", "reward_mean", "accuracy", "gen_tokens_per_s", "staleness_mean",
            "staleness_max", "wait_s", "ready_groups", "leases_expired", "trainer/loss"} <= steps[0].keys()
    assert status(world)["state"] == "finished" and status(world)["train_step"] == 6
    assert len([line for line in printed if line.split()[0] in "123456"]) == 6
    assert list(world.paths.tensorboard.glob("events*"))


def test_sync_mode_generates_trains_updates_in_turn(go):
    world = go(run__mode="sync", algorithm__max_staleness=4)
    assert all(low == step.version for step in world.history for low in step.min_versions)
    # Nothing is granted between a batch and its version: 4 groups per version, no more.
    grants = Counter(record["version"] for record in read_ledger(world.paths.ledger) if record["k"] == "admitted")
    assert grants == dict.fromkeys(range(6), 4)


@pytest.mark.parametrize("backlog", [0, 3, 4])
def test_a_backlog_makes_data_as_old_as_it_is_long_and_ends_with_the_run(tmp_path, printed, backlog):
    config = make_config(
        tmp_path, 48, algorithm__max_staleness=4, algorithm__backlog=backlog, run__total_steps=12, eval__every=0
    )
    # Few answers at a time: generation sets the pace, by itself no data would be old.
    world = FakeWorld(config, RunPaths(tmp_path / "run"), Disk(), 0, capacity=1)
    world.run()
    ages = [[step.version - low for low in step.min_versions] for step in world.history]
    assert len(ages) == 12 and all(max(age) <= 4 for age in ages)
    # From the time on at which the first batches are used up; an answer is finished at most one version late.
    later = [age for step in ages[4:] for age in step]
    assert min(later) >= backlog - 1 if backlog else max(later) <= 1, ages


@pytest.mark.parametrize(("epochs", "expected"), [(1, [16, 14]), (2, [16, 14, 16, 14])])
def test_the_end_of_data_30_prompts_in_batches_of_16(go, epochs, expected):
    world = go(
        num_prompts=30, rollout__group_size=1, trainer__batch_size=16, data__epochs=epochs, run__total_steps=100
    )
    assert [len(step.samples) for step in world.history] == expected
    for epoch in range(epochs):
        mine = [group for step in world.history if step.manifest.epoch == epoch for group, _ in step.samples]
        assert sorted(mine) == list(range(30 * epoch, 30 * epoch + 30))
    assert status(world)["state"] == "finished"
    assert any(isinstance(command, SaveCheckpoint) and command.export_hf for command in world.commands)


def test_both_trainer_ranks_get_the_same_commands_in_order(go):
    world = go(trainer__tp=1, trainer__dp=2, groups__trainer=controller_world.GroupConfig(nodes=2))
    shares = [step.manifest.dp_rows for step in world.history]
    assert all(len(share) == 2 for share in shares)


def test_failed_publications_are_tried_again_with_the_old_version_serving(go, printed):
    world = go(Faults(publish=0.4), seed=3, weights__max_retries=20)
    published = [command.version for command in world.commands if isinstance(command, Publish)]
    assert sorted(set(published)) == [1, 2, 3, 4, 5, 6] and len(published) > 6
    assert any("was not published" in line for line in printed)


def test_a_version_that_cannot_be_published_ends_the_run(go):
    with pytest.raises(RuntimeError, match="version 1 could not be published in 3 attempts: test"):
        go(Faults(publish=1.0), weights__max_retries=2)


def test_engine_restarts_failures_stragglers_and_duplicates(go):
    faults = Faults(restart=0.03, fail=0.1, duplicate=0.3, straggler=0.1)
    world = go(faults, seed=5, run__total_steps=10, rollout__max_attempts=20)
    assert len(set(samples(world))) == 80
    step = [record for record in records(world) if record["kind"] == "step"][-1]
    assert step["granted_again"] > 0 and step["duplicates"] > 0 and step["engine_restarts"] > 0


def test_lost_results_expire_and_are_granted_to_another_rank(go):
    world = go(Faults(silent=0.2), seed=1, rollout__lease_deadline_s=0.2, rollout__max_attempts=20)
    attempts = Counter(lease.attempt for lease in world.granted)
    assert attempts[2] > 0
    assert len(samples(world)) == 48


def test_a_shard_that_the_trainers_cannot_read_is_asked_again(go, printed):
    world = go(Faults(unread=0.3), seed=2, rollout__max_attempts=20)
    assert len(set(samples(world))) == 48
    assert list(world.paths.quarantine.glob("*.h5"))
    assert any("cannot be read" in line for line in printed)
    with pytest.raises(RuntimeError, match="could not read 3 batches in a row.*zero-filled"):
        go(Faults(unread=1.0), seed=2, rollout__max_attempts=2, run__total_steps=9)


def test_a_shard_that_only_the_trainers_cannot_see_is_neither_moved_nor_asked_again(go, printed):
    world = go(Faults(hidden=0.3), seed=2, rollout__max_attempts=20)
    assert len(set(samples(world))) == 48
    journal = list(read_ledger(world.paths.ledger))
    refused = [record for record in journal if record["k"] == "unconsumed"]
    assert refused and not [record for record in journal if record["k"] == "damaged"]
    assert not world.paths.quarantine.exists()
    assert any("is whole, though a trainer could not read it (it is missing)" in line for line in printed)
    assert audit(world.paths).problems == []
    with pytest.raises(RuntimeError, match="could not read 3 batches in a row.*it is missing"):
        go(Faults(hidden=1.0), seed=2, rollout__max_attempts=2, run__total_steps=9)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("turn", [3, 25, 60])
def test_a_stop_drains_saves_and_the_next_attempt_ends_where_one_run_would(go, mode, turn):
    first = go(Faults(stop_at=turn), run__mode=mode, num_prompts=24, data__epochs=2, run__total_steps=12)
    assert status(first)["state"] == "stopped" and status(first)["requeue"] is True
    assert status(first)["reason"] == "walltime (test)"
    step = first.train_step
    assert step < 12
    second = go(seed=9, run__mode=mode, num_prompts=24, data__epochs=2, run__total_steps=12)
    assert second.train_step == 12 and len(second.history) == 12
    assert second.history[:step] == first.history[:step]  # saved at the stop: no step is repeated
    assert sorted(samples(second)) == [(group, k) for group in range(48) for k in range(2)]
    stop = [record for record in read_ledger(second.paths.ledger) if record["k"] == "stop"]
    assert [record["state"] for record in stop] == ["stopped", "finished"]
    attempts = {record["attempt"] for record in records(second) if record["kind"] == "step"}
    assert attempts <= {1, 2} and 2 in attempts


@pytest.mark.parametrize("turn", [20, 45, 70, 95])
def test_a_crash_loses_nothing_and_trains_nothing_twice(go, turn):
    options = {"num_prompts": 24, "data__epochs": 2, "run__total_steps": 12, "checkpoint__every": 3}
    go(Faults(crash_at=turn), crash=True, **options)
    go(Faults(crash_at=turn // 2), seed=1, crash=True, **options)
    world = go(seed=2, **options)
    assert world.train_step == 12
    assert sorted(samples(world)) == [(group, k) for group in range(48) for k in range(2)]


def test_a_changed_number_of_rollouts_or_batch_size_is_no_obstacle(go):
    go(Faults(stop_at=40), run__total_steps=12)
    nodes = controller_world.GroupConfig(nodes=3)
    world = go(seed=1, run__total_steps=12, groups__rollout=nodes, trainer__batch_size=12)
    assert world.train_step == 12 and len(set(samples(world))) == len(samples(world))


def test_a_changed_dataset_or_seed_is_refused(go):
    go(Faults(stop_at=40))
    with pytest.raises(ConfigError, match=r"data.train, run.seed or data.shuffle .*digest \w{12}.*data.on_change=restart"):
        go(num_prompts=13)
    with pytest.raises(ConfigError, match="not what this run was last started with"):
        go(run__seed=1)
    assert go().train_step == 6


@pytest.mark.parametrize("num_prompts", [7, 30])
@pytest.mark.parametrize("turn", [20, 60])
def test_changed_data_begin_anew_on_request(go, printed, num_prompts, turn):
    """24 prompts, then others: each of these is trained once an epoch, none of the first is any more."""
    first = go(Faults(stop_at=turn), num_prompts=24, run__total_steps=100)
    step = first.train_step
    options = {"num_prompts": num_prompts, "data__epochs": 2, "run__total_steps": 100, "run__seed": 5}
    second = go(seed=1, data__on_change=OnChange.restart, **options)
    later = [sample for done in second.history[step:] for sample in done.samples]
    begin = min(group for group, _ in later)
    assert begin % num_prompts == 0 and begin > max((group for group, _ in samples(first)), default=-1)
    assert sorted(later) == [(group, k) for group in range(begin, begin + 2 * num_prompts) for k in range(2)]
    assert any("warning: the training prompts or their order changed (digest " in line for line in printed)
    # From now on these are the run's prompts: no question, no warning.
    printed.clear()
    third = go(seed=2, **options)
    assert third.history == second.history and not any("begin anew" in line for line in printed)


def test_a_step_back_behind_a_change_of_data_does_not_bring_the_old_prompts_back(go):
    first = go(Faults(stop_at=60), num_prompts=24, checkpoint__every=1, run__total_steps=100)
    assert first.train_step >= 3
    options = {"num_prompts": 9, "data__epochs": 1, "run__total_steps": 100, "data__on_change": OnChange.restart}
    go(Faults(crash_at=40), seed=1, crash=True, **options)
    for step in [step for step in first.disk.checkpoints if step > 1]:
        del first.disk.checkpoints[step]  # found damaged
    world = go(seed=2, **options)
    assert world.history[:1] == first.history[:1]
    begin = [record for record in read_ledger(world.paths.ledger) if record["k"] == "run"][-1]["first_group"]
    later = sorted(sample for done in world.history[1:] for sample in done.samples)
    assert begin in (27, 36) and later == [(group, k) for group in range(begin, begin + 9) for k in range(2)]


def test_changed_options_are_named_and_journalled(go, printed):
    go(Faults(stop_at=40))
    world = go(algorithm__clip_eps=0.3, trainer__batch_size=12, run__on_existing=OnExisting.resume)
    (line,) = [line for line in printed if "changed since the last attempt" in line]
    assert line == (
        f"changed since the last attempt, from step {first_step(world)} on: "
        "trainer.batch_size 8 -> 12; algorithm.clip_eps 0.2 -> 0.3"
    )
    runs = [record for record in read_ledger(world.paths.ledger) if record["k"] == "run"]
    assert [record["settings"]["algorithm.clip_eps"] for record in runs] == [0.2, 0.3]
    printed.clear()
    go(algorithm__clip_eps=0.3, trainer__batch_size=12, run__on_existing=OnExisting.resume)
    assert not any("changed since" in line for line in printed)


def first_step(world: FakeWorld) -> int:
    """The step that the last attempt went on from."""
    return [record for record in read_ledger(world.paths.ledger) if record["k"] == "run"][-1]["train_step"]


def test_a_finished_run_started_again_does_nothing(go):
    world = go()
    before = world.paths.ledger.stat().st_size
    again = go(seed=7)
    assert again.granted == [] and again.evaluations == []
    assert status(again)["state"] == "finished"
    kinds = [record["k"] for record in read_ledger(world.paths.ledger)]
    assert kinds[-2:] == ["run", "stop"] and world.paths.ledger.stat().st_size > before


def test_a_run_that_was_killed_in_its_last_evaluation_evaluates_again(go):
    world = go(run__total_steps=3)
    data = world.paths.ledger.read_bytes().splitlines(keepends=True)
    world.paths.ledger.write_bytes(b"".join(line for line in data if b'"eval"' not in line or b'"train_step":0' in line))
    again = go(run__total_steps=3)
    assert {version for version, _ in again.evaluations} == {3}


def test_more_steps_can_be_asked_for_later(go):
    go(run__total_steps=3)
    world = go(seed=1, run__total_steps=5)
    assert world.train_step == 5 and len(set(samples(world))) == 40


def test_prompts_without_a_usable_answer_are_left_out_and_counted(go, printed):
    world = go(Faults(unscorable=0.3), seed=4, num_prompts=30, data__epochs=1, run__total_steps=50)
    dropped = sum(len(r["groups"]) for r in read_ledger(world.paths.ledger) if r["k"] == "dropped")
    assert dropped > 3
    assert len(samples(world)) == 2 * (30 - dropped)
    assert any("left out: gold cannot be parsed" in line for line in printed)


def test_places_of_dropped_prompts_are_given_back(go):
    """With eta 0 there are 4 places for groups; 16 dropped prompts would have filled them."""
    world = go(Faults(unscorable=0.5), seed=4, run__mode="sync", num_prompts=40, run__total_steps=4)
    assert sum(len(r["groups"]) for r in read_ledger(world.paths.ledger) if r["k"] == "dropped") >= 8
    assert world.train_step == 4


def test_a_smaller_bound_at_a_resume_discards_what_is_too_old(go):
    first = go(Faults(stop_at=50), algorithm__max_staleness=4, run__total_steps=20)
    world = go(seed=1, algorithm__max_staleness=0, run__total_steps=20)
    gone = [g for r in read_ledger(world.paths.ledger) if r["k"] == "discarded" for g in r["groups"]]
    assert gone and not set(gone) & {group for group, _ in samples(world)}
    for step in world.history[first.train_step :]:
        assert all(low == step.version for low in step.min_versions)


def test_a_shard_whose_announcement_was_lost_is_found_at_the_next_start(go, monkeypatch):
    unheard: list[int] = []

    def crash(world, rank):
        if world.train_step < 2:
            return real(world, rank)
        done = world._finished[rank]
        world._writers[rank].commit([sample for _, group in done for sample in group])
        unheard.extend(lease.group_id for lease, _ in done)
        raise Crash

    real = FakeWorld._commit
    monkeypatch.setattr(FakeWorld, "_commit", crash)
    go(crash=True, checkpoint__every=1)
    monkeypatch.setattr(FakeWorld, "_commit", real)
    world = go(seed=1, checkpoint__every=1)
    assert unheard and not set(unheard) & {lease.group_id for lease in world.granted}
    assert set(unheard) <= {group for group, _ in samples(world)}


def test_a_run_whose_prompts_are_all_dropped_says_so(go):
    with pytest.raises(RuntimeError, match="the last 12 prompts were all dropped.*gold cannot be parsed"):
        go(Faults(unscorable=1.0))


def test_data_that_ends_before_the_first_step_is_an_error(go):
    with pytest.raises(RuntimeError, match="the data ended without a training step: of 12 prompts"):
        # Constant rewards and dynamic sampling: every group is refused.
        go(data__epochs=1, algorithm__dynamic_sampling=True, rollout__group_size=1, trainer__batch_size=12,
           algorithm__max_staleness=0)


def test_a_stall_names_what_is_awaited_from_whom(go):
    with pytest.raises(TimeoutError, match=r"nothing happened for 0.5 s .*groups from rollout 0 on node2, rollout 1 on node3"):
        go(Faults(silent=1.0), run__stall_deadline_s=0.5, data__heldout=controller_world.Config().data.heldout)


def test_missing_ranks_are_named_at_the_start(tmp_path, printed):
    config = make_config(tmp_path, run__start_deadline_s=0.3)
    world = FakeWorld(config, RunPaths(tmp_path / "run"), Disk(), 0)
    world._inbox = type(world._inbox)(entry for entry in world._inbox if entry[0] == 2)
    with pytest.raises(TimeoutError, match="rollout 1 on node3, trainer 0 on node1 to load"):
        world.run()


def test_a_stop_before_the_ranks_are_ready_lets_them_go(tmp_path, printed):
    config = make_config(tmp_path)
    world = FakeWorld(config, RunPaths(tmp_path / "run"), Disk(), 0)
    world._inbox.clear()
    world.stop.request("interrupt (SIGINT)")
    world.run()
    assert world.stopped == {1, 2, 3}
    assert status(world)["state"] == "stopped"


def test_rollouts_that_do_not_drain_are_named(tmp_path, printed, monkeypatch):
    config = make_config(tmp_path, run__drain_deadline_s=0.3)
    world = FakeWorld(config, RunPaths(tmp_path / "run"), Disk(), 0, Faults(stop_at=30))
    real = world._order
    monkeypatch.setattr(
        world, "_order", lambda rank, message: None if (rank, type(message).__name__) == (3, "Drain") else real(rank, message)
    )
    with pytest.raises(TimeoutError, match=r"run.drain_deadline_s\) at the stop for rollout 1 on node3"):
        world.run()


def test_an_evaluation_of_two_versions_is_an_error(tmp_path, printed):
    config = make_config(tmp_path)
    world = FakeWorld(config, RunPaths(tmp_path / "run"), Disk(), 0)
    real = world._evaluate

    def stale(rank, request):
        result = real(rank, request)
        samples = tuple(msgspec.structs.replace(sample, version=7) for sample in result.samples)
        return msgspec.structs.replace(result, samples=samples)

    world._evaluate = stale
    with pytest.raises(ValueError, match=r"evaluation at version 0 got samples of version \[7\]"):
        world.run()


def test_nothing_is_published_while_an_evaluation_runs(go):
    """The fake answers by the weights that serve then; the controller refuses a mixture."""
    world = go(eval__every=1, eval__batch_prompts=1, run__total_steps=8)
    assert Counter(version for version, _ in world.evaluations) == dict.fromkeys(range(9), 5)
    order = [type(command).__name__ for command in world.commands if isinstance(command, (Publish, TrainBatch))]
    assert order == ["TrainBatch", "Publish"] * 8


@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl", "telemetry/controller-00000.jsonl"])
def test_nothing_is_written_through_a_symbolic_link(go, tmp_path, name):
    """Set while the run went on, after the folder was looked through."""
    outside = tmp_path / "precious"
    outside.write_text("not ended by a line feed")
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    with pytest.raises(OSError, match=f"{link} is a symbolic link.*remove it"):
        go()
    assert outside.read_text() == "not ended by a line feed"
    link.unlink()
    assert go().train_step == 6


def test_cut_sampling_is_journalled_once_and_leaves_evaluations_alone(go, printed):
    world = go(rollout__top_p=0.9, eval__every=3, eval__top_k=7)
    told = [record["text"] for record in records(world) if "importance weights are biased" in record.get("text", "")]
    assert len(told) == 1 and "rollout.top_p=0.9" in told[0] and told[0] in printed
    heldout = load_prompt_sets(world.config.data).heldout
    requests = Evaluation(world.config, heldout, train_step=0, version=0, first_id=0).requests
    assert {(request.sampling.top_p, request.sampling.top_k) for request in requests} == {(1.0, 7)}
