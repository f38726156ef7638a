"""Memory of one trainer rank and one rollout rank, part by part, and what to change if it is too much.

Counts what the trainer holds: weights, gradients in float32, Megatron's distributed
optimizer (float32 master weights and Adam's two moments, sharded over dp), activations of
packed micro-batches under the pipeline schedule, and the vocabulary-parallel logits with
their float32 copies; and what an engine holds: weights, the work space of a prefill step,
logits of the sampler and the key-value cache in the rest. Pure; called by `cli`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from areal_hpc.config.schema import Config, Device
from areal_hpc.plan.lengths import Lengths
from areal_hpc.plan.shape import ModelShape, dtype_bytes

GIB = 1024**3
DEFAULT_GPU_GIB = 80.0
DEVICES = {
    "L4": 24, "A100 40": 40, "L40S": 48, "MI250X (GCD)": 64, "A100, H100, H800": 80, "GH200": 96,
    "H200": 141, "MI300X, B200": 192,
}  # fmt: skip
"""Devices by memory, GiB as sold."""
GPU_FRAMEWORK = 2 * GIB
"""CUDA context, NCCL channels and library work space of a process."""
CPU_FRAMEWORK = GIB
"""A Python process with torch and Megatron or vLLM loaded."""
LOGIT_BYTES = {4: 20, 2: 22}
"""Peak per logit, by bytes of a weight: the logits, in half precision their float32 copy too,
scaled, as probabilities, and two temporaries of the entropy."""
LEAD_COPY = "published copy"
"""Part of one rank alone: weights.overlap trains on while the transfer goes over a copy of all weights."""
USABLE = {Device.cuda: 0.95, Device.cpu: 0.8}
"""Allocators lose the rest to fragments: PyTorch's pool little, the C library's heap a fifth."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank's device (its host on CPU), the largest rank of its role."""

    role: str
    parts: dict[str, int]
    limit: int
    advice: str
    """What to change, if it does not fit."""
    kv_tokens: int = 0
    """Rollout: tokens that the cache holds."""
    host: int = 0
    """Bytes of host memory beside the device's."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return not self.advice


def memory_limit(config: Config, gpu_memory_gib: float | None) -> tuple[int, int]:
    """Bytes of a trainer rank and of a GPU (CPU: rank) of the rollout group."""
    if config.run.device is Device.cuda:
        limit = int((gpu_memory_gib or DEFAULT_GPU_GIB) * GIB)
        return limit, limit

    def share(group) -> int:
        node = group.mem_gib_per_node * GIB or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(node // group.ranks_per_node)

    return share(config.groups.trainer), share(config.groups.rollout)


def trainer_memory(config: Config, shape: ModelShape, limit: int, dp: int | None = None) -> RankMemory:
    """The fullest trainer rank; `dp` replaces the configuration's (another split)."""
    trainer, width = config.trainer, dtype_bytes(config)
    dp = dp or trainer.dp
    stages = [_stage(config, shape, stage, dp) for stage in range(trainer.pp)]
    if config.weights.overlap:
        # The lead, a rank of the first stage, keeps the whole model under its Hugging Face names.
        stages[0][LEAD_COPY] = shape.parameters * width
    parts = max(stages, key=lambda stage: sum(stage.values()))
    # The reference policy waits in host memory, and the current one while it computes.
    copies = 2 * (config.algorithm.kl_coef > 0) * int(parts["weights"])
    on_cpu = config.run.device is Device.cpu
    parts["reference"] = copies if on_cpu else 0
    # A publication gathers one whole tensor at a time and copies it into buckets.
    parts["publication"] = shape.embedding_parameters * width + 2 * config.weights.bucket_bytes
    parts["framework"] = CPU_FRAMEWORK if on_cpu else GPU_FRAMEWORK
    parts = {name: int(size) for name, size in parts.items() if size}
    total = sum(parts.values())
    advice = "" if total <= USABLE[config.run.device] * limit else _trainer_advice(config, parts)
    return RankMemory("trainer", parts, limit, advice, host=0 if on_cpu else copies)


def _stage(config: Config, shape: ModelShape, stage: int, dp: int) -> dict[str, float]:
    """Parts of a rank of pipeline stage `stage`."""
    trainer, width = config.trainer, dtype_bytes(config)
    tp, pp, ep = trainer.tp, trainer.pp, trainer.ep
    layers = shape.layers / pp
    last = stage == pp - 1
    vocabulary = (stage == 0) + (last and not (pp == 1 and shape.tied))
    dense = (layers * shape.dense_parameters + vocabulary * shape.embedding_parameters) / tp
    # With ep > 1 each expert lies whole on one rank, and its optimizer is sharded over the
    # tp * dp / ep ranks that hold the same one.
    expert_split = ep if ep > 1 else tp
    experts = layers * shape.expert_parameters / expert_split
    expert_dp = tp * dp / ep if ep > 1 else dp
    held, sharded = dense + experts, dense / dp + experts / max(1.0, expert_dp)
    models = 2 if config.algorithm.advantage == "gae" else 1  # the critic
    tokens = max(trainer.micro_batch_tokens, config.model.max_context)
    return {
        "weights": models * held * width,
        "gradients": models * held * 4,
        # Float32 weights are their own master.
        "optimizer": models * sharded * (8 if width == 4 else 12),
        "activations": _activations(config, shape, tokens, layers, in_flight=pp - stage),
        "logits": tokens * _padded_vocab(config, shape) / tp * LOGIT_BYTES[width] if last else 0,
    }


