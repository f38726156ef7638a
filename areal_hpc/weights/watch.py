"""A transfer that nobody can interrupt, watched from outside. Used by the trainer lead with NCCL.

A broadcast on a GPU has no deadline and does not notice that a peer has died: who is in
one comes back only when the communicator is aborted. Whether there is reason to is seen
by the calls that run beside it: an engine answers with an error, or not in time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

logger = logging.getLogger(__name__)

WATCH_S = 0.05
SETTLE_S = 60.0
"""After an abort the broadcast comes back at once; longer than this says that it will not."""


class TransferStuck(RuntimeError):
    """The transfer did not come back from its abort: this process cannot go on."""


def run_watched(
    transfer: Callable[[], None],
    failure: Callable[[], Exception | None],
    abort: Callable[[], None],
    settle_s: float = SETTLE_S,
) -> None:
    """Run `transfer` in a thread until it ends, or until `failure()` gives an error to raise.

    Then `abort` is called and the thread waited for: what it iterated over is free again.
    Raises TransferStuck if it does not end within `settle_s`.
    """
    running = in_thread(transfer)
    while not wait([running], timeout=WATCH_S).done:
        error = failure()
        if error is not None:
            logger.warning("the transfer is aborted: %s", error)
            abort()
            if not wait([running], timeout=settle_s).done:
                raise TransferStuck(f"the transfer did not end within {settle_s:g} s of its abort, after: {error}")
            raise error
    running.result()


def in_thread(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Run a call in a daemon thread, on the caller's CUDA device (a new thread has the first)."""
    import torch

    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    future: Future[Any] = Future()

    def work() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="publish", daemon=True).start()
    return future
