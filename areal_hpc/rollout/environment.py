"""What an engine's processes inherit: cores, signals, variables. Used by `engine`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING

from areal_hpc.config.schema import Config
from areal_hpc.weights.plugin import ENGINE_LOG_VARIABLE

if TYPE_CHECKING:
    from areal_hpc.mpi.world import World

CORES_VARIABLE = "AREAL_ENGINE_CORES"
"""Set by the launcher where it knows better than `engine_cores`: vLLM's list, e.g. 0-3 or 0-1|2-3."""
_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


def engine_cores(
    allowed: Sequence[int], num_host_cores: int, index: int, count: int, tensor_parallel: int
) -> str:
    """Cores of engine `index` of `count` on one host, in vLLM's form: one list per worker.

    allowed: cores this rank may use. Where the launcher bound the rank they are its own;
    where it did not (all of the host's) the engines share them out evenly.
    """
    cores = sorted(allowed)
    if count > 1 and len(cores) == num_host_cores and num_host_cores >= count:
        share = len(cores) // count
        cores = cores[index * share : (index + 1) * share]
    per_worker = max(1, len(cores) // tensor_parallel)
    groups = [cores[(i * per_worker) % len(cores) :][:per_worker] for i in range(tensor_parallel)]
    return "|".join(",".join(map(str, group)) for group in groups)


def rank_cores(config: Config, world: World) -> str:
    """Cores of this rank's engine, sharing a host with the rollouts that run on it too."""
    beside = [rank for rank in world.rollout_ranks if world.hosts[rank] == world.host]
    return engine_cores(
        sorted(os.sched_getaffinity(0)),
        os.cpu_count() or 1,
        beside.index(world.world_rank),
        len(beside),
        config.rollout.tensor_parallel,
    )


def engine_cores_of_process(config: Config) -> str:
    """Cores of an engine that has the host to itself."""
    return engine_cores(
        sorted(os.sched_getaffinity(0)), os.cpu_count() or 1, 0, 1, config.rollout.tensor_parallel
    )


def let_engine_go_first() -> None:
    """Where the engine computes on this thread's cores: wake without taking a core from it.

    An engine's threads wait for each other at every layer, so that a rank that interrupts one of
    them for its bookkeeping stops all. A thread of the batch class waits for the engine's next
    pause or the end of its slice. Threads and processes that are started from here on inherit
    it, but for the engine: `engine_environment` gives it the normal class.
    """
    _set_class(os.SCHED_BATCH)


def _set_class(number: int) -> None:
    # A sandbox that forbids it costs speed only.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, number, os.sched_param(0))


@contextlib.contextmanager
def engine_environment(
    cores: str, log: str, start_deadline_s: float, invariance: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Around the start of an engine: what its processes must and must not inherit.

    Slurm signals every process of a step. The engine's processes have to outlive that
    until their rank acts, and vLLM installs handlers of its own, so the signals are
    blocked rather than ignored: a blocked mask passes through fork and exec into every
    process and thread of the engine, and handlers never run. Only SIGKILL ends one.
    The scheduling class is inherited the same way: the engine's is the normal one.
    """
    # Starting the tracker unblocks two of the signals again, so it has to run before.
    resource_tracker.ensure_running()
    changed = {
        ENGINE_LOG_VARIABLE: log,
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get(CORES_VARIABLE) or cores,
        "VLLM_CPU_KVCACHE_SPACE": None,
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(start_deadline_s)),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    changed |= invariance or {}
    before = {name: os.environ.get(name) for name in changed}
    mask, ours = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS), os.sched_getscheduler(0)
    try:
        _set_class(os.SCHED_OTHER)
        _set_variables(changed)
        yield
    finally:
        _set_class(ours)
        _set_variables(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _set_variables(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2**63) that depends on every part and on nothing else."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
