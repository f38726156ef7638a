"""Configuration of `areal-hpc sft`: supervised training of a starting model. Read by `launch.sft`."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import OmegaConf

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import merge_config
from areal_hpc.config.model_rules import check_model
from areal_hpc.config.schema import DatasetConfig, Device, OptimizerConfig


@dataclass
class ScratchConfig:
    """init.scratch: a new Qwen2-architecture model with a byte-level tokenizer of its own."""

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 256
    max_positions: int = 256
    tie_embeddings: bool = True


@dataclass
class SftInitConfig:
    """init: where the weights come from."""

    path: str = ""
    """Hugging Face folder to go on from; empty starts from scratch."""
    dtype: str = "float32"
    scratch: ScratchConfig = field(default_factory=ScratchConfig)


@dataclass
class WorkedConfig:
    """data.worked: generated worked examples of addition, used when data.path is empty."""

    size: int = 0
    seed: int = 0
    slips: float = 0.0
    """Fraction of the carries that the examples forget."""


@dataclass
class SftDataConfig:
    """data: prompt/response examples."""

    path: str = ""
    """JSONL, one object a line."""
    prompt_column: str = "prompt"
    response_column: str = "response"
    worked: WorkedConfig = field(default_factory=WorkedConfig)
    heldout: DatasetConfig = field(default_factory=DatasetConfig)
    """Examples with the prompt of one of these are left out."""
    max_length: int = 256
    """Longer examples are refused, tokens."""


@dataclass
class SftTrainerConfig:
    """trainer: layout and length of the training."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    steps: int = 200
    batch_size: int = 128
    """Examples per update."""
    micro_batch_tokens: int = 8192
    recompute: bool = False
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass
class SftConfig:
    output: str = "models/sft"
    """Hugging Face folder to write; must not exist."""
    seed: int = 0
    device: Device = Device.cpu
    timeout_s: float = 600.0
    """Deadline of collectives between trainer ranks."""
    log_every: int = 20
    init: SftInitConfig = field(default_factory=SftInitConfig)
    data: SftDataConfig = field(default_factory=SftDataConfig)
    trainer: SftTrainerConfig = field(default_factory=SftTrainerConfig)


def load_sft_config(path: str, overrides: list[str]) -> SftConfig:
    """Read and check; raises ConfigError."""
    config = merge_config(SftConfig, path, overrides)
    trainer = config.trainer
    for key in ("tp", "pp", "dp", "steps", "batch_size", "micro_batch_tokens"):
        if getattr(trainer, key) < 1:
            raise ConfigError(f"trainer.{key}={getattr(trainer, key)} must be at least 1")
    if trainer.batch_size < trainer.dp:
        raise ConfigError(f"trainer.batch_size={trainer.batch_size} is smaller than trainer.dp={trainer.dp}")
    if not config.data.path and config.data.worked.size < 1:
        raise ConfigError("data.path is empty and data.worked.size=0: give examples or their number")
    if not 0.0 <= config.data.worked.slips <= 1.0:
        raise ConfigError(f"data.worked.slips={config.data.worked.slips} must lie between 0 and 1")
    scratch = config.init.scratch
    if not config.init.path:
        for key, size, degree in (
            ("hidden_size", scratch.hidden_size, scratch.num_heads),
            ("num_heads", scratch.num_heads, scratch.num_kv_heads),
        ):
            if size % degree:
                raise ConfigError(f"init.scratch.{key}={size} is not divisible by {degree}: change it")
        model = {
            "model_type": "qwen2",
            "num_attention_heads": scratch.num_heads,
            "num_key_value_heads": scratch.num_kv_heads,
            "num_hidden_layers": scratch.num_layers,
            "intermediate_size": scratch.intermediate_size,
        }
        check_model(model, tp=trainer.tp, pp=trainer.pp, dp=trainer.dp, key="init.scratch")
    return config


def sft_config_yaml(config: SftConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))
