"""One vLLM engine of a rollout rank: start, generate, pause, change weights, end.

Owns the AsyncLLM and, through it, the engine's child processes. Everything else asks
here: `supervisor` decides when to start it again, `updates` drives its weights, workflows
generate through `workflow.EpisodeEngine`. vLLM is imported when the engine starts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from areal_hpc.config.schema import Config, Device, KvOnUpdate, OnUpdate
from areal_hpc.rollout.deadline import deadline
from areal_hpc.rollout.environment import derive_seed, engine_environment
from areal_hpc.rollout.gauges import EngineGauges, count_tokens_only, gauge_logger
from areal_hpc.rollout.generation import Generation, join, to_generation
from areal_hpc.rollout.invariance import INVARIANCE, NotInvariant, check_invariance
from areal_hpc.types import SamplingSpec
from areal_hpc.weights.transfer import resolve_backend

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

Result = TypeVar("Result")
CUT_POLL_S = 0.02


class EngineDied(RuntimeError):
    """The engine's processes are gone (or about to be): restart it, ask again."""


class PromptTooLong(ValueError):
    """No room for a single new token in model.max_context."""


class RolloutEngine:
    """An engine of `rollout` and `model` of the configuration.

    index: the rollout's role_rank; engines of one run sample from different seeds.
    """

    def __init__(self, config: Config, *, index: int = 0, cores: str = "auto", log: Path) -> None:
        self._config = config
        self._index = index
        self._cores = cores
        self._log = log
        self._llm: AsyncLLM | None = None
        self._processes: list[Any] = []
        self._admitted = asyncio.Event()
        self._resumed = asyncio.Event()
        self._death = asyncio.Event()
        self.gauges = EngineGauges()
        self.num_in_flight = 0
        self._open: set[str] = set()
        self._cut: str | None = None
        self._staged = False
        self.version = 0

    # -- life ----------------------------------------------------------------------

    async def start(self, version: int = 0) -> None:
        """Load model.path and label it `version`; answers wait until `admit`.

        Raises EngineDied if the engine does not come up, NotInvariant if its answers do not
        keep what run.deterministic promises.
        """
        from vllm.utils.gc_utils import freeze_gc_heap

        self.gauges.last_progress = time.monotonic()
        self._death = asyncio.Event()
        self._staged = False
        try:
            self._llm = await asyncio.to_thread(self._construct)
            self._processes = _all_processes(self._llm)
            # vLLM keeps a deadline of its own until here.
            async with deadline(self._config.run.start_deadline_s, "answer its first requests"):
                await self.set_version(version)
                await self._warm_up()
                if self._config.run.deterministic:
                    await check_invariance(self._answer, self._config.model.max_context)
            # What was loaded stays: no collection has to look at it again (vLLM's server does the same).
            freeze_gc_heap()
        except NotInvariant:
            self.kill()
            raise
        except Exception as error:
            self.kill()
            raise EngineDied(f"the engine did not start: {error}") from error
        self._resumed.set()

    def admit(self) -> None:
        """The weights are the right ones: let answers begin."""
        self.gauges.last_progress = time.monotonic()
        self._admitted.set()

    async def _warm_up(self) -> None:
        """The first requests take seconds (kernels are prepared): not while somebody waits."""
        sampling = SamplingSpec(max_new_tokens=2, stop=("\0",))
        calls = [self._answer([0] * 8, sampling, f"warm-up-{seed}", seed) for seed in range(2)]
        await asyncio.gather(*calls)

    def kill(self) -> None:
        """End every process of the engine at once; they answer to nothing gentler (see environment)."""
        self._death.set()
        self._admitted.clear()
        for process in self._processes:
            _kill(process)
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown(timeout=0)
            # vLLM's finalizer shuts down once more, and fails if that is at the interpreter's end.
            llm.shutdown = lambda *_, **__: None
        self._processes = []

    @property
    def alive(self) -> bool:
        return (
            self._llm is not None
            and not self._llm.errored
            and all(process.is_running() and process.status() != "zombie" for process in self._processes)
        )

    @property
    def died(self) -> bool:
        """It was there and is no more; False while its processes are being started."""
        return self._llm is not None and not self.alive

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def capacity(self) -> int:
        return self._config.rollout.max_num_seqs

    # -- generation ----------------------------------------------------------------

    async def generate(
        self, token_ids: list[int], sampling: SamplingSpec, request_id: str, seed: int,
        begun: Generation | None = None,
    ) -> Generation:  # fmt: skip
        """Answer one prompt; goes on across weight updates, token by token under its own version.

        The budget is what fits: at most max_new_tokens, at most the rest of the context,
        interruptions included. `begun` is the beginning of the answer, from an earlier run.
        Ends with finish_reason abort after `cut_short`. Raises PromptTooLong, and EngineDied
        when the engine goes. While a new engine is prepared, waits for it.
        """
        budget = min(sampling.max_new_tokens, self._config.model.max_context - len(token_ids))
        if budget < 1:
            raise PromptTooLong(
                f"a prompt of {len(token_ids)} tokens leaves no room in "
                f"model.max_context={self._config.model.max_context}"
            )
        if not self.num_in_flight:
            # Silence is only counted while somebody waits for an answer.
            self.gauges.last_progress = time.monotonic()
        self.num_in_flight += 1
        try:
            return await self._answer_whole(token_ids, sampling, budget, request_id, seed, begun)
        finally:
            self.num_in_flight -= 1

    async def _answer_whole(
        self, token_ids: list[int], sampling: SamplingSpec, budget: int, request_id: str, seed: int,
        begun: Generation | None,
    ) -> Generation:  # fmt: skip
        parts = [] if begun is None else [begun.without_tail(sampling.stop)]
        while True:
            done = sum(len(part.token_ids) for part in parts)
            if self._is_cut(request_id):
                return join(parts, "abort")
            if done >= budget:
                return join(parts, "length")
            if not self._admitted.is_set():
                # A new engine holds the model's first weights until those that serve are restored.
                await self._unless_dead(self._admitted.wait())
                continue
            part = await self._answer(
                token_ids + [int(token) for part in parts for token in part.token_ids],
                replace_budget(sampling, budget - done),
                f"{request_id}.{len(parts)}",
                derive_seed(seed, done) if done else seed,
            )
            if part.finish_reason != "abort":
                return join([*parts, part], part.finish_reason)
            parts.append(part.without_tail(sampling.stop))
            if not self._is_cut(request_id):
                # Aborted by an update (abort_and_resubmit): go on under the new weights.
                await self._unless_dead(self._resumed.wait())

    async def cut_short(self, prefix: str) -> None:
        """End every answer whose request id begins with `prefix`, and those to come, as it stands."""
        self._cut = prefix
        while running := [request_id for request_id in self._open if request_id.startswith(prefix)]:
            # Again and again: a request may only just be on its way to the engine.
            await self._unless_dead(self._require().abort(running))
            await asyncio.sleep(CUT_POLL_S)

    def _is_cut(self, request_id: str) -> bool:
        return self._cut is not None and request_id.startswith(self._cut)

    async def _answer(
        self, prompt: list[int], sampling: SamplingSpec, request_id: str, seed: int
    ) -> Generation:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        llm = self._require()
        params = SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            # Text is only needed to find stop strings; token ids are what travels.
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        async def last_output() -> Any:
            outputs = llm.generate(TokensPrompt(prompt_token_ids=prompt), params, request_id)
            return [output async for output in outputs][-1]

        self._open.add(request_id)
        try:
            final = await self._unless_dead(last_output())
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineDied(f"the engine died while it answered {request_id}") from error
        finally:
            self._open.discard(request_id)
        return to_generation(final.outputs[0])

    # -- weights -------------------------------------------------------------------

    async def pause(self) -> None:
        """Stop generating as rollout.on_update says; unfinished answers wait, finish or are aborted."""
        mode = {OnUpdate.interrupt: "keep", OnUpdate.drain: "wait", OnUpdate.abort_and_resubmit: "abort"}
        rollout = self._config.rollout
        self._resumed.clear()
        await self._unless_dead(
            self._require().pause_generation(
                mode=mode[rollout.on_update],
                clear_cache=rollout.kv_on_update is KvOnUpdate.recompute,
            )
        )

    async def resume(self) -> None:
        await self._unless_dead(self._require().resume_generation())
        self.gauges.last_progress = time.monotonic()
        self._resumed.set()

    async def connect_weights(self, init_info: dict[str, Any]) -> None:
        await self._worker_calls(("init_weight_transfer_engine", {"init_info": init_info}))

    async def stage_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to bring an update into the stage; the model is not touched.

        With some backends the transfer still runs when this returns (weights.staged).
        """
        await self.unstage_weights()
        self._staged = True
        try:
            await self._worker_calls(
                ("start_weight_update", {}), ("update_weights", {"update_info": update_info})
            )
        except Exception:
            # vLLM's workers have ended their session then.
            self._staged = False
            raise

    async def load_weights(self) -> None:
        """Load what is staged; only under a pause."""
        self._staged = False
        await self._worker_calls(("finish_weight_update", {}))

    async def unstage_weights(self) -> None:
        """Forget what is staged, if anything is."""
        if self._staged:
            self._staged = False
            await self._worker_calls(
                ("update_weights", {"update_info": {"abandon": True}}), ("finish_weight_update", {})
            )

    async def clear_cache(self) -> None:
        """Forget the KV of all prefixes; RuntimeError while a request holds some."""
        if not await self._unless_dead(self._require().reset_prefix_cache()):
            raise RuntimeError("the engine did not clear its prefix cache")

    async def set_version(self, version: int) -> None:
        await self._unless_dead(self._require().update_weight_version(str(version)))
        self.version = version

    async def _worker_calls(self, *calls: tuple[str, dict[str, Any]]) -> None:
        """Calls of weights.worker_calls on all workers; RuntimeError with the first complaint."""
        answers = await self._unless_dead(self._require().collective_rpc("weight_calls", args=(calls,)))
        self.gauges.last_progress = time.monotonic()
        for answer in answers:
            if answer:
                raise RuntimeError(answer)

    async def _unless_dead(self, call: Coroutine[Any, Any, Result]) -> Result:
        """The call's result, or EngineDied: a killed engine leaves its callers without an answer."""
        work = asyncio.ensure_future(call)
        death = asyncio.ensure_future(self._death.wait())
        try:
            await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
            # An engine that was ended may have answered just before, or with an error of its own.
            if death.done() and not (work.done() and not work.cancelled() and work.exception() is None):
                raise EngineDied("the engine was ended")
            return work.result()
        finally:
            death.cancel()
            if not work.done():
                work.cancel()

    def _require(self) -> AsyncLLM:
        if self._llm is None or self._llm.errored:
            raise EngineDied("the engine is not running")
        return self._llm

    # -- construction --------------------------------------------------------------

    def _construct(self) -> AsyncLLM:
        """In a thread of its own: takes as long as loading the model, and blocks signals meanwhile."""
        run = self._config.run
        invariance = INVARIANCE[run.device.value] if run.deterministic else None
        with engine_environment(self._cores, str(self._log), run.start_deadline_s, invariance):
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**engine_arguments(self._config, self._index)),
                stat_loggers=[gauge_logger(self.gauges)],
            )
        count_tokens_only(llm)
        return llm


