"""What tools/chaos.py believes: the counts of a run's files, made without the program's own code."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from chaos import FATAL, WEIGHTS, plan_faults
from chaos_count import count, read_spool

from areal_hpc.controller.ledger import Ledger
from areal_hpc.paths import RunPaths
from areal_hpc.spool.shard import ShardWriter
from test_spool import make_groups

SIZE = 4


@pytest.fixture
def run(tmp_path):
    """run(records, *shards of group ids) makes a run folder with this journal and these shards."""
    paths = RunPaths(tmp_path)
    paths.create()

    def make(records: list[tuple[str, dict]], *shards: list[int]) -> Path:
        ledger = Ledger(paths.ledger)
        for kind, fields in records:
            ledger.add(kind, **fields)
        ledger.close()
        writer = ShardWriter(paths.rollout_spool(0), "run-a", 0)
        for groups in shards:
            writer.commit([sample for sample in make_groups(10, SIZE) if sample.group_id in groups])
        return tmp_path

    return make


def begun(step: int) -> tuple[str, dict]:
    return ("run", {"train_step": step})


def admitted(*groups: int) -> list[tuple[str, dict]]:
    return [("admitted", {"group": group}) for group in groups]


def trained(step: int, *groups: int) -> tuple[str, dict]:
    return ("consumed", {"train_step": step, "groups": list(groups)})


def test_a_good_run_lost_nothing(run):
    folder = run([begun(0), *admitted(0, 1, 2, 3), trained(1, 0, 1), trained(2, 2, 3)], [0, 1], [2, 3])
    found = count(folder, SIZE, finished=True)
    assert (found.trained, found.lost, found.trained_twice, found.answered_again, found.waiting) == (16, 0, 0, 0, 0)


def test_a_step_that_was_lost_with_its_weights_does_not_count(run):
    records = [begun(0), *admitted(0, 1, 2), trained(1, 0), trained(2, 1), begun(1), trained(2, 1), trained(3, 2)]
    found = count(run(records, [0, 1, 2]), SIZE, finished=True)
    assert (found.trained, found.lost, found.trained_twice) == (12, 0, 0)


def test_what_is_trained_twice_in_the_surviving_history_is_counted(run):
    records = [begun(0), *admitted(0, 1), trained(1, 0), trained(2, 1), begun(2), trained(3, 1)]
    assert count(run(records, [0, 1]), SIZE, finished=True).trained_twice == SIZE


def test_a_refused_batch_was_not_trained(run):
    records = [begun(0), *admitted(0, 1), trained(1, 0), ("unconsumed", {"train_step": 1}), trained(1, 0, 1)]
    assert count(run(records, [0, 1]), SIZE, finished=True).trained_twice == 0


def test_groups_that_were_forgotten_are_lost_and_those_given_up_are_not(run):
    records = [begun(0), *admitted(0, 1, 2, 3, 4), trained(1, 0), ("dropped", {"groups": [3]})]
    folder = run(records, [0, 1], [2])
    assert count(folder, SIZE, finished=True).lost == 3 * SIZE  # 1 and 2 lie there, 4 was never answered
    assert count(folder, SIZE, finished=False) == count(folder, SIZE, finished=False).__class__(SIZE, 0, 0, 0, 3 * SIZE)


def test_a_trained_group_that_is_not_in_the_spool_is_lost(run):
    assert count(run([begun(0), *admitted(0, 1), trained(1, 0, 1)], [0]), SIZE, finished=False).lost == SIZE


def test_an_answer_that_was_made_again_is_counted(run):
    folder = run([begun(0), *admitted(0), trained(1, 0)], [0], [0])
    assert count(folder, SIZE, finished=True).answered_again == SIZE
    assert [len(copies) for copies in read_spool(folder / "spool").values()] == [2]


def test_a_torn_journal_is_read_up_to_the_tear(run):
    folder = run([begun(0), *admitted(0), trained(1, 0)], [0])
    with open(folder / "ledger.jsonl", "ab") as file:
        file.write(b'0badc0de {"k":"consumed","train_step":2,"groups":[0]}')
    assert count(folder, SIZE, finished=True).trained_twice == 0


@pytest.mark.parametrize("num", [1, 2, 8, 50])
@pytest.mark.parametrize("disk", [True, False])
def test_a_plan_has_its_number_of_faults_in_proportion_and_ends_with_a_restart(num, disk):
    for seed in range(20):
        plan = plan_faults(num, random.Random(seed), disk=disk)
        assert len(plan) == num and plan[-1] in FATAL and (disk or "disk full" not in plan)
        assert plan == plan_faults(num, random.Random(seed), disk=disk)
        if num == 50:
            assert set(plan) == set(WEIGHTS) - (set() if disk else {"disk full"})
