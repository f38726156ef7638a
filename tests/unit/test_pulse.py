"""Signs of life: who is silent is named in time; a process that was stopped itself accuses nobody."""

from __future__ import annotations

import threading
import time

import pytest

from areal_hpc.messages import Stop
from areal_hpc.mpi.channel import LocalNetwork
from areal_hpc.mpi.pulse import BEATS, Pulse, SignsOfLife
from areal_hpc.mpi.world import World


def make_world(network: LocalNetwork, rank: int) -> World:
    role, role_rank = [("controller", 0), ("trainer", 0), ("trainer", 1), ("rollout", 0), ("reward", 0)][rank]
    hosts = tuple(f"node{n}" for n in range(5))
    return World(role, role_rank, rank, (1, 2), (3,), hosts, network.channel(rank), reward_ranks=(4,))


def test_a_rank_is_given_up_after_the_deadline_and_not_before():
    signs = SignsOfLife([1, 2], 60.0, 0.0)
    for turn in range(1, 7):
        assert signs.look({1}, turn * 10.0) is None
    assert signs.look({1}, 70.0) == 2
    assert signs.look({1, 2}, 80.0) is None


def test_the_most_silent_rank_is_named():
    signs = SignsOfLife([1, 2, 3], 60.0, 0.0)
    signs.look({1, 3}, 10.0)
    for turn in range(2, 8):
        found = signs.look({3}, turn * 10.0)
    assert found == 2


def test_time_in_which_this_process_was_stopped_does_not_count_against_others():
    signs = SignsOfLife([1], 60.0, 0.0)
    assert signs.look({1}, 10.0) is None
    assert signs.look(set(), 5000.0) is None
    assert signs.look({1}, 5010.0) is None
    for turn in range(1, 7):
        assert signs.look(set(), 5010.0 + turn * 10) is None
    assert signs.look(set(), 5080.0) == 1


@pytest.mark.parametrize("silent", [0, 2, 3, 4])
def test_a_silent_rank_is_named_by_those_who_watch_it(silent):
    """Real threads; the silent rank's thread is never started."""
    network = LocalNetwork(5)
    said: dict[int, str] = {}
    done = threading.Event()

    def note(rank: int, error: TimeoutError) -> None:
        said[rank] = str(error)
        if len(said) == (1 if silent else 4):
            done.set()

    pulses = {
        rank: Pulse(make_world(network, rank), 0.6, lambda error, rank=rank: note(rank, error)) for rank in range(5)
    }
    started = [pulse for rank, pulse in pulses.items() if rank != silent]
    for pulse in started:
        pulse.start()
    begun = time.monotonic()
    assert done.wait(20.0)
    assert time.monotonic() - begun >= 0.6
    for pulse in started:
        pulse.stop()
    name = ["controller 0 on node0", "", "trainer 1 on node2", "rollout 0 on node3", "reward 0 on node4"][silent]
    assert set(said) == ({0} if silent else {1, 2, 3, 4})
    assert all(f"no sign of life from {name} for 0.6 s (run.silence_deadline_s)" in text for text in said.values())


def test_nobody_is_accused_while_all_beat_and_messages_pass_untouched():
    network = LocalNetwork(5)
    worlds = [make_world(network, rank) for rank in range(5)]
    said: list[str] = []
    pulses = [Pulse(world, 1.2, lambda error: said.append(str(error))) for world in worlds]
    for pulse in pulses:
        pulse.start()
    for number in range(5):
        worlds[3].channel.send(0, Stop(str(number)))
        time.sleep(2 * 1.2 / BEATS)
    for pulse in pulses:
        pulse.stop()
    assert said == []
    assert [envelope.message for envelope in worlds[0].channel.poll()] == [Stop(str(number)) for number in range(5)]
    assert worlds[1].channel.poll() == []