def engine_arguments(config: Config, index: int) -> dict[str, Any]:
    """vLLM's arguments for engine `index`; rollout.engine_options may add or override."""
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "tokenizer": config.model.tokenizer,
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_context,
        "seed": derive_seed(config.run.seed, "engine", index) % 2**31,
        "tensor_parallel_size": rollout.tensor_parallel,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, rollout.max_num_seqs),
        "enforce_eager": rollout.enforce_eager,
        "enable_prefix_caching": True,
        # The distribution that was sampled from: temperature, top-p and top-k applied.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": f"areal_{resolve_backend(config).value}"},
        "worker_extension_cls": "areal_hpc.weights.worker_calls.WorkerCalls",
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if config.run.deterministic:
        # A prompt computed in pieces draws random numbers for each, and which prefixes are
        # cached depends on time: every prompt is computed whole.
        arguments["enable_prefix_caching"] = arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(arguments["max_num_batched_tokens"], config.model.max_context)
    if config.run.device is Device.cpu:
        arguments["kv_cache_memory_bytes"] = int(rollout.kv_cache_gib * 1024**3)
    else:
        arguments["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    return arguments | dict(rollout.engine_options)


def replace_budget(sampling: SamplingSpec, max_new_tokens: int) -> SamplingSpec:
    return msgspec.structs.replace(sampling, max_new_tokens=max_new_tokens)


def _all_processes(llm: AsyncLLM) -> list[Any]:
    """The engine core and the workers below it, as psutil processes."""
    import psutil

    cores = [psutil.Process(process.pid) for process in llm.engine_core.resources.engine_manager.processes]
    return cores + [child for core in cores for child in core.children(recursive=True)]


def _kill(process: Any) -> None:
    try:
        # A stopped process dies from SIGKILL too; psutil guards against a reused pid.
        if process.is_running():
            os.kill(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
