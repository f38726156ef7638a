"""Calls into vLLM's workers that bring errors back as values.

Mixed into every worker (vLLM's `worker_extension_cls`). An exception of one worker would
leave the answers of its tensor-parallel siblings unread in vLLM's queues, where the next
call takes them for its own; so nothing is raised across that border.
"""

from __future__ import annotations

import logging
from typing import Any

CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


class WorkerCalls:
    """Methods are vLLM's own, found on the worker that this class is mixed into."""

    def weight_calls(self, calls: list[tuple[str, dict[str, Any]]]) -> str:
        """Run some of CALLS in order, up to the first that fails; "" or what went wrong.

        Several at once, because each trip to the workers waits for the engine's step.
        """
        for method, arguments in calls:
            assert method in CALLS, method
            try:
                getattr(self, method)(**arguments)
            except Exception as error:  # travels as a value, see above
                logging.getLogger(__name__).exception("weight call %s failed", method)
                return f"{type(error).__name__}: {error}"
        return ""
