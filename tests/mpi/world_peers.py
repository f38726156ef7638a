"""What each rank does in test_world.py; the first argument names the scene."""

import resource
import sys
import threading
import time
from pathlib import Path

from areal_hpc.config.schema import Config, GroupConfig, GroupsConfig
from areal_hpc.messages import LeaseFailed, Stop, WeightCall, WeightReturn
from areal_hpc.mpi.world import connect_world
from areal_hpc.terminal import echo


def talk(world) -> None:
    if world.role != "controller":
        for number in range(200):
            world.channel.send(0, LeaseFailed(number, 0, True, world.role))
        world.channel.receive(Stop, 20.0, "the stop", source=0)
        echo(f"{world.role} {world.role_rank} knows {len(world.hosts)} hosts")
        return
    heard = {}
    while sum(map(len, heard.values())) < 600:
        for source, message in world.channel.poll():
            heard.setdefault(source, []).append(message.lease_id)
        time.sleep(0.001)
    assert all(numbers == list(range(200)) for numbers in heard.values())
    for rank in range(1, 4):
        world.channel.send(rank, Stop("done"))
    echo(f"controller 0 heard 600 messages in order from {len(heard)} ranks")


def threads(world) -> None:
    """Two threads of one rank ask at once and each gets its own answers."""
    if world.role == "rollout":
        for _ in range(40):
            source, call = world.channel.receive(WeightCall, 20.0, "a call")
            world.channel.send(source, WeightReturn(call.call_id, 0, call.payload, ""))
    if world.role != "controller":
        world.channel.receive(Stop, 20.0, "the stop", source=0)
        return
    answers = []

    def ask(first: int) -> None:
        for number in range(first, first + 20):
            world.channel.send(3, WeightCall(number, "echo", "x" * 3_000_000))
            answers.append(world.channel.receive(WeightReturn, 20.0, "an answer", source=3).message)

    callers = [threading.Thread(target=ask, args=(first,)) for first in (0, 20)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(answer.call_id for answer in answers) == list(range(40))
    sizes = {len(answer.result) for answer in answers}
    echo(f"controller 0 got {len(answers)} answers of {sizes.pop()} bytes")
    for rank in range(1, 4):
        world.channel.send(rank, Stop("done"))


def idle(world) -> None:
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    if world.role == "controller":
        time.sleep(2.0)
        for rank in range(1, 4):
            world.channel.send(rank, Stop("done"))
        return
    world.channel.receive(Stop, 20.0, "the stop", source=0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    echo(f"{world.role} {world.role_rank} {busy:.3f} {time.perf_counter() - start:.3f}")


def leave(world) -> None:
    """The controller stops listening while the others go on telling it things, large ones too."""
    if world.role == "controller":
        for rank in range(1, 4):
            world.channel.send(rank, Stop("done"))
    else:
        for number in range(50):
            world.channel.send(0, WeightReturn(number, 0, "x" * (1 + number * 20_000), ""))
        world.channel.send(1 + world.world_rank % 3, LeaseFailed(1, 0, True, "nobody asks"))
    if sys.argv[2:] == ["late"] and world.role == "rollout":
        time.sleep(1.0)


def fail(world) -> None:
    if world.role == "trainer" and world.role_rank == 1:
        raise ValueError("broken on purpose")
    world.channel.receive(Stop, 60.0, "a stop that never comes", source=0)


def main() -> None:
    config = Config()
    config.groups = GroupsConfig(trainer=GroupConfig(ranks_per_node=2))
    world = None
    try:
        world = connect_world(config)
        globals()[sys.argv[1]](world)
        if sys.argv[2:] != ["unsettled"]:
            world.channel.settle(20.0)
        from mpi4py import MPI

        MPI.Finalize()
    except BaseException as error:
        from areal_hpc.main import _fail
        from areal_hpc.paths import RunPaths

        _fail(error, world, RunPaths(Path("nowhere")))


if __name__ == "__main__":
    main()
