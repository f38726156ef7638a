"""Attention over packed sequences, for Megatron's local layers (no Transformer Engine).

`PackedParams` describes one micro-batch to every layer; `PackedAttention` is put into the
layer specification as core attention; `PackedRotary` gives each token the rotary angles of
its position inside its own sequence. Built by `model`, filled by `batch`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn import functional as F

MIN_FILL = 0.75
"""Sequences share one padded call while the shortest is at least this part of the longest."""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length as one padded block.

    take [S, L] (row of the packed tokens for each place; the padding repeats a valid row)
    and keep [T_b] (places of the block, flattened, that hold tokens), put [T_b] (their rows).
    """

    take: Tensor
    keep: Tensor
    put: Tensor


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's packed-sequence parameters with what is worked out once for all layers."""

    positions: Tensor | None = None
    """Position of each token inside its sequence, [T]."""
    buckets: list[Bucket] = field(default_factory=list)


def packed_params(lengths: list[int], device: torch.device, *, local: bool) -> PackedParams:
    """Parameters of sequences of these lengths, one after the other.

    `local` prepares for this module's attention and rotary angles; otherwise the
    parameters are those Transformer Engine expects.
    """
    sizes = torch.tensor(lengths, dtype=torch.int32)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(sizes, 0, out=cu_seqlens[1:])
    total = int(cu_seqlens[-1])
    starts = torch.repeat_interleave(cu_seqlens[:-1].long(), sizes.long(), output_size=total)
    params = PackedParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens.to(device),
        cu_seqlens_kv=cu_seqlens.to(device),
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        positions=(torch.arange(total) - starts).to(device),
    )
    if local:
        # The rotary angles come ready for every token (PackedRotary): for Megatron's rotary
        # code the whole micro-batch is one sequence.
        whole = torch.tensor([0, total], dtype=torch.int32, device=device)
        params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = whole
        if device.type == "cpu":
            params.buckets = make_buckets(lengths, device)
    return params


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
        valid = place < sizes
        take = first + torch.minimum(place, sizes - 1)
        keep = valid.flatten().nonzero()[:, 0]
        buckets.append(Bucket(take.to(device), keep.to(device), take.flatten()[keep].to(device)))
    return buckets


class PackedAttention(torch.nn.Module):
    """Causal attention inside each sequence: query [T, heads, d], key and value [T, groups, d]."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_ignored) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, *,
                packed_seq_params: PackedParams, **_ignored) -> Tensor:
        """Returns [T, heads * d]."""
        if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            return self._varlen(query, key, value, packed_seq_params)
        if not packed_seq_params.buckets:
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
            packed_seq_params.buckets = make_buckets(lengths, query.device)
        grouped = query.shape[1] != key.shape[1]
        buckets = packed_seq_params.buckets
        pieces, places = [], []
        for bucket in buckets:
            # [S, L, heads, d] -> [S, heads, L, d]. No mask is needed for the padding: it
            # comes after every real query, so a causal query never sees it.
            q, k, v = (tensor[bucket.take].transpose(1, 2) for tensor in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
            pieces.append(out.transpose(1, 2).reshape(-1, query.shape[1] * query.shape[2])[bucket.keep])
            places.append(bucket.put)
        if len(buckets) == 1 and not bool((places[0].diff() != 1).any()):
            return pieces[0]
        gathered = torch.cat(pieces)
        return torch.zeros_like(gathered).index_copy(0, torch.cat(places), gathered)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, params: PackedParams) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            query, key, value, params.cu_seqlens_q, params.cu_seqlens_kv, params.max_seqlen_q,
            params.max_seqlen_kv, scale=self.scale, window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.reshape(out.shape[0], -1)


class PackedRotary(torch.nn.Module):
    """Replaces a GPTModel's rotary embedding: angles [T, 1, 1, d] for the positions of a micro-batch."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inv_freq = inner.inv_freq

    def get_rotary_seq_len(self, _context, _transformer, _input, _config, packed_seq_params: PackedParams) -> Tensor:
        return packed_seq_params.positions

    def forward(self, positions: Tensor, **_ignored) -> Tensor:
        self.inv_freq = self.inv_freq.to(positions.device)
        angles = torch.outer(positions.float(), self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
