"""Every division of the nodes between trainer and rollout, simulated; and the system that takes turns.

Called by `cli` with rates from `rates` or `calibrate`; pure but for the time it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from areal_hpc.config.schema import Config, KvOnUpdate, Mode, OnUpdate
from areal_hpc.plan.lengths import Lengths
from areal_hpc.plan.memory import RankMemory
from areal_hpc.plan.simulate import Simulation
from areal_hpc.plan.system import Rates, Result, System

RatesOf = Callable[[int], Rates]
"""Number of trainer ranks -> costs."""
SWITCH_S = 5.0
"""A colocated system between training and generation: cache freed and made again, weights resharded."""
SYNC_STEPS = 4
"""A synchronous step starts from nothing, so a few of them are a sample."""
MAX_TRAJECTORIES = 120_000
"""Trajectories simulated per split: a second or two."""
REFINED = 3
"""The fastest splits and the configured one are simulated again, this many times as long."""


@dataclass(frozen=True)
class Workload:
    """What is trained, whatever the split."""

    lengths: Lengths
    prompt_tokens: int
    slots: int
    seed: int = 0


@dataclass(frozen=True)
class Split:
    """One division. `problem` says why it cannot run; then there are no results."""

    trainer_nodes: int
    rollout_nodes: int
    dp: int
    engines: int
    configured: bool
    problem: str = ""
    asynchronous: Result | None = None
    synchronous: Result | None = None


def simulate_splits(
    config: Config,
    workload: Workload,
    rates_of: RatesOf,
    trainer_memory_of: Callable[[int], RankMemory],
    nodes: int | None = None,
) -> list[Split]:
    """All divisions of `nodes` (the configuration's trainer and rollout nodes) into two groups."""
    groups = config.groups
    nodes = nodes or groups.trainer.nodes + groups.rollout.nodes

    def split_at(trainer_nodes: int, scale: int = 1) -> Split:
        return simulate_split(
            config, workload, rates_of, trainer_memory_of, trainer_nodes, nodes - trainer_nodes, scale
        )

    splits = [split_at(trainer_nodes) for trainer_nodes in range(1, nodes)]
    fastest = sorted((split for split in splits if split.synchronous), key=speed)[-REFINED:]
    return [
        split_at(split.trainer_nodes, REFINED) if split in fastest or split.configured else split
        for split in splits
    ]


def simulate_split(
    config: Config,
    workload: Workload,
    rates_of: RatesOf,
    trainer_memory_of: Callable[[int], RankMemory],
    trainer_nodes: int,
    rollout_nodes: int,
    scale: int = 1,
) -> Split:
    groups, trainer = config.groups, config.trainer
    ranks = trainer_nodes * groups.trainer.ranks_per_node
    engines = rollout_nodes * groups.rollout.ranks_per_node
    dp, rest = divmod(ranks, trainer.tp * trainer.pp)
    configured = (trainer_nodes, rollout_nodes) == (groups.trainer.nodes, groups.rollout.nodes)
    split = Split(trainer_nodes, rollout_nodes, dp, engines, configured)
    if rest or not dp:
        return replace(
            split, problem=f"trainer.tp*pp={trainer.tp * trainer.pp} does not divide {ranks} ranks"
        )
    memory = trainer_memory_of(dp)
    if not memory.fits:
        return replace(split, problem=f"trainer does not fit: {memory.advice}")
    system = system_of(config, workload, rates_of(ranks), engines)
    return replace(
        split,
        asynchronous=simulate(config, system, workload, scale) if system.eta else None,
        synchronous=simulate(config, replace(system, eta=0), workload, scale),
    )


def simulate_colocated(config: Config, workload: Workload, rates_of: RatesOf) -> Result:
    """A synchronous system in which every node generates, then every node trains."""
    groups = config.groups
    nodes = groups.trainer.nodes + groups.rollout.nodes
    rates = rates_of(nodes * groups.trainer.ranks_per_node)
    rates = replace(rates, load_s=rates.load_s + SWITCH_S)
    system = system_of(config, workload, rates, nodes * groups.rollout.ranks_per_node)
    return simulate(config, replace(system, eta=0), workload)


def system_of(config: Config, workload: Workload, rates: Rates, engines: int) -> System:
    """The system that the configuration describes, with this many engines."""
    return System(
        num_engines=engines,
        slots=workload.slots,
        group_size=config.rollout.group_size,
        batch_size=config.trainer.batch_size,
        eta=config.algorithm.max_staleness if config.run.mode is Mode("async") else 0,
        prompt_tokens=workload.prompt_tokens,
        rates=rates,
        total_steps=config.run.total_steps,
        checkpoint_every=config.checkpoint.every,
        drain=config.rollout.on_update is OnUpdate.drain,
        recompute_kv=config.rollout.kv_on_update is KvOnUpdate.recompute,
    )


def simulate(config: Config, system: System, workload: Workload, scale: int = REFINED) -> Result:
    """As many steps as tell the steady state, within the run's own number."""
    wanted = max(12, 3 * (system.eta + 2)) if system.eta else SYNC_STEPS
    affordable = max(SYNC_STEPS, MAX_TRAJECTORIES // system.batch_size)
    steps = min(config.run.total_steps, scale * min(wanted, affordable))
    return Simulation(system, workload.lengths, workload.seed).run(steps)


def best_split(splits: list[Split]) -> Split | None:
    """The one with the most trained tokens per second, asynchronous where that is configured."""
    return max((split for split in splits if split.synchronous), key=speed, default=None)


def speed(split: Split) -> float:
    """Trained tokens per second of a split that can run."""
    result = split.asynchronous or split.synchronous
    assert result is not None
    return result.tokens_per_s
