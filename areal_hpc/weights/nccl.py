"""Worker side of vLLM's `nccl` backend with the same promise as the others: stage, then load.

The trainer side is vLLM's own, and so are the packed buckets on the wire. vLLM's worker
engine loads each bucket as it arrives, which leaves a mixed model when a later bucket
fails; here a bucket is copied to the stage instead. The engine waits meanwhile: NCCL
calls of two groups on one GPU must not be under way at once. A broadcast whose sender is
gone ends with the abort of its communicator, which a thread sees to once the rank has
cancelled the transfer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_common import (
    NCCLWeightTransferInitInfo,
    worker_init_process_group,
)
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

from areal_hpc.weights.source import Layout
from areal_hpc.weights.stage import TransferControl
from areal_hpc.weights.staged import StagedEngine, StagedUpdateInfo, TransferCancelled

CANCEL_POLL_S = 0.05


class NcclEngine(StagedEngine):
    """All workers of an engine are members; the first one fills the stage."""

    init_info_cls = NCCLWeightTransferInitInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: Any = None
        self._init_info: NCCLWeightTransferInitInfo | None = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        self.shutdown()
        self._init_info = init_info
        self._group = worker_init_process_group(init_info, self.parallel_config)

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        if self._group is None or self._init_info is None:
            raise RuntimeError("this engine is not connected to the trainer")
        layout = Layout.of(update_info.names, update_info.dtype_names, update_info.shapes)
        places: dict[str, torch.Tensor] = {}
        if self._fills_stage:
            places = dict(layout.views(self._stages.open(update_info.stage, layout.total_bytes)))

        def keep(bucket: list[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in bucket:
                if name in places:
                    places[name].copy_(tensor)

        described = zip(map(list, layout.shapes), layout.dtypes, strict=True)
        with self._watching(update_info) as raise_if_cancelled:

            def parameters() -> Iterator[tuple[str, tuple[list[int], torch.dtype]]]:
                for parameter in zip(layout.names, described, strict=True):
                    # A thread that the abort wakes must not go on with the next bucket.
                    raise_if_cancelled()
                    yield parameter

            packed_nccl_broadcast_consumer(
                iterator=parameters(),
                group=self._group,
                src=0,
                post_unpack_func=keep,
                buffer_size_bytes=self._init_info.packed_buffer_size_bytes,
                num_buffers=self._init_info.packed_num_buffers,
                device=self.device,
            )
            raise_if_cancelled()

    @contextmanager
    def _watching(self, info: StagedUpdateInfo) -> Iterator[Callable[[], None]]:
        """Abort the group once the transfer is cancelled; what is yielded raises TransferCancelled then."""
        control, received, cancelled = TransferControl(info.control), threading.Event(), threading.Event()

        def watch() -> None:
            while not received.wait(CANCEL_POLL_S):
                if control.is_cancelled(info.attempt):
                    cancelled.set()
                    self.shutdown()
                    return

        def raise_if_cancelled() -> None:
            if cancelled.is_set():
                raise TransferCancelled(f"attempt {info.attempt} was given up by the trainer")

        watcher = threading.Thread(target=watch, name="transfer-watch", daemon=True)
        watcher.start()
        try:
            yield raise_if_cancelled
        finally:
            received.set()
            watcher.join()
            control.close()

    def shutdown(self) -> None:
        super().shutdown()
        if self._group is not None:
            self._group.destroy()
            self._group = None
