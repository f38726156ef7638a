"""Configuration -> node groups and the place of every rank. Pure; used by submit, supervise and checks.

Ranks fill a group node by node, and groups follow in the order controller, trainer, rollout,
reward (where it has nodes): that is the order of the components of the heterogeneous job and
of world ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.schema import Config, GroupConfig

ROLES = ("controller", "trainer", "rollout", "reward")
END_MARGIN_S = 30
"""Seconds between the end of the drain and Slurm's end: ranks leave, the job is put back in the queue."""


@dataclass(frozen=True)
class GroupPlan:
    """One component of the job: `nodes` work, `spare_nodes` wait for one of them to fail."""

    role: str
    nodes: int
    spare_nodes: int
    ranks_per_node: int
    gpus_per_rank: int
    cpus_per_rank: int
    first_rank: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def allocated_nodes(self) -> int:
        return self.nodes + self.spare_nodes

    @property
    def gpus_per_node(self) -> int:
        return self.ranks_per_node * self.gpus_per_rank


@dataclass(frozen=True)
class RankPlace:
    """Where one rank runs."""

    world_rank: int
    role: str
    role_rank: int
    node: str


@dataclass(frozen=True)
class JobPlan:
    """The whole job, groups in component order."""

    groups: tuple[GroupPlan, ...]

    @property
    def num_ranks(self) -> int:
        return sum(group.ranks for group in self.groups)

    def places(self, nodes: Sequence[Sequence[str]]) -> list[RankPlace]:
        """Every rank's node, in world rank order; `nodes[g]` are the working nodes of group g."""
        places = []
        for group, names in zip(self.groups, nodes, strict=True):
            if len(names) != group.nodes:
                raise ValueError(f"group {group.role} needs {group.nodes} nodes, got {len(names)}: {list(names)}")
            for role_rank in range(group.ranks):
                node = names[role_rank // group.ranks_per_node]
                places.append(RankPlace(group.first_rank + role_rank, group.role, role_rank, node))
        return places

    def check_disjoint(self, nodes: Sequence[Sequence[str]]) -> None:
        """ValueError when two groups share a node."""
        owner: dict[str, str] = {}
        for group, names in zip(self.groups, nodes, strict=True):
            for name in names:
                if owner.setdefault(name, group.role) != group.role:
                    raise ValueError(f"node {name} is in the groups {owner[name]} and {group.role}")

    def describe(self) -> str:
        """The node plan as a small table."""
        rows = [f"{'group':<11}{'nodes':>6}{'spare':>6}{'ranks/node':>11}{'GPUs/rank':>10}{'CPUs/rank':>10}  world ranks"]
        for group in self.groups:
            last = group.first_rank + group.ranks - 1
            span = str(group.first_rank) if last == group.first_rank else f"{group.first_rank}-{last}"
            rows.append(
                f"{group.role:<11}{group.nodes:>6}{group.spare_nodes:>6}{group.ranks_per_node:>11}"
                f"{group.gpus_per_rank:>10}{group.cpus_per_rank:>10}  {span}"
            )
        return "\n".join(rows)


def plan_job(config: Config) -> JobPlan:
    """The job of a checked configuration; ConfigError for what a job cannot be."""
    groups, first = [], 0
    for role in ROLES:
        group: GroupConfig = getattr(config.groups, role)
        if role == "reward" and not group.nodes:
            continue  # a pool beside each engine
        _check_group(role, group, config)
        groups.append(
            GroupPlan(
                role=role,
                nodes=group.nodes,
                spare_nodes=config.launch.spare_nodes,
                ranks_per_node=group.ranks_per_node,
                gpus_per_rank=group.gpus_per_rank,
                cpus_per_rank=group.cpus_per_rank,
                first_rank=first,
            )
        )
        first += group.ranks
    return JobPlan(tuple(groups))


def check_launch(config: Config) -> list[str]:
    """Refuse launch keys that cannot work; returns warnings, one line each."""
    launch = config.launch
    for key in ("max_requeues", "max_step_restarts", "spare_nodes"):
        if getattr(launch, key) < 0:
            raise ConfigError(f"launch.{key}={getattr(launch, key)} must not be negative")
    if launch.time_min < 1:
        raise ConfigError(f"launch.time_min={launch.time_min} must be at least 1 minute")
    if not 0 < launch.signal_lead_s < launch.time_min * 60:
        raise ConfigError(
            f"launch.signal_lead_s={launch.signal_lead_s} must lie between 0 and the walltime of "
            f"{launch.time_min * 60} s: change launch.signal_lead_s or launch.time_min"
        )
    if launch.signal_lead_s < config.run.drain_deadline_s + END_MARGIN_S:
        return [
            f"a stop may take run.drain_deadline_s={config.run.drain_deadline_s:.0f} s and {END_MARGIN_S} s to "
            f"leave, more than launch.signal_lead_s={launch.signal_lead_s}: a slow save would be cut off"
        ]
    return []


def _check_group(role: str, group: GroupConfig, config: Config) -> None:
    key = f"groups.{role}"
    for name, least in (("nodes", 1), ("ranks_per_node", 1), ("cpus_per_rank", 1), ("gpus_per_rank", 0),
                        ("mem_gib_per_node", 0)):  # fmt: skip
        if getattr(group, name) < least:
            raise ConfigError(f"{key}.{name}={getattr(group, name)} must be at least {least}")
    if config.run.device.value == "cpu" and group.gpus_per_rank:
        raise ConfigError(f"{key}.gpus_per_rank={group.gpus_per_rank} but run.device=cpu: set one of them")
    if config.run.device.value == "cuda" and role in ("trainer", "rollout") and not group.gpus_per_rank:
        raise ConfigError(f"{key}.gpus_per_rank=0 but run.device=cuda: say how many GPUs each rank gets")
    if role == "rollout" and group.gpus_per_rank and group.gpus_per_rank != config.rollout.tensor_parallel:
        raise ConfigError(
            f"{key}.gpus_per_rank={group.gpus_per_rank} does not equal "
            f"rollout.tensor_parallel={config.rollout.tensor_parallel}: change one of them"
        )
