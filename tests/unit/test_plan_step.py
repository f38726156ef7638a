"""Which rank computes which rows: every row once, alike on all ranks, whatever the layout."""

from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.config.schema import TrainerConfig
from areal_hpc.trainer.plan import assign_ranks, plan_step

LENGTHS = st.lists(st.integers(2, 300), min_size=1, max_size=40)


@settings(deadline=None)
@given(
    LENGTHS,
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["balanced", "ffd", "padded"]),
    st.integers(0, 5),
)
def test_every_row_once_and_equally_many_micro_batches(lengths, dp, minibatches, packing, seed):
    trainer = TrainerConfig(dp=dp, micro_batch_tokens=256, packing=packing)
    plans = [plan_step(trainer, lengths, minibatches, seed, rank) for rank in range(dp)]
    everything = list(range(len(lengths)))
    assert sorted(index for plan in plans for index in plan.whole.rows) == everything
    assert len({len(plan.whole.micro_batches) for plan in plans}) == 1
    assert len({plan.minibatches for plan in plans}) == 1
    assert sorted(index for minibatch in plans[0].minibatches for index in minibatch) == everything
    for number, minibatch in enumerate(plans[0].minibatches):
        shares = [plan.shares[number] for plan in plans]
        assert sorted(index for share in shares for index in share.rows) == list(minibatch)
        assert len({len(share.micro_batches) for share in shares}) == 1
    for plan in plans:
        assert sorted(index for share in plan.shares for index in share.rows) == plan.whole.rows


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(0, 5))
def test_minibatches_do_not_depend_on_the_layout(lengths, minibatches, seed):
    plans = [plan_step(TrainerConfig(dp=dp), lengths, minibatches, seed, 0) for dp in (1, 2, 3)]
    assert plans[0].minibatches == plans[1].minibatches == plans[2].minibatches


def test_the_budget_holds_except_for_a_lone_long_row():
    lengths = [700, 100, 90, 80, 60, 40]
    plan = plan_step(TrainerConfig(micro_batch_tokens=200), lengths, 1, 0, 0)
    for micro_batch in plan.whole.micro_batches:
        assert len(micro_batch) == 1 or sum(lengths[index] for index in micro_batch) <= 200


@given(LENGTHS, st.integers(1, 8))
def test_ranks_differ_by_at_most_one_row_in_tokens(lengths, num_ranks):
    ranks = assign_ranks(lengths, range(len(lengths)), num_ranks)
    tokens = [sum(lengths[index] for index in rank) for rank in ranks]
    assert max(tokens) - min(tokens) <= max(lengths)
