"""Which sequences form each optimizer update, and how they are cut into micro-batches.

Pure functions of lengths, called by the trainer's step on every rank; indices into the
given list go in and come out, every index exactly once. No torch: nothing here touches
a tensor.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np


def balanced(lengths: Sequence[int], capacity: int, min_micro_batches: int = 1) -> list[list[int]]:
    """Dynamic batching, Algorithm 1 of the AReaL paper (arXiv 2505.24298).

    Longest first: a new micro-batch opens while there are fewer than `min_micro_batches`
    or the sequence fits into none; else it goes where it fits and the fewest sequences
    are. A sequence longer than `capacity` gets a micro-batch of its own.
    """
    micro_batches: list[list[int]] = []
    num_slots = len(lengths)
    # One vector operation per sequence: a batch of thousands would be slow in plain loops.
    tokens = np.zeros(num_slots, dtype=np.int64)
    counts = np.zeros(num_slots, dtype=np.int64)
    for index in _longest_first(lengths):
        num_open = len(micro_batches)
        fits = np.flatnonzero(tokens[:num_open] + lengths[index] <= capacity)
        if num_open < min_micro_batches or not fits.size:
            slot = num_open
            micro_batches.append([])
        else:
            slot = int(fits[np.argmin(counts[fits])])
        micro_batches[slot].append(index)
        tokens[slot] += lengths[index]
        counts[slot] += 1
    return micro_batches


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit-decreasing bin packing: longest first, into the first micro-batch with room."""
    micro_batches: list[list[int]] = []
    tokens = np.zeros(len(lengths), dtype=np.int64)
    for index in _longest_first(lengths):
        fits = np.flatnonzero(tokens[: len(micro_batches)] + lengths[index] <= capacity)
        if not fits.size:
            micro_batches.append([])
        slot = int(fits[0]) if fits.size else len(micro_batches) - 1
        micro_batches[slot].append(index)
        tokens[slot] += lengths[index]
    return micro_batches


def padded(lengths: Sequence[int], rows_per_micro_batch: int) -> list[list[int]]:
    """A fixed count of sequences in order of arrival: what Algorithm 1 is compared with."""
    return [
        list(range(start, min(start + rows_per_micro_batch, len(lengths))))
        for start in range(0, len(lengths), rows_per_micro_batch)
    ]


def pad_count(micro_batches: list[list[int]], num: int) -> list[list[int]]:
    """Exactly `num` micro-batches of the same sequences.

    All dp ranks and pipeline stages must run the same number, or the one with more waits
    for ever. The micro-batch with most sequences is halved while one has two or more;
    then empty ones are appended.
    """
    if len(micro_batches) > num:
        raise ValueError(f"{len(micro_batches)} micro-batches cannot become {num}: pass the largest of all ranks")
    result = [list(micro_batch) for micro_batch in micro_batches]
    while len(result) < num:
        largest = max(result, key=len, default=[])
        if len(largest) < 2:
            result.append([])
            continue
        # Every other one: the list is ordered by length, so both halves get long and short ones.
        result.append(largest[1::2])
        largest[:] = largest[0::2]
    return result


def split_minibatches(lengths: Sequence[int], num_minibatches: int, seed: int) -> list[list[int]]:
    """The sequences of each optimizer update, at random but alike in number and length.

    `lengths` are those of the whole batch in the manifest's order, so that the answer is
    the same on every rank and for every layout. Sequences are sorted by length and dealt
    out in rounds of `num_minibatches`, each round in a random order of its own: every
    minibatch sees the same mixture of lengths and nearly the same number of tokens.
    """
    if not 1 <= num_minibatches <= max(len(lengths), 1):
        raise ValueError(
            f"algorithm.minibatches={num_minibatches} does not fit a batch of {len(lengths)} sequences"
        )
    generator = random.Random(seed)
    order = _longest_first(lengths)
    minibatches: list[list[int]] = [[] for _ in range(num_minibatches)]
    for start in range(0, len(order), num_minibatches):
        dealt = order[start : start + num_minibatches]
        places = generator.sample(range(num_minibatches), len(dealt))
        for index, place in zip(dealt, places):
            minibatches[place].append(index)
    return [sorted(minibatch) for minibatch in minibatches]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
