"""Every configuration key, its unit, meaning and default. Read by `config.load`.

Plain dataclasses for OmegaConf's structured configs: nested groups, enums by name.
Checks that span keys lie in `config.load`; a key that nothing reads does not belong here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from areal_hpc.config.algorithm import AlgorithmConfig, Objective


# OmegaConf reads enums by member name and "async" is a keyword: hence the functional form.
Mode = Enum("Mode", {"async": "async", "sync": "sync"}, type=str)


class Device(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


class OnExisting(str, Enum):
    refuse = "refuse"
    resume = "resume"


class OnChange(str, Enum):
    refuse = "refuse"
    restart = "restart"


class OnUpdate(str, Enum):
    interrupt = "interrupt"
    drain = "drain"
    abort_and_resubmit = "abort_and_resubmit"


class KvOnUpdate(str, Enum):
    recompute = "recompute"
    keep = "keep"


class Sandbox(str, Enum):
    require = "require"
    best_effort = "best_effort"


class WeightBackend(str, Enum):
    auto = "auto"
    nccl = "nccl"
    gloo = "gloo"
    file = "file"


@dataclass
class RunConfig:
    """run: identity, length and deadlines."""

    name: str = "run"
    folder: str = "runs/${run.name}"
    """Run folder; on a cluster it must lie on a filesystem that every node sees."""
    seed: int = 0
    mode: Mode = Mode("async")
    """`async`: generation never waits; `sync`: generate a batch, train, update, repeat."""
    device: Device = Device.cpu
    total_steps: int = 100
    """Training steps after which the run ends; the end of data ends it earlier."""
    on_existing: OnExisting = OnExisting.refuse
    """What to do when the folder already holds this run: refuse, or resume from its last checkpoint."""
    take_over: bool = False
    """Take the run folder from a run on another host that gave no sign of life for minutes, and
    submit although a job of the run waits or runs."""
    deterministic: bool = False
    """Same seed, same layout: bitwise the same weights, however often the run is stopped and resumed.
    Needs mode sync; answers are computed so that they do not depend on what runs beside them."""
    start_deadline_s: float = 900.0
    """Longest wait for all ranks to load their models."""
    stall_deadline_s: float = 1800.0
    """Longest time without a finished trajectory, step or evaluation before the run is ended."""
    silence_deadline_s: float = 180.0
    """A rank that gives no sign of life for this long (stopped, node lost) is named and ends the run."""
    drain_deadline_s: float = 120.0
    """Longest wait for rollouts to commit and the trainer to save at a stop."""
    verbose: bool = False
    wandb: bool = False
    """Also write the figures of every step for Weights & Biases, offline, into the run folder."""


@dataclass
class ModelConfig:
    """model: the starting policy."""

    path: str = "???"
    """Hugging Face folder: config.json, tokenizer, safetensors."""
    tokenizer: str = "${model.path}"
    dtype: str = "float32"
    """float32 on CPU; bfloat16 or float16 on GPUs."""
    max_context: int = 2048
    """Prompt plus answer, tokens."""


@dataclass
class DatasetConfig:
    """One set of prompts: a file (`path`) or a generated task (`task`), not both."""

    path: str = ""
    """JSONL or Parquet."""
    prompt_column: str = "question"
    gold_column: str = "answer"
    tests_column: str = ""
    """Column with unit tests for code rewards."""
    task: str = ""
    """Name of a reasoning-gym dataset."""
    task_options: dict[str, Any] = field(default_factory=dict)
    task_seed: int = 0
    size: int = 0
    """Prompts to take; 0 takes all of a file (a generated task needs a number)."""
    template: str = "{prompt}"
    """Text around each prompt; {prompt} is replaced."""


@dataclass
class DataConfig:
    """data: training and held-out prompts."""

    train: DatasetConfig = field(default_factory=DatasetConfig)
    heldout: DatasetConfig = field(default_factory=DatasetConfig)
    """Never trained on: training prompts with the same text are left out and counted."""
    system_prompt: str = ""
    """Put first by the chat template, where the tokenizer has one."""
    chat_template: bool = True
    """Apply the tokenizer's chat template if it has one."""
    shuffle: bool = True
    epochs: int = 0
    """Times each prompt is used; 0 repeats until run.total_steps."""
    on_change: OnChange = OnChange.refuse
    """When a resumed run finds other training prompts, or another order, than before: refuse, or restart:
    go on from the checkpoint with the new prompts from their beginning; answers to the old ones are left out."""


