"""Weights over gloo: trainer lead to one worker of every engine, on CPUs or across fabrics.

Group: rank 0 is the trainer lead, then one rank per engine. The model travels as one
byte stream (`source.Layout`) in buckets that may cut a tensor anywhere; receivers write
each bucket straight into its place in the stage. The process group is a separate one:
vLLM's workers and Megatron keep their own default groups.

A gloo call can neither be cancelled nor be freed from outside (closing the peer does not
wake it), so nobody blocks in one: both sides look at the call and at a reason to give
up, and a group with an unfinished call is laid aside until the call has timed out.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import ClassVar, Self

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, Work
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferInitInfo,
)

from areal_hpc.weights.client import RolloutClient
from areal_hpc.weights.source import ExportSource, Layout, describe_metadata
from areal_hpc.weights.stage import TransferControl
from areal_hpc.weights.staged import StagedEngine, StagedUpdateInfo, TransferCancelled

IN_FLIGHT = 2
"""Buckets on the wire at once: one is filled while another travels."""
POLL_S = 0.0002


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """What an engine needs to join; `rank_offset` is its rank in the group."""

    host: str
    port: int
    prefix: str
    world_size: int
    bucket_bytes: int
    timeout_s: float
    rank_offset: int = 1


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """host: an address of the trainer lead that every engine's node can reach."""

    backend: ClassVar[str] = "gloo"

    host: str
    world_size: int
    bucket_bytes: int
    timeout_s: float


class BucketGroup:
    """A gloo process group that broadcasts buckets from rank 0, IN_FLIGHT at a time."""

    def __init__(self, store: TCPStore, prefix: str, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = PrefixStore(prefix, store)
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._group = ProcessGroupGloo(self._store, rank, world_size, timedelta(seconds=timeout_s))
        # The tensors are kept: gloo reads and writes them until the call is done.
        self._pending: deque[tuple[Work, torch.Tensor]] = deque()

    def broadcast(self, bucket: torch.Tensor, give_up: Callable[[], None]) -> None:
        """Send or receive a bucket; returns once no more than IN_FLIGHT are under way.

        `give_up` is called while waiting and raises when there is no point in it any more.
        """
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self._timeout_s)
        self._pending.append((self._group.broadcast([bucket], options), bucket))
        self.finish(give_up, leave=IN_FLIGHT)

    def finish(self, give_up: Callable[[], None], leave: int = 0) -> None:
        """Wait until no more than `leave` buckets are under way."""
        while len(self._pending) > leave:
            work = self._pending[0][0]
            deadline = time.monotonic() + self._timeout_s
            while not work.is_completed():
                give_up()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a weight bucket did not get through in {self._timeout_s:.0f} s")
                time.sleep(POLL_S)
            try:
                work.wait()
            except RuntimeError:
                # gloo only knows addresses; the other side may know what happened.
                give_up()
                raise
            self._pending.popleft()
            self._store.add(_done_key(self._rank), 1)

    def behind(self) -> list[int]:
        """Ranks that have got the fewest buckets; none where all have got what rank 0 gave away."""
        done = [self._store.add(_done_key(rank), 0) for rank in range(self._world_size)]
        fewest, given = min(done), done[0] + len(self._pending)
        return [rank for rank, number in enumerate(done) if rank and number == fewest < given]

    @property
    def idle(self) -> bool:
        return all(work.is_completed() for work, _ in self._pending)


_LAID_ASIDE: list[BucketGroup] = []
"""Destroying a group waits for its calls, which may take until their timeout."""


def lay_aside(group: BucketGroup | None) -> None:
    """Let go of a group without waiting for it."""
    _LAID_ASIDE[:] = [old for old in _LAID_ASIDE if not old.idle]
    if group is not None and not group.idle:
        _LAID_ASIDE.append(group)


class GlooEngine(StagedEngine):
    """Worker side; the engine generates while buckets come in."""

    init_info_cls = GlooInitInfo
    receives_in_background = True

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._group: BucketGroup | None = None
        self._bucket_bytes = 0

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()
        if not self._fills_stage:
            return
        store = TCPStore(
            init_info.host, init_info.port, is_master=False, timeout=timedelta(seconds=init_info.timeout_s)
        )
        store.set(_joined_key(init_info.prefix, init_info.rank_offset), "")
        self._bucket_bytes = init_info.bucket_bytes
        self._group = BucketGroup(
            store, init_info.prefix, init_info.rank_offset, init_info.world_size, init_info.timeout_s
        )

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        if not self._fills_stage:
            return
        if self._group is None:
            raise RuntimeError("this engine is not connected to the trainer")
        layout = Layout.of(update_info.names, update_info.dtype_names, update_info.shapes)
        stream = self._stages.open(update_info.stage, layout.total_bytes)
        control = TransferControl(update_info.control)

        def raise_if_cancelled() -> None:
            if control.is_cancelled(update_info.attempt):
                raise TransferCancelled(f"attempt {update_info.attempt} was given up by the trainer")

        try:
            for start in range(0, layout.total_bytes, self._bucket_bytes):
                self._group.broadcast(stream[start : start + self._bucket_bytes], raise_if_cancelled)
            self._group.finish(raise_if_cancelled)
        finally:
            control.close()

    def shutdown(self) -> None:
        super().shutdown()
        lay_aside(self._group)
        self._group = None


class GlooTrainerEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """Trainer side; every trainer rank builds one, only the lead has a group and talks."""

    init_info_cls = GlooTrainerInitInfo
    client: RolloutClient
    source: ExportSource

    def __init__(self, *, client: RolloutClient, source: ExportSource, is_sender: bool) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._group: BucketGroup | None = None
        self._bucket_bytes = 0
        self._timeout_s = 0.0

    @classmethod
    def trainer_init(
        cls,
        init_info: GlooTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        assert isinstance(client, RolloutClient) and isinstance(source, ExportSource)
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            engine._connect(init_info)
        return engine

    def _connect(self, info: GlooTrainerInitInfo) -> None:
        self._bucket_bytes = info.bucket_bytes
        self._timeout_s = info.timeout_s
        timeout = timedelta(seconds=info.timeout_s)
        store = TCPStore(info.host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        worker_info = GlooInitInfo(
            host=info.host,
            port=store.port,
            # A prefix of its own for each connection: members of an older one cannot join.
            prefix=secrets.token_hex(16),
            world_size=info.world_size,
            bucket_bytes=info.bucket_bytes,
            timeout_s=info.timeout_s,
        )
        call = self.client.begin("init_weight_transfer_engine", asdict(worker_info))
        self._wait_for_engines(store, worker_info, call)
        self._group = BucketGroup(store, worker_info.prefix, 0, info.world_size, info.timeout_s)
        self.client.gather(call)

    def _wait_for_engines(self, store: TCPStore, info: GlooInitInfo, call: int) -> None:
        """Until every engine is at the store; only then is the rendezvous certain to be short."""
        deadline = time.monotonic() + info.timeout_s
        for rank in range(1, info.world_size):
            while not store.check([_joined_key(info.prefix, rank)]):
                self.client.raise_errors(call)
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"waited {info.timeout_s:.0f} s for {self.client.describe_engine(rank - 1)} "
                        f"to join the weight group at {info.host}:{info.port}"
                    )
                time.sleep(0.002)

    def send_weights(self) -> None:
        """One update on all engines. Raises on any failure; then the group is of no more use.

        TimeoutError names the engines that are behind the others.
        """
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        self.client.start_weight_update()
        description = describe_metadata(self.source.metadata())
        call = self.client.begin("update_weights", description)
        layout = Layout.of(**description)

        end = time.monotonic() + self._timeout_s

        def give_up() -> None:
            # First: at that time the engines give up too, those that only waited for another as well.
            if time.monotonic() > end:
                raise TimeoutError(self._describe_timeout())
            self.client.raise_errors(call)

        assert self._group is not None
        for bucket in buckets(self.source, layout, self._bucket_bytes):
            self._group.broadcast(bucket, give_up)
        self._group.finish(give_up)
        self.client.gather(call)
        self.client.finish_weight_update()

    def _describe_timeout(self) -> str:
        assert self._group is not None
        names = ", ".join(self.client.describe_engine(rank - 1) for rank in self._group.behind())
        waited = f"waited {self._timeout_s:g} s for "
        return waited + (f"weight buckets to reach {names}" if names else "the export of the trainer's weights")

    def shutdown(self) -> None:
        lay_aside(self._group)
        self._group = None


def _joined_key(prefix: str, rank: int) -> str:
    return f"{prefix}/joined/{rank}"


def _done_key(rank: int) -> str:
    return f"done/{rank}"


def buckets(source: ExportSource, layout: Layout, bucket_bytes: int) -> Iterator[torch.Tensor]:
    """The byte stream in host buffers of `bucket_bytes` (the last may be shorter).

    A yielded buffer is written again IN_FLIGHT + 1 buckets later.
    """
    total, start, count = layout.total_bytes, 0, 0
    ring = [torch.empty(min(bucket_bytes, total), dtype=torch.uint8) for _ in range(IN_FLIGHT + 1)]

    def current() -> torch.Tensor:
        return ring[count % len(ring)][: min(bucket_bytes, total - start)]

    for (_, tensor), offset in zip(source, layout.offsets, strict=True):
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        taken = 0
        while taken < data.numel():
            bucket = current()
            position = offset + taken - start
            if position >= bucket.numel():
                yield bucket
                start, count = start + bucket.numel(), count + 1
                continue
            size = min(bucket.numel() - position, data.numel() - taken)
            bucket[position : position + size].copy_(data[taken : taken + size])
            taken += size
    # The last bucket, and one more where only the padding of the last tensor is left over.
    while start < total:
        bucket = current()
        yield bucket
        start, count = start + bucket.numel(), count + 1
