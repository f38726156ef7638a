"""Sizes of a decoder-only model: from its config.json, or by name when the folder is elsewhere.

Read by `memory` and `rates`. Counts parameters per parallel rank, arithmetic and KV bytes
per token; nothing here depends on hardware.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.model_rules import num_experts
from areal_hpc.config.schema import Config

# hidden, layers, heads, key-value heads, intermediate, vocabulary, tied: the Qwen2.5 family,
# whose 1.5B, 7B, 14B and 32B are also the R1-distilled models.
_SIZES = {
    "0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "3B": (2048, 36, 16, 2, 11008, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
    "14B": (5120, 48, 40, 8, 13824, 152064, False),
    "32B": (5120, 64, 40, 8, 27648, 152064, False),
    "72B": (8192, 80, 64, 8, 29568, 152064, False),
}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelShape:
    """`ffn` is the width of one expert where `experts` > 0."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0

    @property
    def attention_parameters(self) -> int:
        """Of one layer."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """All experts of one layer; 0 for a dense model."""
        return 3 * self.hidden * self.ffn * self.experts

    @property
    def dense_parameters(self) -> int:
        """Everything of one layer that is not an expert, norms and router included."""
        feed_forward = self.hidden * self.experts if self.experts else 3 * self.hidden * self.ffn
        return self.attention_parameters + feed_forward + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """One vocabulary matrix."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        matrices = 1 if self.tied else 2
        return (
            self.layers * (self.dense_parameters + self.expert_parameters)
            + matrices * self.embedding_parameters
            + self.hidden
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with (the embedding is only looked up)."""
        feed_forward = 3 * self.hidden * self.ffn * (self.experts_per_token if self.experts else 1)
        return self.layers * (self.attention_parameters + feed_forward) + self.embedding_parameters

    def forward_flops(self, mean_context: float) -> float:
        """Floating-point operations of one token's forward pass with `mean_context` tokens before it."""
        scores = 4 * self.heads * self.head_dim * mean_context * self.layers
        return 2.0 * self.active_parameters + scores

    def kv_bytes(self, dtype_bytes: int, tensor_parallel: int = 1) -> int:
        """Key-value cache of one token on one GPU of an engine (heads are repeated beyond their number)."""
        heads = max(1, -(-self.kv_heads // tensor_parallel))
        return 2 * self.layers * heads * self.head_dim * dtype_bytes


def find_shape(config: Config, model_size: str | None) -> ModelShape:
    """The model of the configuration, or the named size; ConfigError when neither can be had."""
    if model_size:
        return named_shape(model_size)
    file = Path(config.model.path).expanduser() / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"model.path={config.model.path} has no config.json here; give a Hugging Face folder "
            f"or --model-size ({', '.join(_SIZES)})"
        )
    try:
        return read_shape(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{file} does not describe a decoder: {type(error).__name__} {error}") from None


def named_shape(size: str) -> ModelShape:
    if size not in _SIZES:
        raise ConfigError(
            f"--model-size={size} is not one of {', '.join(_SIZES)}; or set model.path to a folder"
        )
    hidden, layers, heads, kv_heads, ffn, vocab, tied = _SIZES[size]
    return ModelShape(size, hidden, layers, heads, kv_heads, 128 if hidden > 896 else 64, ffn, vocab, tied)


def read_shape(model: dict) -> ModelShape:
    """From the content of a config.json."""
    heads = model["num_attention_heads"]
    experts = num_experts(model)
    shape = ModelShape(
        name=str(model.get("model_type", "model")),
        hidden=model["hidden_size"],
        layers=model["num_hidden_layers"],
        heads=heads,
        kv_heads=model.get("num_key_value_heads") or heads,
        head_dim=model.get("head_dim") or model["hidden_size"] // heads,
        ffn=model["moe_intermediate_size"] if experts else model["intermediate_size"],
        vocab=model["vocab_size"],
        tied=bool(model.get("tie_word_embeddings")),
        experts=experts,
        experts_per_token=model.get("num_experts_per_tok") or 0,
    )
    if min(shape.hidden, shape.layers, shape.heads, shape.head_dim, shape.ffn, shape.vocab) < 1:
        raise ValueError("a size is below 1")
    return shape


def dtype_bytes(config: Config) -> int:
    """Bytes of one weight."""
    if config.model.dtype not in DTYPE_BYTES:
        raise ConfigError(f"model.dtype={config.model.dtype} is not one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[config.model.dtype]
