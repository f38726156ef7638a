"""Log-probabilities and entropies of packed tokens from vocab-parallel logits.

Called by `megatron` on the last pipeline stage. Each tensor-parallel rank holds the logits
of its part of the vocabulary; the padding of the vocabulary is cut off before the softmax.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


PADDING = -1.0e30
"""Logit of columns that are no tokens: a probability of exactly 0."""


def token_logprobs(
    logits: Tensor, tokens: Tensor, places: Tensor, *, temperature: float, vocab_size: int, tp_rank: int, group,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of tokens and the entropy of the distributions they were drawn from.

    tokens [T], all sequences of the micro-batch one after the other; places int [K]: the
    positions whose successors are wanted; logits [K, V/tp] at these positions. Entry t of
    the results [T], float32, belongs to token t, that is to the logits one position before;
    it is 0 where it was not wanted. `entropy` False returns None for it.
    """
    rows = logits.shape[-1]
    start = tp_rank * rows
    valid = min(max(vocab_size - start, 0), rows)
    logprobs, entropies = _VocabParallelLogprobs.apply(
        logits, tokens[places + 1], temperature, start, valid, group, entropy
    )
    empty = logprobs.new_zeros(tokens.shape)
    return (
        empty.index_copy(0, places + 1, logprobs),
        empty.index_copy(0, places + 1, entropies) if entropy else None,
    )


class _VocabParallelLogprobs(torch.autograd.Function):
    """log_softmax(logits / temperature)[target] and its entropy, over a split vocabulary.

    With p the softmax and l the scaled logits: d logp/dl = onehot - p and
    d H/dl = -p * (log p + H).
    """

    @staticmethod
    def forward(ctx, logits, targets, temperature, start, valid, group, with_entropy):
        scaled = logits.float() / temperature
        # Not -inf: its product with a probability of 0 would be NaN.
        scaled[:, valid:] = PADDING
        peak = scaled.amax(dim=-1)
        _reduce(peak, dist.ReduceOp.MAX, group)
        scaled -= peak[:, None]
        local = targets - start
        mine = (local >= 0) & (local < valid)
        local = local.clamp(0, logits.shape[-1] - 1)
        chosen = torch.where(mine, scaled.gather(-1, local[:, None])[:, 0], 0.0)
        probabilities = scaled.exp() if with_entropy else scaled.exp_()
        parts = [probabilities.sum(dim=-1), chosen]
        if with_entropy:
            parts.append(torch.linalg.vecdot(probabilities, scaled))
        totals = torch.stack(parts)
        _reduce(totals, dist.ReduceOp.SUM, group)
        log_total = totals[0].log()
        probabilities /= totals[0][:, None]
        logprobs = totals[1] - log_total
        entropies = log_total - totals[2] / totals[0] if with_entropy else logprobs.new_zeros(0)
        ctx.save_for_backward(probabilities, local, mine, entropies)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropies):
        probabilities, local, mine, entropies = ctx.saved_tensors
        log_p = None
        if entropies.numel() and bool(grad_entropies.any()):
            log_p = torch.where(probabilities > 0, probabilities, 1.0).log()
            log_p = log_p.add_(entropies[:, None]).mul_(probabilities)
        # In place: nobody reads the saved probabilities again.
        gradient = probabilities.mul_(-grad_logprobs[:, None])
        gradient.scatter_add_(-1, local[:, None], torch.where(mine, grad_logprobs, 0.0)[:, None])
        if log_p is not None:
            gradient.addcmul_(log_p, grad_entropies[:, None], value=-1.0)
        if ctx.temperature != 1.0:
            gradient /= ctx.temperature
        return gradient.to(ctx.dtype), None, None, None, None, None, None


def _reduce(tensor: Tensor, operation, group) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=operation, group=group)
