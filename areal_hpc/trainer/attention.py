"""Attention over packed sequences, for Megatron's local layers (no Transformer Engine).

`PackedParams` describes one micro-batch to every layer; `PackedAttention` is put into the
layer specification as core attention. It also applies the rotary embedding, with the
positions of each token inside its own sequence. Built by `model`, filled by `batch`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn import functional as F

from areal_hpc.trainer.kernels import PadFunction, RotateFunction, UnpadFunction

MIN_FILL = 0.75
"""Sequences share one padded call while the shortest is at least this part of the longest."""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length as one padded block.

    take [S, L]: row of the packed tokens for each place (padding repeats a valid row);
    keep [N]: places of the block, flattened, that hold tokens; put [N]: their rows;
    whole: the block holds all tokens in their order.
    """

    take: Tensor
    keep: Tensor
    put: Tensor
    whole: bool


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's packed-sequence parameters with what is worked out once for all layers."""

    positions: Tensor | None = None
    """Position of each token inside its sequence, [T]."""
    cos: Tensor | None = None
    sin: Tensor | None = None
    """Rotary table [max_seqlen, d/2]; local layers only."""
    buckets: list[Bucket] = field(default_factory=list)
    """Local layers without a kernel for packed sequences only."""


def packed_params(lengths: list[int], device: torch.device) -> PackedParams:
    """Parameters of sequences of these lengths, one after the other."""
    sizes = torch.tensor(lengths, dtype=torch.int32)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(sizes, 0, out=cu_seqlens[1:])
    total = int(cu_seqlens[-1])
    starts = torch.repeat_interleave(cu_seqlens[:-1].long(), sizes.long(), output_size=total)
    return PackedParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens.to(device),
        cu_seqlens_kv=cu_seqlens.to(device),
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        positions=(torch.arange(total) - starts).to(device),
    )


def prepare_local(params: PackedParams, lengths: list[int], frequencies: Tensor, dtype: torch.dtype) -> None:
    """Work out what `PackedAttention` needs beyond Megatron's parameters."""
    assert params.positions is not None
    device = params.positions.device
    angles = torch.outer(torch.arange(params.max_seqlen_q, dtype=torch.float32), frequencies)
    params.cos, params.sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    if not has_varlen(device, dtype):
        params.buckets = make_buckets(lengths, device)


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def make_buckets(lengths: list[int], device: torch.device) -> list[Bucket]:
    """Sequences of similar length together, so that many short ones need few calls."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    groups: list[list[int]] = []
    for index in order:
        if groups and lengths[index] >= MIN_FILL * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    buckets = []
    for group in groups:
        width = lengths[group[0]]
        sizes = torch.tensor([lengths[index] for index in group])[:, None]
        first = torch.tensor([starts[index] for index in group])[:, None]
        place = torch.arange(width)[None, :]
        take = first + torch.minimum(place, sizes - 1)
        keep = (place < sizes).flatten().nonzero()[:, 0]
        put = take.flatten()[keep]
        whole = len(put) == starts[-1] and bool((put.diff() == 1).all())
        buckets.append(Bucket(take.to(device), keep.to(device), put.to(device), whole))
    return buckets


class PackedAttention(torch.nn.Module):
    """Rotary embedding and causal attention inside each sequence."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_ignored) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, *,
                packed_seq_params: PackedParams, **_ignored) -> Tensor:
        """query [T, heads, d], key and value [T, groups, d] -> [T, heads * d]."""
        if has_varlen(query.device, query.dtype):
            return self._varlen(query, key, value, packed_seq_params)
        grouped = query.shape[1] != key.shape[1]
        pieces, places = [], []
        for bucket in packed_seq_params.buckets:
            # No mask is needed for the padding: it comes after every real query, so a
            # causal query never sees it.
            q, k, v = (
                PadFunction.apply(tensor, bucket.take, bucket.keep, bucket.put, bucket.whole)
                for tensor in (query, key, value)
            )
            width = bucket.take.shape[1]
            cos, sin = packed_seq_params.cos[:width, None], packed_seq_params.sin[:width, None]
            q, k = RotateFunction.apply(q, cos, sin), RotateFunction.apply(k, cos, sin)
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=self.scale,
                enable_gqa=grouped,
            )
            # [S, heads, L, d] -> [S * L, heads * d]
            out = out.transpose(1, 2).reshape(-1, query.shape[1] * query.shape[2])
            pieces.append(UnpadFunction.apply(out, bucket.keep))
            places.append(bucket.put)
        if len(pieces) == 1 and packed_seq_params.buckets[0].whole:
            return pieces[0]
        gathered = torch.cat(pieces)
        return torch.zeros_like(gathered).index_copy(0, torch.cat(places), gathered)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, params: PackedParams) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        cos, sin = params.cos[params.positions, None], params.sin[params.positions, None]
        query, key = RotateFunction.apply(query, cos, sin), RotateFunction.apply(key, cos, sin)
        out = varlen_attn(
            query, key, value, params.cu_seqlens_q, params.cu_seqlens_kv, params.max_seqlen_q,
            params.max_seqlen_kv, scale=self.scale, window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.reshape(out.shape[0], -1)
