"""Micro-batches and minibatches: nothing lost, budgets kept, Algorithm 1 as the paper writes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.trainer import microbatch

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def algorithm_1(lengths, capacity, k_min):
    """The paper's listing, in plain loops."""
    batches = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        candidates = [b for b in batches if sum(lengths[i] for i in b) + lengths[index] <= capacity]
        if len(batches) < k_min or not candidates:
            batches.append([index])
        else:
            min(candidates, key=len).append(index)
    return batches


def assert_partition(micro_batches, num):
    assert sorted(index for micro_batch in micro_batches for index in micro_batch) == list(range(num))


@given(LENGTHS, st.integers(1, 100), st.integers(1, 6))
def test_balanced_is_algorithm_1(lengths, capacity, k_min):
    micro_batches = microbatch.balanced(lengths, capacity, k_min)
    assert micro_batches == algorithm_1(lengths, capacity, k_min)
    assert_partition(micro_batches, len(lengths))
    for micro_batch in micro_batches:
        assert sum(lengths[i] for i in micro_batch) <= capacity or len(micro_batch) == 1
    assert len(micro_batches) >= min(k_min, len(lengths))


def test_balanced_by_hand():
    # 9 and 8 open one each (k_min); 4 fits both, equal counts: the first; 3 fits the one with fewer.
    assert microbatch.balanced([4, 9, 3, 8], capacity=13, min_micro_batches=2) == [[1, 0], [3, 2]]


def test_a_sequence_above_the_budget_stands_alone():
    assert microbatch.balanced([5, 100, 5], capacity=10) == [[1], [0, 2]]
    assert microbatch.first_fit_decreasing([5, 100, 5], capacity=10) == [[1], [0, 2]]


@given(LENGTHS, st.integers(1, 100))
def test_first_fit_decreasing(lengths, capacity):
    expected, loads = [], []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for slot, load in enumerate(loads):
            if load + lengths[index] <= capacity:
                expected[slot].append(index)
                loads[slot] += lengths[index]
                break
        else:
            expected.append([index])
            loads.append(lengths[index])
    micro_batches = microbatch.first_fit_decreasing(lengths, capacity)
    assert micro_batches == expected
    assert_partition(micro_batches, len(lengths))


def test_padded_keeps_the_order_of_arrival():
    assert microbatch.padded([7, 1, 9, 2, 5], 2) == [[0, 1], [2, 3], [4]]
    assert microbatch.padded([], 2) == []


@given(LENGTHS, st.integers(1, 100), st.integers(0, 50))
def test_pad_count_gives_exactly_num(lengths, capacity, extra):
    micro_batches = microbatch.balanced(lengths, capacity)
    num = len(micro_batches) + extra
    padded = microbatch.pad_count(micro_batches, num)
    assert len(padded) == num
    assert_partition(padded, len(lengths))
    # Empty ones only when no sequence is left to split off.
    assert sum(bool(micro_batch) for micro_batch in padded) == min(num, len(lengths))
    for micro_batch in padded:
        assert sum(lengths[i] for i in micro_batch) <= capacity or len(micro_batch) == 1


def test_pad_count_leaves_its_argument_alone_and_refuses_to_shrink():
    given_list = [[0, 1, 2]]
    microbatch.pad_count(given_list, 2)
    assert given_list == [[0, 1, 2]]
    with pytest.raises(ValueError, match="2 micro-batches cannot become 1"):
        microbatch.pad_count([[0], [1]], 1)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=64), st.integers(1, 8), st.integers(0, 2**40))
def test_minibatches_are_even_and_deterministic(lengths, num, seed):
    num = min(num, len(lengths))
    minibatches = microbatch.split_minibatches(lengths, num, seed)
    assert_partition(minibatches, len(lengths))
    sizes = [len(minibatch) for minibatch in minibatches]
    assert max(sizes) - min(sizes) <= 1
    # Dealt from a sorted list, the sums telescope: they differ by less than the longest sequence.
    tokens = [sum(lengths[i] for i in minibatch) for minibatch in minibatches]
    assert max(tokens) - min(tokens) <= max(lengths)
    assert minibatches == microbatch.split_minibatches(lengths, num, seed)


def test_minibatches_differ_between_seeds():
    lengths = list(range(1, 33))
    splits = {str(microbatch.split_minibatches(lengths, 4, seed)) for seed in range(5)}
    assert len(splits) == 5


def test_more_minibatches_than_sequences_is_refused():
    with pytest.raises(ValueError, match="algorithm.minibatches=3"):
        microbatch.split_minibatches([1, 2], 3, 0)
