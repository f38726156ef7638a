"""The local layers' operations and the log-probabilities against plain torch and autograd."""

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn import functional as F

from areal_hpc.trainer.kernels import PadFunction, RmsNormFunction, RotateFunction, SwigluFunction, UnpadFunction
from areal_hpc.trainer.logprobs import token_logprobs


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def same(ours, plain, *inputs: torch.Tensor) -> None:
    """Value and gradients of float32 copies agree with plain torch's."""
    results = []
    for function in (ours, plain):
        leaves = [tensor.detach().float().requires_grad_() for tensor in inputs]
        value = function(*leaves)
        (value * torch.linspace(-1, 1, value.numel()).view_as(value)).sum().backward()
        results.append([value, *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rms_norm():
    torch.manual_seed(0)
    same(lambda x, w: RmsNormFunction.apply(x, w, 1e-5), lambda x, w: F.rms_norm(x, (16,), w, 1e-5),
         randn(5, 3, 16), randn(16))


def test_rms_norm_keeps_the_input_type():
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8, dtype=torch.bfloat16, requires_grad=True)
    out = RmsNormFunction.apply(x, weight, 1e-6)
    out.sum().backward()
    assert (out.dtype, x.grad.dtype, weight.grad.dtype) == (torch.bfloat16,) * 3


def test_swiglu():
    torch.manual_seed(1)
    assert gradcheck(SwigluFunction.apply, randn(4, 3, 10))

    def plain(x):
        gate, linear = x.chunk(2, dim=-1)
        return F.silu(gate) * linear

    same(SwigluFunction.apply, plain, randn(6, 12))


def test_rotation_is_transformers_rotation():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(2)
    angles = torch.randn(7, 4, dtype=torch.float64)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    x = randn(2, 7, 3, 8)
    assert gradcheck(lambda tensor: RotateFunction.apply(tensor, cos, sin), x)
    both = torch.cat([angles, angles], dim=-1)[None]
    expected, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), both.cos(), both.sin())
    torch.testing.assert_close(RotateFunction.apply(x, cos, sin), expected.transpose(1, 2))


@pytest.mark.parametrize("whole", [True, False])
def test_padding_and_back(whole):
    torch.manual_seed(3)
    x = randn(5, 2)
    # Two sequences of 3 and 2 tokens, in this order or the other way round.
    take = torch.tensor([[0, 1, 2], [3, 4, 4]] if whole else [[2, 3, 4], [0, 1, 1]])
    keep = torch.tensor([0, 1, 2, 3, 4])
    put = take.flatten()[keep]

    def there_and_back(tensor):
        block = PadFunction.apply(tensor, take, keep, put, whole)
        assert block.shape == (2, 3, 2)
        # As in attention, what comes out of padding is dropped before anything reads it.
        return UnpadFunction.apply(block.reshape(6, 2), keep) ** 2

    torch.testing.assert_close(there_and_back(x), x[put] ** 2)
    assert gradcheck(there_and_back, x)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("vocab_size", [9, 12])
def test_logprobs_and_entropy(temperature, vocab_size):
    """12 columns, the last three padding where the vocabulary has 9."""
    torch.manual_seed(4)
    tokens = torch.randint(0, vocab_size, (8,))
    places = torch.tensor([0, 1, 4, 6])

    def ours(logits):
        logprobs, entropy = token_logprobs(
            logits[places], tokens, places, temperature=temperature, vocab_size=vocab_size, tp_rank=0, group=None,
            entropy=True,
        )
        return logprobs + 0.3 * entropy

    def plain(logits):
        distribution = torch.log_softmax(logits[:, :vocab_size] / temperature, dim=-1)
        chosen = distribution[:-1].gather(-1, tokens[1:, None])[:, 0]
        entropy = -(distribution.exp() * distribution).sum(-1)[:-1]
        wanted = torch.zeros(8, dtype=torch.bool)
        wanted[places + 1] = True
        return torch.where(wanted, torch.cat([torch.zeros(1), chosen + 0.3 * entropy]), 0.0)

    same(ours, plain, randn(8, 12) * 3)


def test_huge_logits_and_a_lone_candidate_stay_finite():
    logits = torch.tensor([[1e30, -1e30, 0.0, 5.0], [-3e4, -3e4, -3e4, 7.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(
        logits, torch.tensor([0, 0, 1]), torch.tensor([0, 1]), temperature=1.0, vocab_size=3, tp_rank=0, group=None,
        entropy=True,
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.tolist()[0:2] == [0.0, 0.0] and torch.isfinite(logits.grad).all()
    torch.testing.assert_close(logprobs[2], torch.tensor(3.0).log() * -1)
    assert float(logits.grad[:, 3].abs().max()) == 0.0


def test_no_place_at_all():
    logits = torch.zeros(0, 5, requires_grad=True)
    logprobs, entropy = token_logprobs(
        logits, torch.tensor([1, 2]), torch.zeros(0, dtype=torch.long), temperature=1.0, vocab_size=5, tp_rank=0,
        group=None, entropy=True,
    )
    assert logprobs.tolist() == entropy.tolist() == [0.0, 0.0]
    logprobs.sum().backward()
