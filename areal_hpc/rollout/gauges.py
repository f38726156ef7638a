"""What an engine last reported of itself: written by vLLM's output handler, read by the loop."""

from __future__ import annotations

import time
from typing import Any


class EngineGauges:
    """Counts since the rank's start, engines that were restarted included; `last_progress` is monotonic time."""

    def __init__(self) -> None:
        self.num_running = 0
        self.num_waiting = 0
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.last_progress = time.monotonic()


def gauge_logger(gauges: EngineGauges) -> Any:
    """A vLLM stat logger class that writes `gauges`."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class GaugeLogger(PrometheusStatLogger):
        """In the place of vLLM's own, which nobody asks here and which costs time at every step."""

        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            self.engine_indexes = engine_indexes or [0]

        def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0) -> None:
            if scheduler_stats is not None:
                gauges.num_running = scheduler_stats.num_running_reqs
                gauges.num_waiting = scheduler_stats.num_waiting_reqs
                gauges.prompt_tokens += scheduler_stats.prefix_cache_stats.queries
                gauges.cached_prompt_tokens += scheduler_stats.prefix_cache_stats.hits
            if iteration_stats is not None:
                gauges.generated_tokens += iteration_stats.num_generation_tokens
                gauges.last_progress = time.monotonic()

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            pass

        def record_admission_rejection(self, reason: str) -> None:
            pass

        def log(self) -> None:
            pass

        def log_engine_initialized(self) -> None:
            pass

    return GaugeLogger


def count_tokens_only(llm: Any) -> None:
    """Of vLLM's statistics of each token keep the number: latencies go to the logger that is not there.

    The output processor computes them for every token of every step, in the thread that the
    rank's loop runs in. Should a later vLLM not have these methods, they are computed again.
    """

    def count(request: Any, output: Any, timestamp: float | None, iteration_stats: Any) -> None:
        if iteration_stats is not None:
            iteration_stats.num_generation_tokens += len(output.new_token_ids)

    llm.output_processor._update_stats_from_output = count
    llm.output_processor._update_stats_from_finished = lambda *_: None
