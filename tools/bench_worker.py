"""What bench_rollout runs inside vLLM's worker: the reload that every update must at least do."""

from __future__ import annotations

import time

from areal_hpc.weights.worker_calls import WorkerCalls


class BenchCalls(WorkerCalls):
    """`bench_load` on top of the calls of a rollout."""

    def bench_load(self, update_info: dict) -> float:
        """Seconds of vLLM's layerwise reload of an update's tensors, held in private memory."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        engine = self.weight_transfer_engine
        info = engine.parse_update_info(update_info)
        tensors = [(name, tensor.clone()) for name, tensor in engine._tensors(info)]
        with set_current_vllm_config(self.vllm_config):
            start = time.perf_counter()
            initialize_layerwise_reload(engine.model)
            engine.model.load_weights(iter(tensors))
            finalize_layerwise_reload(engine.model, engine.model_config)
            return time.perf_counter() - start