def _padded_vocab(config: Config, shape: ModelShape) -> int:
    step = config.trainer.vocab_divisor * config.trainer.tp
    return -(-shape.vocab // step) * step


def _activations(config: Config, shape: ModelShape, tokens: int, layers: float, in_flight: int) -> float:
    """Bytes kept for the backward pass of the micro-batches in flight on one stage.

    Per token and layer: inputs of the two norms, their results and the two residual sums
    (whole on every tp rank unless sequence_parallel); queries, keys and values before and
    after the rotation, attention's result; gate, up and their product for every expert
    that a token visits. Flash attention keeps no scores.
    """
    tp, width = config.trainer.tp, dtype_bytes(config)
    visits = shape.experts_per_token if shape.experts else 1
    whole = 6 * shape.hidden / (tp if config.trainer.sequence_parallel else 1)
    # The layers used on CPU fuse less: they keep the activated gate, and padded copies for attention.
    queries, pairs, feed_forward = (6, 4, 4) if config.run.device is Device.cpu else (3, 3, 3)
    split = (
        queries * shape.heads + pairs * shape.kv_heads
    ) * shape.head_dim + feed_forward * shape.ffn * visits
    layer = tokens * width * (whole + split / tp)
    if not config.trainer.recompute:
        return in_flight * layers * layer
    kept = tokens * width * shape.hidden / (tp if config.trainer.sequence_parallel else 1)
    return in_flight * layers * kept + layer


def _trainer_advice(config: Config, parts: dict[str, int]) -> str:
    """What to change, by the part that takes most."""
    trainer = config.trainer
    largest = max(parts, key=lambda name: parts[name])
    working = parts.get("activations", 0) + parts.get("logits", 0)
    if working >= sum(parts.values()) - working:
        largest = "activations" if parts.get("activations", 0) > parts.get("logits", 0) else "logits"
    floor = config.model.max_context
    if largest == LEAD_COPY:
        return f"{LEAD_COPY} of the lead: set weights.overlap=false"
    if largest == "activations" and not trainer.recompute:
        return "activations: set trainer.recompute=true"
    if largest in ("activations", "logits") and trainer.micro_batch_tokens > floor:
        return f"{largest}: lower trainer.micro_batch_tokens towards model.max_context={floor}"
    if largest == "logits":
        return "logits: raise trainer.tp (the vocabulary is split over it) or lower model.max_context"
    if largest == "activations":
        return "activations: raise trainer.tp with trainer.sequence_parallel=true, or lower model.max_context"
    if largest == "optimizer":
        return "optimizer: raise trainer.dp (it is sharded over dp), or trainer.tp or pp"
    return f"{largest}: raise trainer.tp or trainer.pp (more trainer ranks per replica)"


def rollout_memory(config: Config, shape: ModelShape, limit: int) -> RankMemory:
    """One GPU of an engine, or the host memory of one engine on CPU."""
    rollout, width = config.rollout, dtype_bytes(config)
    on_cpu = config.run.device is Device.cpu
    tp = 1 if on_cpu else rollout.tensor_parallel
    stored = shape.parameters
    if on_cpu and shape.tied:  # the CPU engine keeps a repacked head of its own
        stored += shape.embedding_parameters
    batch = max(rollout.max_num_batched_tokens, rollout.max_num_seqs)
    visits = shape.experts_per_token if shape.experts else 1
    parts = {
        "weights": int(stored * width / tp),
        "work space": int(
            batch * width * (4 * shape.hidden + 3 * shape.ffn * visits / tp)
            # Logits, their float32 copy and the processed log-probabilities of every sequence.
            + rollout.max_num_seqs * shape.vocab * (width + 8)
        ),
        "framework": CPU_FRAMEWORK if on_cpu else GPU_FRAMEWORK,
    }
    stage = shape.parameters * width  # new weights arrive in host memory beside generation
    token = shape.kv_bytes(width, tp)
    if on_cpu:
        cache = int(rollout.kv_cache_gib * GIB)
        parts["staged weights"] = stage
    else:
        cache = int(rollout.gpu_memory_utilization * limit) - sum(parts.values())
    parts["KV cache"] = max(0, cache)
    kv_tokens = max(0, cache) // token
    return RankMemory(
        "rollout",
        parts,
        limit,
        _rollout_advice(config, parts, limit, kv_tokens),
        kv_tokens=kv_tokens,
        host=0 if on_cpu else stage,
    )


def _rollout_advice(config: Config, parts: dict[str, int], limit: int, kv_tokens: int) -> str:
    context = config.model.max_context
    if config.run.device is Device.cpu:
        if sum(parts.values()) > USABLE[Device.cpu] * limit:
            return (
                "lower rollout.kv_cache_gib or rollout.max_num_seqs, or give groups.rollout "
                "fewer ranks_per_node"
            )
        if kv_tokens < context:
            return (
                f"KV cache: {kv_tokens:,} tokens are fewer than model.max_context={context:,}: "
                "raise rollout.kv_cache_gib"
            )
        return ""
    if kv_tokens < context:
        return (
            f"KV cache: {kv_tokens:,} tokens are fewer than model.max_context={context:,}: raise "
            "rollout.tensor_parallel, lower rollout.max_num_batched_tokens or max_num_seqs, or "
            "model.max_context"
        )
    return ""


def engine_slots(config: Config, memory: RankMemory, lengths: Lengths, prompt_tokens: int) -> int:
    """Sequences that run at once: rollout.max_num_seqs, or what the cache holds of them.

    A running sequence is caught at a random moment of its life: its mean answer so far is
    half the length-weighted mean.
    """
    context = prompt_tokens + lengths.mean_square / lengths.mean / 2
    return max(1, min(config.rollout.max_num_seqs, int(memory.kv_tokens / context)))


def smallest_device(total: int) -> str:
    """The smallest device that `total` bytes fit on."""
    for name, size in DEVICES.items():
        if total <= USABLE[Device.cuda] * size * GIB:
            return f"{name} ({size} GiB)"
    return "none"
