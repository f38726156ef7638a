"""Which models and layouts the trainer computes exactly: rules on the contents of a config.json.

`launch.preflight` and `launch.sft` apply them on the login node, `trainer.megatron` to the
folder that it loads: what passes here is not refused later. Imports neither torch nor
transformers; keys that a config.json leaves out have transformers' defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_hpc.config.errors import ConfigError

FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")
ROTARY_TYPES = ("default", "linear", "llama3")


def num_experts(model: Mapping[str, Any]) -> int:
    """Experts of a layer, 0 for a dense model. transformers 5 writes another name than its predecessors."""
    return model.get("num_experts") or model.get("num_local_experts") or 0


def check_model(
    model: Mapping[str, Any],
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = False,
    key: str = "model.path",
) -> None:
    """Refuse (ConfigError) a model that the trainer does not compute, or a layout that it does not divide into.

    `key`: the configuration's name for the folder.
    """
    _check_architecture(model, key)
    _check_layout(model, key, tp=tp, pp=pp, dp=dp, ep=ep, sequence_parallel=sequence_parallel)


def _check_architecture(model: Mapping[str, Any], key: str) -> None:
    family = model.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{key}: a model of type {family} is not supported: choose one of {', '.join(FAMILIES)}")
    activation, dropout = model.get("hidden_act", "silu"), model.get("attention_dropout", 0.0)
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    rotary = rope.get("rope_type") or rope.get("type") or "default"
    refusals = {
        f"hidden_act={activation} (only silu)": activation != "silu",
        "sliding-window attention": model.get("use_sliding_window"),
        "mlp_bias": model.get("mlp_bias"),
        "attention_bias": model.get("attention_bias"),
        f"attention_dropout={dropout}": dropout,
        f"rotary embeddings of type {rotary} (only {', '.join(ROTARY_TYPES)})": rotary not in ROTARY_TYPES,
    }
    if family == "qwen3_moe":
        sparse_step = model.get("decoder_sparse_step", 1)
        refusals["dense layers among the experts"] = model.get("mlp_only_layers") or sparse_step != 1
        refusals["norm_topk_prob=false"] = not model.get("norm_topk_prob", False)
    for what, refused in refusals.items():
        if refused:
            raise ConfigError(f"{key}: a model of type {family} with {what} is not supported: choose another model")


def _check_layout(
    model: Mapping[str, Any], key: str, *, tp: int, pp: int, dp: int, ep: int, sequence_parallel: bool
) -> None:
    experts = num_experts(model)
    heads, layers = _size(model, key, "num_attention_heads"), _size(model, key, "num_hidden_layers")
    groups = model.get("num_key_value_heads") or heads
    width_key = "moe_intermediate_size" if experts else "intermediate_size"
    width = _size(model, key, width_key)
    for name, degree, size, what in (
        ("tp", tp, heads, f"{heads} attention heads"),
        ("tp", tp, width, f"{width_key} {width}"),
        ("pp", pp, layers, f"{layers} layers"),
    ):
        if size % degree:
            raise ConfigError(f"trainer.{name}={degree} does not divide the model's {what}: change trainer.{name}")
    if groups % tp and tp % groups:
        raise ConfigError(
            f"trainer.tp={tp} and the model's {groups} key-value heads do not divide each other: change trainer.tp"
        )
    if ep > 1 and not experts:
        raise ConfigError(f"trainer.ep={ep} needs a model with experts: set trainer.ep=1")
    if experts % ep:
        raise ConfigError(f"trainer.ep={ep} does not divide the model's {experts} experts: change trainer.ep")
    if tp * dp % ep:
        raise ConfigError(f"trainer.ep={ep} does not divide trainer.tp*dp={tp * dp}: change trainer.ep")
    if experts and tp > 1 and not sequence_parallel:
        raise ConfigError(
            f"trainer.sequence_parallel=false with trainer.tp={tp} and experts: set trainer.sequence_parallel=true "
            "or trainer.tp=1"
        )


def _size(model: Mapping[str, Any], key: str, name: str) -> int:
    size = model.get(name)
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{key}: {name}={size} in its config.json is no size: choose a whole Hugging Face folder")
    return size
