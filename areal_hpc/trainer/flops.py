"""Floating-point operations of a model, for the utilisation metric. Used by `step`."""

from __future__ import annotations

import torch

_PEAK = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12,
         "B200": 2250e12, "L40S": 362e12}
"""Dense bf16/fp16 operations per second of NVIDIA GPUs, from their data sheets."""


def model_flops(hf, length: int, outputs: int) -> float:
    """Operations of one forward pass over a sequence of `length` tokens (a backward pass takes twice as many).

    Two per weight that a token meets, and causal attention: scores and values over half of
    the square. `outputs`: width of the head, the vocabulary or 1 for a critic.
    """
    hidden, layers, heads = hf.hidden_size, hf.num_hidden_layers, hf.num_attention_heads
    attention = hidden * hf.head_dim * (2 * heads + 2 * hf.num_key_value_heads)
    if hf.model_type == "qwen3_moe":
        feed_forward = 3 * hidden * hf.moe_intermediate_size * hf.num_experts_per_tok + hidden * hf.num_experts
    else:
        feed_forward = 3 * hidden * hf.intermediate_size
    weights = layers * (attention + feed_forward) + hidden * outputs
    return 2.0 * length * weights + 2.0 * layers * heads * hf.head_dim * length**2


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second the device can do at most; 0 where it is not known."""
    if device.type != "cuda" or dtype is torch.float32:
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in sorted(_PEAK.items(), reverse=True) if key in name), 0.0)
