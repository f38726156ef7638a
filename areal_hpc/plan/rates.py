"""What generation, training and publication cost, from the model's size and the hardware.

First estimates for a machine that nobody has measured: rooflines with the efficiencies
that engines and trainers reach in practice. `calibrate` replaces them by a run's own.

Decoding reads the weights and the cache of every running sequence once a step, so a step
costs base + per_sequence * m + per_kv_token * cached tokens: bound by memory at small
batches, by arithmetic and bookkeeping at large ones. Prefill and training are bound by
arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_hpc.config.algorithm import Objective
from areal_hpc.config.schema import Config, Device
from areal_hpc.plan.lengths import Lengths, LogNormal
from areal_hpc.plan.shape import ModelShape, dtype_bytes
from areal_hpc.plan.system import Rates

MEAN_PART = 5
"""A fifth of rollout.max_new_tokens is the mean answer where nothing better is known: 5,500
of 27,648 tokens is what R1-distilled models of 1.5B write at the start of mathematical RL."""
MAX_GUESSED_PROMPT = 256


@dataclass(frozen=True)
class Hardware:
    """One GPU, or one core (flops and bandwidth are then multiplied by the cores of a rank)."""

    name: str
    flops: float
    """Peak, in the type that is trained, operations/s."""
    bandwidth: float
    """Memory, bytes/s."""
    bandwidth_part: float
    """Part of the bandwidth that decoding reaches."""
    prefill_part: float
    train_part: float
    """Parts of `flops` that prefill and training reach (model FLOPs, attention included)."""
    decode_step_s: float
    """Scheduler, launches and sampler of a decode step, whatever its batch."""
    decode_seq_s: float
    """The same for each of its sequences."""
    network: float
    """Broadcast of weights into the engines' hosts, bytes/s."""
    load: float
    """From there into the model, bytes/s."""
    load_s: float
    """Pausing and resuming an engine."""
    storage: float
    """Checkpoints to the shared filesystem, bytes/s of the whole trainer."""
    optimizer_s: float
    """One optimizer update, its all-reduce included."""
    batch_s: float
    """Reading and packing one training batch."""


# An H800 has the arithmetic (989 TFLOP/s dense bf16) and the memory (3.35 TB/s) of an H100
# SXM; only NVLink is slower. 80% of the bandwidth is what paged attention and thin GEMMs
# reach, 2 ms a CUDA-graph step of a small model with its scheduler, 40% a packed trainer
# with pipeline bubbles. Hosts have 400 Gbit/s per GPU, shared by a ring through all engines.
H800 = Hardware(
    name="H800/H100 80 GB", flops=989e12, bandwidth=3.35e12, bandwidth_part=0.8, prefill_part=0.5,
    train_part=0.4, decode_step_s=2.0e-3, decode_seq_s=10e-6, network=10e9, load=5e9, load_s=0.3, storage=5e9,
    optimizer_s=0.25, batch_s=1.5,
)  # fmt: skip
# One core with AVX2 in float32; the step times are those of vLLM's CPU engine.
CPU_CORE = Hardware(
    name="CPU core", flops=100e9, bandwidth=8e9, bandwidth_part=0.6, prefill_part=0.5, train_part=0.4,
    decode_step_s=6e-3, decode_seq_s=50e-6, network=1e9, load=0.5e9, load_s=0.05, storage=0.5e9,
    optimizer_s=0.1, batch_s=0.2,
)  # fmt: skip


def hardware_of(config: Config) -> Hardware:
    return H800 if config.run.device is Device.cuda else CPU_CORE


def guess_lengths(config: Config, answer_tokens: float | None) -> LogNormal:
    """Long-tailed answers of the given mean, or of a fifth of the limit."""
    limit = config.rollout.max_new_tokens
    return LogNormal(min(answer_tokens or max(1.0, limit / MEAN_PART), limit), limit)


def guess_prompt_tokens(config: Config) -> int:
    """Half of the room that model.max_context leaves for a prompt, at most a paragraph."""
    room = config.model.max_context - config.rollout.max_new_tokens
    return max(1, min(room // 2, MAX_GUESSED_PROMPT))


def train_flops(config: Config, shape: ModelShape, lengths: Lengths, prompt_tokens: int) -> float:
    """Operations per trained token: passes over the model times one pass at its mean context."""
    # A token sits in the middle of its sequence on average, and long sequences hold more tokens.
    mean = lengths.mean + prompt_tokens
    context = (lengths.mean_square + 2 * prompt_tokens * lengths.mean + prompt_tokens**2) / mean / 2
    algorithm = config.algorithm
    passes = 3.0 + config.trainer.recompute
    if algorithm.objective is Objective.decoupled and algorithm.proximal == "recompute":
        passes += 1
    if algorithm.kl_coef > 0:
        passes += 1
    if algorithm.advantage == "gae":  # a critic of the same size: one more look and an update
        passes += 4 + config.trainer.recompute
    return passes * shape.forward_flops(context)


def estimate_rates(
    config: Config,
    shape: ModelShape,
    lengths: Lengths,
    prompt_tokens: int,
    trainer_ranks: int,
    hardware: Hardware | None = None,
) -> Rates:
    """Costs of an engine and of a trainer of `trainer_ranks` ranks."""
    hardware = hardware or hardware_of(config)
    on_cpu = config.run.device is Device.cpu
    groups, rollout, width = config.groups, config.rollout, dtype_bytes(config)
    # On GPUs a rank's engine spans tensor_parallel GPUs, on CPU whatever cores the rank has.
    engine_units = groups.rollout.cpus_per_rank if on_cpu else rollout.tensor_parallel
    trainer_units = trainer_ranks * (groups.trainer.cpus_per_rank if on_cpu else 1)
    engine_flops = hardware.flops * engine_units * hardware.prefill_part
    engine_bandwidth = hardware.bandwidth * engine_units * hardware.bandwidth_part
    weight_bytes = shape.parameters * width
    context = lengths.mean_square / lengths.mean / 2
    return Rates(
        decode_base_s=hardware.decode_step_s + shape.active_parameters * width / engine_bandwidth,
        decode_seq_s=hardware.decode_seq_s + 2 * shape.active_parameters / engine_flops,
        decode_kv_s=shape.kv_bytes(width) / engine_bandwidth,
        prefill_tokens_s=engine_flops / shape.forward_flops(context),
        train_tokens_s=hardware.flops
        * trainer_units
        * hardware.train_part
        / train_flops(config, shape, lengths, prompt_tokens),
        train_step_s=hardware.batch_s + hardware.optimizer_s * config.algorithm.minibatches,
        load_s=hardware.load_s + weight_bytes / hardware.network + weight_bytes / hardware.load,
        reward_s=0.01,
        reward_workers=_workers_per_engine(config),
        commit_s=config.rollout.shard_latency_s,
        # Weights, master weights and two moments.
        checkpoint_s=shape.parameters * (width + 12) / hardware.storage,
    )


def _workers_per_engine(config: Config) -> int:
    """Reward workers that an engine has for itself, or as its share of those of the reward ranks."""
    groups, workers = config.groups, config.rewards.workers
    return max(1, workers * groups.reward.ranks // groups.rollout.ranks) if groups.reward.ranks else workers