@dataclass
class RolloutConfig:
    """rollout: generation."""

    group_size: int = 8
    """Answers per prompt."""
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    """Nucleus sampling, 1 is off. For training see configs/README.md: importance weights suppose the whole distribution."""
    top_k: int = -1
    """Tokens to draw from, -1 is off; see top_p."""
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    """End-of-sequence ids beside those of the model's generation_config.json."""
    max_num_seqs: int = 64
    """Sequences the engine runs at once."""
    max_num_batched_tokens: int = 4096
    tensor_parallel: int = 1
    """GPUs (or CPU processes) of one engine."""
    kv_cache_gib: float = 1.0
    """KV cache of one engine on CPU, GiB."""
    gpu_memory_utilization: float = 0.9
    """Fraction of GPU memory an engine may use."""
    enforce_eager: bool = False
    engine_options: dict[str, Any] = field(default_factory=dict)
    """Further vLLM engine arguments by name."""
    on_update: OnUpdate = OnUpdate.interrupt
    kv_on_update: KvOnUpdate = KvOnUpdate.recompute
    workflow: str = "single_turn"
    """Name of a built-in workflow or import path `package.module:Class`."""
    workflow_options: dict[str, Any] = field(default_factory=dict)
    lease_deadline_s: float = 1800.0
    """A lease not answered in this time is granted to another rank."""
    max_attempts: int = 3
    """Grants of one group before its prompt is dropped and counted."""
    shard_bytes: int = 4 * 1024 * 1024
    """A shard is written when its groups reach this size, after shard_latency_s, or when no other is under way."""
    shard_latency_s: float = 0.5
    hang_deadline_s: float = 300.0
    """Requests running and no token for this long: the engine is restarted."""
    max_engine_failures: int = 3
    """Engine failures within failure_window_s that end the run."""
    failure_window_s: float = 1800.0


@dataclass
class RewardsConfig:
    """rewards: scoring, a pool of processes beside each engine, or on each rank of groups.reward."""

    fn: str = "math"
    """Name of a built-in reward or import path `package.module:function`."""
    weights: dict[str, float] = field(default_factory=dict)
    """Several rewards as a weighted sum, name -> weight; replaces `fn` when given."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keywords of the reward function; with `weights`, a mapping of them per reward name."""
    right_part: str = ""
    """With `weights`: the reward that says whether an answer is right; empty takes that of the largest weight."""
    right_at: float = 1.0
    """An answer is right, for every accuracy, if that reward (before weighting) is at least this."""
    workers: int = 1
    """Worker processes per rollout rank; with groups.reward per reward rank, and none beside the engines."""
    timeout_s: float = 5.0
    """Wall-clock limit of one check, seconds; an answer that goes over it gets 0 and is counted."""
    memory_bytes: int = 2 * 1024**3
    """Memory limit of one check, and of each program that it runs."""
    sandbox: Sandbox = Sandbox.require
    """Programs under test: require every protection, or best_effort with what the kernel offers."""
    sandbox_paths: list[str] = field(default_factory=list)
    """Folders that programs under test may read and import from, beside the standard library."""
    answer_deadline_s: float = 900.0
    """With groups.reward: a reward rank that lets requests wait and answers none for this long ends the run."""


@dataclass
class OptimizerConfig:
    """trainer.optimizer: Adam; defaults are the paper's (Table 5)."""

    lr: float = 2.0e-5
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1.0e-5
    weight_decay: float = 0.05
    clip_grad: float = 1.0
    """Global gradient norm bound; 0 turns clipping off."""
    schedule: str = "constant"
    """constant, linear or cosine, after the warm-up."""
    warmup_steps: int = 0
    """Training steps over which the rate rises to lr."""
    min_lr: float = 0.0


