"""torch.distributed and Megatron's parallel groups of the trainer ranks.

`start` is called once in each trainer rank, before any model is built. Every wait in it
and in later collectives has the deadline given here.
"""

from __future__ import annotations

import datetime
import logging
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions; tp*pp*dp ranks. Expert parallelism lies inside dp."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Place:
    """This rank's coordinates in the layout."""

    layout: Layout
    rank: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    device: torch.device

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.layout.pp - 1

    @property
    def counts(self) -> bool:
        """Whether this rank's metrics count: one rank of each data-parallel replica holds the loss."""
        return self.is_last_stage and self.tp_rank == 0


def free_port(host: str = "") -> int:
    """A port that is free now, from the system."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def start(
    layout: Layout, *, rank: int, host: str, port: int, device: str, timeout_s: float, seed: int = 0
) -> Place:
    """Join the group of `layout.size` ranks that meet at host:port.

    `device` is cpu (gloo) or cuda (nccl). Raises RuntimeError naming the meeting point when
    a rank does not show up within `timeout_s` seconds.
    """
    if device == "cpu":
        from areal_hpc.trainer.cpu import patch_megatron

        patch_megatron()
        target = torch.device("cpu")
    else:
        target = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(target)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(host, port, layout.size, is_master=rank == 0, timeout=timeout)
        dist.init_process_group(
            "gloo" if device == "cpu" else "nccl", store=store, rank=rank, world_size=layout.size,
            timeout=timeout,
        )
    except Exception as error:
        raise RuntimeError(
            f"trainer rank {rank} of {layout.size} could not meet the others at {host}:{port} "
            f"within {timeout_s:.0f} s: {error}"
        ) from error
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        # Without this Megatron gives the experts tp again, and ep*tp*pp must divide the world.
        expert_tensor_parallel_size=1 if layout.ep > 1 else None,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=True,
    )
    torch.manual_seed(seed)
    if device != "cpu":
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    place = Place(
        layout=layout,
        rank=rank,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        device=target,
    )
    log.info("trainer rank %d: tp %d, pp %d, dp %d on %s", rank, place.tp_rank, place.pp_rank, place.dp_rank,
             target)
    return place


def stop() -> None:
    """Leave the groups."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
