"""Differentiable operations of the local layers with few passes over memory.

On CPUs without fused kernels the time between the matrix products goes into memory
traffic: each of these does by hand what autograd would do with several temporary copies.
Used by `model` and `attention` where Transformer Engine is not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class RmsNormFunction(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = (norm.square_() / x.shape[-1] + eps).rsqrt_()
        normal = wide * scale
        ctx.save_for_backward(normal, scale, weight)
        return (normal * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        normal, scale, weight = ctx.saved_tensors
        width = normal.shape[-1]
        wide = gradient.float()
        # d/dx: scale * (g*w - normal * mean(g*w*normal)); d/dw: sum(g * normal)
        product = wide * normal
        grad_weight = product.view(-1, width).sum(dim=0).to(weight.dtype)
        mean = torch.mv(product.view(-1, width), weight.float()).div_(width).view_as(scale)
        grad_x = torch.mul(wide, weight, out=product)
        grad_x.addcmul_(normal, mean, value=-1.0).mul_(scale)
        return grad_x.to(gradient.dtype), grad_weight, None


class SwigluFunction(torch.autograd.Function):
    """silu(first half) * second half of the last dimension."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        gate, linear = x.chunk(2, dim=-1)
        active = F.silu(gate)
        ctx.save_for_backward(x, active)
        return active * linear

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        x, active = ctx.saved_tensors
        gate, linear = x.chunk(2, dim=-1)
        result = torch.empty_like(x)
        half = x.shape[-1] // 2
        torch.mul(gradient, active, out=result[..., half:])
        torch.ops.aten.silu_backward.grad_input(gradient * linear, gate, grad_input=result[..., :half])
        return result


class RotateFunction(torch.autograd.Function):
    """Rotary embedding of x [..., d] with cos and sin that broadcast to [..., d/2].

    The two halves of d are the coordinates of d/2 planes (transformers' and Megatron's
    convention). The gradient is rotated back.
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(first, cos, out=result[..., :half]).addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=result[..., half:]).addcmul_(first, sin)
    return result


class PadFunction(torch.autograd.Function):
    """Rows of x [T, ...] as a block [S, L, ...]: the row for each place is in `take` [S, L].

    keep [N]: the places, flattened, that are no padding; put [N]: their rows. The gradient
    of padding is dropped: nothing that counts may depend on it. `whole`: the block holds
    all rows in order.
    """

    @staticmethod
    def forward(ctx, x: Tensor, take: Tensor, keep: Tensor, put: Tensor, whole: bool) -> Tensor:
        ctx.save_for_backward(keep, put)
        ctx.rows, ctx.whole = x.shape[0], whole
        if whole and keep.numel() == take.numel():
            return x.reshape(*take.shape, *x.shape[1:])
        return x.index_select(0, take.flatten()).view(*take.shape, *x.shape[1:])

    @staticmethod
    def backward(ctx, gradient: Tensor):
        keep, put = ctx.saved_tensors
        kept = gradient.reshape(-1, *gradient.shape[2:])
        if keep.numel() != kept.shape[0]:
            kept = kept.index_select(0, keep)
        if not ctx.whole:
            kept = gradient.new_zeros(ctx.rows, *kept.shape[1:]).index_copy_(0, put, kept)
        return kept, None, None, None, None


class UnpadFunction(torch.autograd.Function):
    """The places `keep` [N] of a flattened block [S * L, ...]."""

    @staticmethod
    def forward(ctx, block: Tensor, keep: Tensor) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.shape = block.shape
        return block if keep.numel() == block.shape[0] else block.index_select(0, keep)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (keep,) = ctx.saved_tensors
        if keep.numel() == ctx.shape[0]:
            return gradient, None
        return gradient.new_zeros(ctx.shape).index_copy_(0, keep, gradient), None
