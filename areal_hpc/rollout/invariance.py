"""Whether an engine's answers depend on what it computes beside them, or on how often it has to
compute them. Called by `engine` in deterministic runs, before the engine serves.

A stopped run answers the rest of a batch in other company than the run that was not
stopped. Only where a token's log-probability does not change by that can both end with the
same weights; it depends on the kernels, hence on the hardware, and is therefore tried out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from areal_hpc.types import SamplingSpec

if TYPE_CHECKING:
    from areal_hpc.rollout.generation import Generation

INVARIANCE = {
    # Kernels whose sums do not depend on the batch.
    "cuda": {"VLLM_BATCH_INVARIANT": "1"},
    # Long attention is not cut over the threads that happen to be idle.
    "cpu": {"VLLM_CPU_ATTN_SPLIT_KV": "0"},
}
"""Environment of a deterministic engine, by run.device."""
PROBES = 12
"""Answers that are compared."""


class NotInvariant(RuntimeError):
    """The engine's answers depend on their company: run.deterministic cannot be kept."""


async def check_invariance(
    answer: Callable[[list[int], SamplingSpec, str, int], Awaitable[Generation]], max_context: int
) -> None:
    """Answer some prompts one by one and all at once, and some in two pieces; NotInvariant if a bit differs."""
    prompts = [[1 + (7 * n + k) % 97 for k in range(min(5 + 13 * n, max_context - 1))] for n in range(PROBES)]
    specs = [SamplingSpec(min(8 + n, max_context - len(prompt))) for n, prompt in enumerate(prompts)]
    calls = list(enumerate(zip(prompts, specs, strict=True)))
    alone = [await answer(prompt, spec, f"alone-{n}", n) for n, (prompt, spec) in calls]
    together = await asyncio.gather(*[answer(prompt, spec, f"together-{n}", n) for n, (prompt, spec) in calls])
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        if not _same(one, other):
            raise NotInvariant(
                f"run.deterministic=true: on this hardware the engine's answer {number} of {PROBES} depends on what "
                "is computed beside it: set run.deterministic=false or rollout.max_num_seqs=1"
            )
    # An engine whose KV memory is full puts answers off and computes them again, as a prompt.
    for n, (prompt, spec) in calls:
        greedy = msgspec.structs.replace(spec, temperature=0.0)
        whole = await answer(prompt, greedy, f"whole-{n}", n)
        half = len(whole.token_ids) // 2
        rest = msgspec.structs.replace(greedy, max_new_tokens=len(whole.token_ids) - half)
        again = await answer(prompt + whole.token_ids[:half].tolist(), rest, f"again-{n}", n)
        if not _same(again, whole.from_token(half)):
            raise NotInvariant(
                f"run.deterministic=true: on this hardware the engine's answer {n} of {PROBES} is another when it is "
                "computed again after an interruption: set run.deterministic=false"
            )


def _same(one: Generation, other: Generation) -> bool:
    """Whether tokens and log-probabilities are equal, bit for bit."""
    return all(
        getattr(one, name).tobytes() == getattr(other, name).tobytes() for name in ("token_ids", "logprobs")
    )
