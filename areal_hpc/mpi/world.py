"""Who is who in the one MPI world: rank 0 controls, then trainers, rollouts and reward ranks, if any.

`connect_world` initialises MPI, checks that the world has the planned size and gives each
rank its role. mpi4py is imported inside functions only: vLLM's child processes re-import
the main module, and an MPI_Init there would hang on a closed descriptor.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.config.schema import Config, GroupsConfig

if TYPE_CHECKING:
    from mpi4py import MPI

    from areal_hpc.mpi.channel import Channel

GATHER_BYTES = 1024
_LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "MPI_", "HYD")


@dataclass(frozen=True)
class World:
    """This rank's place among the roles. Ranks are world ranks; `hosts` is indexed by them."""

    role: str
    role_rank: int
    world_rank: int
    trainer_ranks: tuple[int, ...]
    rollout_ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    channel: Channel
    controller_rank: int = 0
    reward_ranks: tuple[int, ...] = ()
    """Empty where rollouts score themselves (`groups.reward` has no nodes)."""

    @property
    def host(self) -> str:
        return self.hosts[self.world_rank]

    @property
    def role_size(self) -> int:
        return {
            "controller": 1,
            "trainer": len(self.trainer_ranks),
            "rollout": len(self.rollout_ranks),
            "reward": len(self.reward_ranks),
        }[self.role]

    @property
    def is_trainer_lead(self) -> bool:
        return self.role == "trainer" and self.role_rank == 0

    def describe(self, world_rank: int) -> str:
        """"trainer 1 on node7" for a world rank."""
        return describe_rank(world_rank, len(self.trainer_ranks), len(self.rollout_ranks), self.hosts)


def role_of(world_rank: int, num_trainers: int, num_rollouts: int) -> tuple[str, int]:
    """(role, role_rank) of a world rank."""
    if world_rank == 0:
        return "controller", 0
    if world_rank <= num_trainers:
        return "trainer", world_rank - 1
    if world_rank <= num_trainers + num_rollouts:
        return "rollout", world_rank - 1 - num_trainers
    return "reward", world_rank - 1 - num_trainers - num_rollouts


def describe_rank(world_rank: int, num_trainers: int, num_rollouts: int, hosts: tuple[str, ...]) -> str:
    role, role_rank = role_of(world_rank, num_trainers, num_rollouts)
    return f"{role} {role_rank} on {hosts[world_rank]}"


def world_size(groups: GroupsConfig) -> int:
    return groups.controller.ranks + groups.trainer.ranks + groups.rollout.ranks + groups.reward.ranks


def use_bundled_library() -> None:
    """Point mpi4py at the MPI library of this Python environment, if there is one.

    PyPI's `mpich` wheel puts libmpi into the environment's lib folder; without this a
    system Open MPI would be taken first and every rank would be a world of its own.
    """
    library = Path(sys.prefix) / "lib" / "libmpi.so.12"
    if library.exists():
        os.environ.setdefault("MPI4PY_LIBMPI", str(library))
    # Also where the variable came from the process that submitted the job.
    if "SLURM_PROCID" in os.environ and os.environ.get("MPI4PY_LIBMPI") == str(library):
        # UCX's addresses are long and padded with whatever lay in memory. Where the padding does not
        # compress, a line of PMI outgrows the 1024 bytes that Slurm's pmi2 reads, and MPI_Init
        # fails or hangs. The addresses of libfabric are short.
        os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")
        # Without shared memory between the ranks of a node (MPI carries metadata only): its
        # segments are named after job and step, outlive killed ranks and block a later namesake.
        os.environ.setdefault("MPIR_CVAR_NOLOCAL", "1")


def load_mpi() -> MPI.Intracomm:
    """MPI_Init (threads may call MPI, one at a time) and COMM_WORLD."""
    use_bundled_library()
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI

    return MPI.COMM_WORLD


def strip_launcher_environment() -> None:
    """Forget the launcher's variables, so that child processes do not take themselves for ranks."""
    for name in [name for name in os.environ if name.startswith(_LAUNCHER_PREFIXES)]:
        del os.environ[name]


def connect_world(config: Config, deadline_s: float = 60.0) -> World:
    """Initialise MPI and learn every rank's host.

    Raises RuntimeError when the world does not have the planned number of ranks, and
    TimeoutError when a rank does not show up.
    """
    communicator = load_mpi()
    size, rank = communicator.Get_size(), communicator.Get_rank()
    planned, groups = world_size(config.groups), config.groups
    if size != planned:
        raise RuntimeError(
            f"MPI world has {size} ranks but the configuration plans {planned} (controller 1, trainer "
            f"{groups.trainer.ranks}, rollout {groups.rollout.ranks}"
            + (f", reward {groups.reward.ranks}" if groups.reward.ranks else "")
            + f"): start {planned} ranks"
            + ("; a world of one means that the launcher and this MPI library do not match: "
               f"see launch.mpi={config.launch.mpi}" if size == 1 else "")
        )
    hosts = tuple(
        name.decode() for name in gather(socket.gethostname().encode()[:256], "host names", deadline_s)
    )
    strip_launcher_environment()
    from areal_hpc.mpi.channel import Channel, MpiTransport

    num_trainers, num_rollouts = groups.trainer.ranks, groups.rollout.ranks
    first_reward = 1 + num_trainers + num_rollouts
    role, role_rank = role_of(rank, num_trainers, num_rollouts)
    return World(
        role=role,
        role_rank=role_rank,
        world_rank=rank,
        trainer_ranks=tuple(range(1, 1 + num_trainers)),
        rollout_ranks=tuple(range(1 + num_trainers, first_reward)),
        reward_ranks=tuple(range(first_reward, size)),
        hosts=hosts,
        channel=Channel(
            MpiTransport(communicator), lambda other: describe_rank(other, num_trainers, num_rollouts, hosts)
        ),
    )


def gather(data: bytes, what: str, deadline_s: float = 120.0) -> list[bytes]:
    """Every rank's `data` (at most 1 KiB, no trailing zero bytes), by world rank, without blocking in MPI.

    All ranks call it; raises TimeoutError naming `what` when one does not in time.
    """
    from mpi4py import MPI

    communicator = MPI.COMM_WORLD
    if len(data) > GATHER_BYTES:
        raise ValueError(f"{len(data)} bytes of {what} exceed {GATHER_BYTES}")
    mine = bytearray(data.ljust(GATHER_BYTES, b"\0"))
    everyone = bytearray(GATHER_BYTES * communicator.Get_size())
    request = communicator.Iallgather([mine, MPI.BYTE], [everyone, MPI.BYTE])
    end = time.monotonic() + deadline_s
    while not request.Test():
        if time.monotonic() > end:
            raise TimeoutError(
                f"waited {deadline_s:.0f} s for {what} from all {communicator.Get_size()} ranks of the MPI world"
            )
        time.sleep(0.005)
    return [
        bytes(everyone[start : start + GATHER_BYTES]).rstrip(b"\0")
        for start in range(0, len(everyone), GATHER_BYTES)
    ]
