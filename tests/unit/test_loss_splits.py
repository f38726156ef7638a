"""The loss of a minibatch does not depend on how it was cut into micro-batches and ranks."""

from __future__ import annotations

import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from areal_hpc.config.algorithm import CHOICES, AlgorithmConfig, Objective
from areal_hpc.trainer.microbatch import balanced, pad_count
from areal_hpc.trainer.objective import loss_denominator, policy_loss

ALGORITHMS = st.builds(
    AlgorithmConfig,
    objective=st.just(Objective.decoupled),
    surrogate=st.sampled_from(CHOICES["surrogate"]),
    aggregation=st.sampled_from(CHOICES["aggregation"]),
    aggregation_norm=st.just(50.0),
    proximal=st.sampled_from(CHOICES["proximal"]),
    behaviour_weight=st.sampled_from(CHOICES["behaviour_weight"]),
    behaviour_level=st.sampled_from(CHOICES["behaviour_level"]),
    kl_coef=st.sampled_from([0.0, 0.2]),
    entropy_coef=st.sampled_from([0.0, 0.2]),
)


def pieces(lengths, order):
    """Token positions of the sequences `order` in the whole batch, and their cu_seqlens."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    positions = [torch.arange(starts[s], starts[s + 1]) for s in order]
    cu_seqlens = torch.tensor([0, *(lengths[s] for s in order)]).cumsum(0)
    return torch.cat(positions) if positions else torch.arange(0), cu_seqlens


@settings(deadline=None, max_examples=150)
@given(
    ALGORITHMS,
    st.lists(st.integers(1, 20), min_size=1, max_size=10),
    st.integers(0, 2**31),
    st.integers(1, 4),
    st.integers(1, 50),
)
def test_any_split_gives_the_same_loss_gradient_and_metrics(algorithm, lengths, seed, num_ranks, capacity):
    note(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    weights = torch.randn(total, generator=generator, dtype=torch.float64).requires_grad_()
    noise = [0.3 * torch.randn(total, generator=generator, dtype=torch.float64) for _ in range(5)]
    mask = torch.rand(total, generator=generator) < 0.6
    tokens = dict(
        proximal_logprobs=weights.detach() + noise[0],
        rollout_logprobs=weights.detach() + noise[1],
        reference_logprobs=weights.detach() + noise[2],
        advantages=noise[3],
        loss_mask=mask,
        staleness=torch.randint(0, 4, (total,), generator=generator),
    )
    everything, cu_seqlens = pieces(lengths, range(len(lengths)))
    trained = [int(mask[pieces(lengths, [s])[0]].sum()) for s in range(len(lengths))]
    denominator = loss_denominator(algorithm, trained)

    def run(positions, cu_seqlens):
        policy = weights[positions]
        return policy_loss(
            algorithm, policy_logprobs=policy, entropy=policy.square(), cu_seqlens=cu_seqlens,
            denominator=denominator, **{name: values[positions] for name, values in tokens.items()},
        )

    whole = run(everything, cu_seqlens)
    expected = torch.autograd.grad(whole.loss, weights)[0]

    owners = torch.randint(0, num_ranks, (len(lengths),), generator=generator).tolist()
    outputs = []
    for rank in range(num_ranks):
        mine = [s for s, owner in enumerate(owners) if owner == rank]
        cut = balanced([lengths[s] for s in mine], capacity)
        for micro_batch in pad_count(cut, len(cut) + 1):
            outputs.append(run(*pieces(lengths, [mine[i] for i in micro_batch])))
    loss = sum(output.loss for output in outputs)
    torch.testing.assert_close(loss, whole.loss, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(loss, weights)[0], expected, rtol=1e-9, atol=1e-12)
    for name, (value, count) in whole.sums.items():
        torch.testing.assert_close(sum(o.sums[name][0] for o in outputs), value, rtol=1e-5, atol=1e-5)
        assert sum(o.sums[name][1] for o in outputs) == count, name
    for name, value in whole.maxima.items():
        assert max(o.maxima[name] for o in outputs) == value, name