@dataclass
class TrainerConfig:
    """trainer: Megatron-core."""

    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Pipeline-parallel size."""
    dp: int = 1
    """Data-parallel size; tp*pp*dp is the number of trainer ranks."""
    ep: int = 1
    """Expert-parallel size (MoE models)."""
    sequence_parallel: bool = False
    batch_size: int = 64
    """Trajectories consumed per training step (B of Eq. 3), a multiple of rollout.group_size."""
    micro_batch_tokens: int = 4096
    """Token budget C of one packed micro-batch (Algorithm 1)."""
    min_micro_batches: int = 1
    """k_min of Algorithm 1."""
    packing: str = "balanced"
    """balanced (Algorithm 1), ffd (first-fit-decreasing) or padded (fixed count, for comparison)."""
    recompute: bool = False
    """Recompute activations in the backward pass (long contexts)."""
    weight_history: int = 1
    """Older versions whose weights are kept (in host memory) to compare the engine's log-probabilities."""
    vocab_divisor: int = 128
    """The vocabulary is padded to a multiple of this times tp (never exported, never sampled)."""
    critic_lr: float = 0.0
    """Learning rate of the critic (algorithm.advantage=gae); 0 takes optimizer.lr."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class WeightsConfig:
    """weights: publishing new weights to running engines."""

    backend: WeightBackend = WeightBackend.auto
    """auto takes nccl on cuda and gloo on cpu; file goes through the shared filesystem."""
    bucket_bytes: int = 16 * 1024 * 1024
    timeout_s: float = 300.0
    """Deadline of each transfer call; names the rank that did not answer."""
    max_retries: int = 2
    """Further attempts to publish a version before the run is ended."""
    overlap: bool = False
    """Train on while the transfer runs, from a copy of the weights as large as the model."""


@dataclass
class EvalConfig:
    """eval: held-out accuracy."""

    every: int = 0
    """Versions between evaluations; 0 evaluates only before the first and after the last step."""
    num_samples: int = 1
    """Answers per prompt; more than one needs a temperature: greedy answers are all the same."""
    temperature: float = 0.0
    top_p: float = 1.0
    """Nucleus sampling of these answers, whatever rollout.top_p is."""
    top_k: int = -1
    """Tokens to draw these answers from, whatever rollout.top_k is; -1 is all."""
    max_new_tokens: int = 0
    """0 takes rollout.max_new_tokens."""
    batch_prompts: int = 64
    """Prompts per request to a rollout rank."""


@dataclass
class CheckpointConfig:
    """checkpoint: saving the trainer."""

    every: int = 50
    """Steps between checkpoints; the last step is always saved. 0: only the last."""
    keep_last: int = 2
    keep_every: int = 0
    """Also keep each checkpoint whose step is a multiple of this; 0 keeps none beside the last."""
    export_hf: bool = True
    """Write the last weights as a Hugging Face folder at the end."""


@dataclass
class GroupConfig:
    """groups.<role>: one component of the heterogeneous job."""

    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_rank: int = 0
    cpus_per_rank: int = 1
    mem_gib_per_node: int = 0
    """0 leaves it to Slurm's default."""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    sbatch_options: dict[str, str] = field(default_factory=dict)
    """Further sbatch options of this component, name -> value."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass
class GroupsConfig:
    controller: GroupConfig = field(default_factory=GroupConfig)
    trainer: GroupConfig = field(default_factory=GroupConfig)
    rollout: GroupConfig = field(default_factory=GroupConfig)
    reward: GroupConfig = field(default_factory=lambda: GroupConfig(nodes=0))
    """Ranks that only score, for heavy code tests; without nodes (as by default) every rollout rank scores itself."""


@dataclass
class LaunchConfig:
    """launch: how the job starts on a cluster."""

    site: str = ""
    """Site profile: a name in slurm/sites or a path to a YAML file."""
    mpi: str = ""
    """srun --mpi: pmi2, pmix, cray_shasta, ...; empty takes the site profile's, else pmi2."""
    time_min: int = 60
    """Walltime, minutes."""
    signal_lead_s: int = 180
    """The run is told to stop this long before the walltime, seconds."""
    max_requeues: int = 100
    """Times the job goes back into the queue, at the walltime or when preempted."""
    max_step_restarts: int = 3
    """Restarts of the step inside one allocation."""
    spare_nodes: int = 0
    """Nodes reserved in each group beside those that work. Slurm keeps a heterogeneous job
    through the loss of a node only if every component has more than one."""


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    groups: GroupsConfig = field(default_factory=GroupsConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
