"""What each rank does in test_reward_world.py: real reward ranks, rollouts that only ask them for scores.

World: 0 controller, 1 trainer, 2-3 rollouts, 4-5 reward ranks with two workers each. Each
rollout prints what became of its requests.
"""

import asyncio
import sys
import time
from pathlib import Path

from areal_hpc.config.schema import Config, GroupConfig, GroupsConfig, RewardsConfig
from areal_hpc.messages import Drained, RewardReady, RewardStatus, Scored, Stop
from areal_hpc.mpi.world import connect_world
from areal_hpc.paths import RunPaths
from areal_hpc.rewards import loop
from areal_hpc.rewards.remote import RemoteRewards
from areal_hpc.telemetry import Telemetry
from areal_hpc.terminal import echo
from areal_hpc.types import Prompt

FN = "reward_functions:odd_prompts"


def controller(world) -> None:
    for _ in world.reward_ranks:
        world.channel.receive(RewardReady, 60.0, "a reward rank")
    for rank in world.rollout_ranks:
        world.channel.send(rank, RewardReady(0))  # the start signal
    checks: dict[int, float] = {}
    left = set(world.rollout_ranks)
    while left:
        for source, message in world.channel.poll():
            if isinstance(message, Drained):
                left.discard(source)
            elif isinstance(message, RewardStatus):
                checks[source] = message.counters["checks"]
        time.sleep(0.002)
    while len(checks) < 2 or min(checks.values()) == 0:
        source, status = world.channel.receive(RewardStatus, 10.0, "a status")
        checks[source] = status.counters["checks"]
    for rank in range(1, 6):
        world.channel.send(rank, Stop("done"))
    echo(f"controller saw checks of {sorted(checks)}")


def rollout(world) -> None:
    world.channel.receive(RewardReady, 90.0, "the start signal", source=0)
    asyncio.run(ask(world))
    world.channel.send(0, Drained(()))
    world.channel.receive(Stop, 60.0, "the stop", source=0)


async def ask(world) -> None:
    rewards = RemoteRewards(world, deadline_s=60.0)
    me = world.role_rank

    async def listen() -> None:
        while True:
            for source, message in world.channel.poll():
                assert isinstance(message, Scored), message
                rewards.receive(source, message)
            await asyncio.sleep(0.002)

    async def one(number: int, responses: list[str], truncated: list[bool] | None = None) -> str:
        try:
            results = await rewards.score(Prompt(number, "?", gold=str(number)), responses, truncated)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        said = ",".join(f"{result.reward:g}{' ' + result.note if result.note else ''}" for result in results)
        return f"{said}{'' if hung.done() else ' meanwhile'}"

    listener = asyncio.create_task(listen())
    # Of each reward rank one rollout lets one of its two workers hang; the other one scores on.
    hung = asyncio.create_task(one(9, ["a", "hang"]))
    await asyncio.sleep(0.2)
    # Answers of 2 MB; the last one is cut off.
    plain = await asyncio.gather(*(one(10 + k, ["a" * k, "b" * 2_000_000], [False, True]) for k in range(1, 9)))
    echo(f"rollout {me} plain {plain}")
    for name, number in (("gold", 1), ("nan", 2), ("raises", 3), ("shape", 4)):
        echo(f"rollout {me} {name} {await one(number, ['a', 'b'])}")
    echo(f"rollout {me} hung {await hung}")
    assert rewards.num_scoring == 0
    listener.cancel()


def main() -> None:
    config = Config(rewards=RewardsConfig(fn=FN, workers=2, timeout_s=4.0))
    config.groups = GroupsConfig(
        rollout=GroupConfig(ranks_per_node=2), reward=GroupConfig(nodes=1, ranks_per_node=2)
    )
    folder, world = Path(sys.argv[1]), None
    try:
        world = connect_world(config)
        if world.role == "reward":
            telemetry = Telemetry(folder / f"reward-{world.role_rank}.jsonl")
            loop.run(config, world, RunPaths(folder), telemetry)
            telemetry.close()
        elif world.role == "trainer":
            world.channel.receive(Stop, 120.0, "the stop", source=0)
        else:
            globals()[world.role](world)
        world.channel.settle(20.0)
        from mpi4py import MPI

        MPI.Finalize()
    except BaseException as error:
        from areal_hpc.main import _fail

        _fail(error, world, RunPaths(folder))


if __name__ == "__main__":
    main()
