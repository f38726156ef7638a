"""Helpers on packed tokens: [T] values of several sequences one after the other.

Used by `objective`, `kl` and `gae`. `cu_seqlens` [S+1] holds the boundaries, the mask is
True on trained tokens; untrained entries of any input may hold anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within +-20 before exp, so that an outlier cannot make the loss infinite."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def keep_trained(values: Tensor, mask: Tensor) -> Tensor:
    """`values` in float32 or wider, 0 where `mask` is False.

    Chosen, not multiplied: NaN * 0 is NaN, and the gradient of exp(large) * 0 is too.
    """
    return torch.where(mask, values, 0.0).to(torch.promote_types(values.dtype, torch.float32))


class Sequences:
    """Sums over the trained tokens of each sequence, handed back to its tokens."""

    def __init__(self, cu_seqlens: Tensor, mask: Tensor) -> None:
        lengths = cu_seqlens.diff().to(mask.device)
        self.num = lengths.numel()
        self.ids = torch.repeat_interleave(
            torch.arange(self.num, device=mask.device), lengths, output_size=mask.numel()
        )
        """Sequence of each token, [T]."""
        self._mask = mask
        self.num_trained = self.total(torch.ones_like(mask, dtype=torch.float32)).clamp(min=1.0)
        """Trained tokens (at least 1) of each token's sequence, [T]."""

    def total(self, values: Tensor) -> Tensor:
        values = torch.where(self._mask, values, 0.0)
        return values.new_zeros(self.num).index_add(0, self.ids, values)[self.ids]

    def mean(self, values: Tensor) -> Tensor:
        return self.total(values) / self.num_trained
