"""Builds a Megatron GPTModel for a Hugging Face folder. Called by `megatron`.

Layers are Transformer Engine's where it is installed and the device is cuda, else
Megatron's local ones with our packed attention and a norm that knows sequence
parallelism. Models and layouts have passed `config.model_rules`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from areal_hpc.trainer.attention import PackedAttention
from areal_hpc.trainer.kernels import RmsNormFunction, SwigluFunction
from areal_hpc.trainer.parallel import Place


@dataclass(frozen=True)
class ModelOptions:
    """What the configuration says beyond the Hugging Face folder."""

    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    recompute: bool = False
    vocab_divisor: int = 128
    deterministic: bool = False


def uses_local_layers(device: torch.device) -> bool:
    return device.type == "cpu" or importlib.util.find_spec("transformer_engine") is None


def padded_vocab_size(vocab_size: int, divisor: int, tp: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks: the next multiple of divisor * tp."""
    step = divisor * tp
    return -(-vocab_size // step) * step


def read_hf_config(folder: str):
    """The folder's transformers configuration with gaps filled."""
    from transformers import AutoConfig

    hf = AutoConfig.from_pretrained(folder, local_files_only=True)
    if getattr(hf, "head_dim", None) is None:
        hf.head_dim = hf.hidden_size // hf.num_attention_heads
    if getattr(hf, "num_key_value_heads", None) is None:
        hf.num_key_value_heads = hf.num_attention_heads
    return hf


class RmsNorm(torch.nn.Module):
    """RMSNorm with Megatron's constructor and with sequence parallelism.

    The mark on the weight makes Megatron add up its gradient over the tensor-parallel
    ranks, each of which saw a part of the tokens.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_ignored) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RmsNormFunction.apply(x, self.weight, self.eps)


class Swiglu(MegatronModule):
    """The gated activation of an MLP: [..., 2 * width] -> [..., width]. An MLP's parts must be Megatron's modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SwigluFunction.apply(x)


def _leave(tensor: torch.Tensor) -> torch.Tensor:
    """An initialisation that does nothing."""
    return tensor


def transformer_overrides(place: Place, options: ModelOptions) -> dict[str, object]:
    """Settings of the TransformerConfig that do not come from the Hugging Face folder."""
    local = uses_local_layers(place.device)
    overrides: dict[str, object] = {
        "params_dtype": options.dtype,
        "pipeline_dtype": options.dtype,
        "bf16": options.dtype is torch.bfloat16,
        "fp16": options.dtype is torch.float16,
        "sequence_parallel": options.sequence_parallel,
        "variable_seq_lengths": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Weights are read from a folder in any case. Megatron's own switch for that would
        # also leave the marks of tensor parallelism off the parameters.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "use_cpu_initialization": place.device.type == "cpu",
        "masked_softmax_fusion": False,
        "bias_activation_fusion": not local,
        # Megatron's name for "the activation is a module of the specification".
        "use_te_activation_func": local,
        "bias_dropout_fusion": not local,
        # On CPU by `cpu`, on GPUs by an extension of Apex where it is installed.
        "gradient_accumulation_fusion": place.device.type == "cpu"
        or importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        "persist_layer_norm": not local,
        "apply_rope_fusion": not local,
        "moe_grouped_gemm": not local,
        "batch_p2p_comm": False,
        "deterministic_mode": options.deterministic,
    }
    if options.recompute:
        overrides |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return overrides


def layer_spec(config: TransformerConfig, device: torch.device):
    """The specification of all layers of this pipeline stage."""
    if not uses_local_layers(device):
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    if config.num_moe_experts and not hasattr(moe_utils, "te_general_gemm"):
        # Megatron-core 0.16 forgets to define this name without Transformer Engine.
        moe_utils.te_general_gemm = None
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    feed_forward = layer.mlp if config.num_moe_experts is None else layer.mlp.submodules.experts
    feed_forward.submodules.activation_func = Swiglu
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    return TransformerBlockSubmodules(
        layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=RmsNorm
    )


def build_model(hf, config: TransformerConfig, place: Place, vocab_rows: int, tied: bool) -> GPTModel:
    """This rank's part of the model, on its device; weights are undefined until they are loaded."""
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config, place.device),
        vocab_size=vocab_rows,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=place.is_first_stage,
        post_process=place.is_last_stage,
        share_embeddings_and_output_weights=tied,
        # Our attention applies the rotary embedding itself.
        position_embedding_type="none" if uses_local_layers(place.device) else "rope",
    )
    if not uses_local_layers(place.device):
        model.rotary_pos_emb.inv_freq = rotary_frequencies(hf)
    return model.to(place.device)


def rotary_frequencies(hf) -> torch.Tensor:
    """Inverse frequencies [d/2] as transformers computes them, for default, linear and llama3 scaling."""
    parameters = dict(getattr(hf, "rope_parameters", None) or {})
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        base = parameters.get("rope_theta") or getattr(hf, "rope_theta", 10000.0)
        exponents = torch.arange(0, hf.head_dim, 2, dtype=torch.float32) / hf.head_dim
        return 1.0 / base**exponents
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](hf, device=torch.device("cpu"))
    assert scaling == 1.0
    return frequencies
