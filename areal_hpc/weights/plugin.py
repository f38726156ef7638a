"""Entry point `vllm.general_plugins`: runs in every process of vLLM, parent and children.

Registers the weight backends. In engine processes it also points stdout and stderr at the
engine's own log, so that its last words can be told apart from its rank's, and sees to it
that none outlives its parent, however that ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

from areal_hpc.durable import open_own

ENGINE_LOG_VARIABLE = "AREAL_ENGINE_LOG"
PARENT_POLL_S = 0.5
WORKER_BACKENDS = {
    "areal_gloo": ("areal_hpc.weights.gloo", "GlooEngine"),
    "areal_file": ("areal_hpc.weights.file", "FileEngine"),
    "areal_nccl": ("areal_hpc.weights.nccl", "NcclEngine"),
}
TRAINER_BACKENDS = {
    "gloo": ("areal_hpc.weights.gloo", "GlooTrainerEngine"),
    "file": ("areal_hpc.weights.file", "FileTrainerEngine"),
}


def register() -> None:
    """Called by vLLM, perhaps more than once in a process."""
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    for factory, backends in (
        (WeightTransferEngineFactory, WORKER_BACKENDS),
        (WeightTransferTrainerFactory, TRAINER_BACKENDS),
    ):
        for name, (module, cls) in backends.items():
            if name not in factory._registry:
                factory.register_engine(name, module, cls)
    parent = multiprocessing.parent_process()
    if parent is not None:
        _tolerate_rewinds_on_cpu()
        log = os.environ.get(ENGINE_LOG_VARIABLE)
        if log:
            _redirect_output(log)
            threading.Thread(target=_end_with, args=(parent.pid,), name="parent-watch", daemon=True).start()


def _tolerate_rewinds_on_cpu() -> None:
    """Let seeded requests survive a prefill in several pieces on the CPU.

    After each piece but the last vLLM takes back the random numbers of the token it throws
    away, by an offset that only a CUDA generator has; a CPU generator raises and the engine
    dies. Not taking them back keeps the draws independent and reproducible.
    """
    import torch

    if torch.cuda.is_available():
        return

    class Generator(torch.Generator):
        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> None:
            pass

    torch.Generator = Generator


def _redirect_output(log: str) -> None:
    descriptor = open_own(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _end_with(parent: int) -> None:
    """Kill this process once it has lost its parent.

    The kernel's own way (PR_SET_PDEATHSIG) looks at the thread that started this process,
    which may end long before its process does.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
