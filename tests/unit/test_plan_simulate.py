"""The simulation against closed forms, a token-by-token oracle and the invariants of its trace."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.plan.lengths import Empirical, LogNormal
from areal_hpc.plan.simulate import Simulation
from areal_hpc.plan.system import Rates, System

RATES = Rates(
    decode_base_s=4e-3, decode_seq_s=2e-5, decode_kv_s=1e-8, prefill_tokens_s=1e5, train_tokens_s=5e4,
    train_step_s=0.5, stage_s=0.3, load_s=0.2, reward_s=0.02, reward_workers=2, commit_s=0.1,
    checkpoint_s=0.4,
)  # fmt: skip


def system(**changes) -> System:
    given_values = dict(
        num_engines=4, slots=32, group_size=4, batch_size=64, eta=2, prompt_tokens=50, rates=RATES
    )
    return System(**(given_values | changes))


def constant(length: int) -> LogNormal:
    return LogNormal(length, length, sigma=0.0)


def test_sync_step_of_constant_lengths_takes_its_closed_form():
    length, rates = 800, RATES
    result = Simulation(system(eta=0), constant(length)).run(3)
    per_engine, groups = 64 // 4, 4
    prompts = per_engine * 50
    decode = length * (rates.decode_base_s + rates.decode_seq_s * per_engine + rates.decode_kv_s * prompts)
    decode += rates.decode_kv_s * per_engine * length**2 / 2
    prefill = groups * 50 / rates.prefill_tokens_s
    # All answers end at once: two workers score sixteen, one after the other.
    scoring = per_engine / rates.reward_workers * rates.reward_s + rates.reward_s / 2
    train = rates.train_step_s + 64 * (length + 50) / rates.train_tokens_s
    expected = prefill + decode + scoring + rates.commit_s + train + rates.stage_s + rates.load_s
    assert result.step_s == pytest.approx(expected, rel=1e-9)
    assert result.tokens_per_s == pytest.approx(64 * length / expected, rel=1e-9)
    assert result.trainer_busy == pytest.approx(train / expected, rel=0.05)


def test_decoding_matches_a_loop_over_tokens():
    """One engine, fewer slots than answers: every token is walked through by the oracle."""
    rates = replace(
        RATES, reward_s=0.0, commit_s=0.0, train_step_s=0.0, train_tokens_s=1e12, stage_s=0, load_s=0
    )
    lengths = np.random.default_rng(5).integers(20, 400, 32).tolist()
    slots, prompt = 8, 50
    trace: list = []
    one = system(num_engines=1, slots=slots, group_size=32, batch_size=32, eta=0, rates=rates)
    Simulation(one, Empirical([lengths]), trace=trace).run(1)

    waiting, running, now = list(lengths), [], prompt / rates.prefill_tokens_s
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([waiting.pop(0), 0])
        cached = sum(prompt + done for _, done in running)
        now += rates.decode_base_s + rates.decode_seq_s * len(running) + rates.decode_kv_s * cached
        running = [[length, done + 1] for length, done in running if done + 1 < length]
    trained = next(time for time, event, _ in trace if event == "trained")
    assert trained == pytest.approx(now, rel=1e-3)


def test_a_slow_trainer_sets_the_pace():
    rates = replace(RATES, train_tokens_s=2e3, decode_base_s=1e-5, decode_seq_s=0.0, decode_kv_s=0.0)
    for waits, published in ((True, rates.stage_s + rates.load_s), (False, 0.0)):
        result = Simulation(system(rates=rates, eta=4, trainer_waits=waits), constant(300)).run(20)
        train = rates.train_step_s + 64 * 350 / rates.train_tokens_s
        assert result.step_s == pytest.approx(train + published, rel=1e-6)
        assert result.trainer_busy > 0.9


def test_slow_engines_set_the_pace():
    rates = replace(RATES, train_tokens_s=1e9, train_step_s=0, stage_s=0, load_s=0, decode_kv_s=0.0)
    one = system(rates=rates, eta=50, recompute_kv=False, prompt_tokens=1, queue_factor=3)
    result = Simulation(one, LogNormal(300, 2000), 1).run(200)
    full = 4 * 32 / (rates.decode_base_s + 32 * rates.decode_seq_s)
    assert result.tokens_per_s == pytest.approx(full, rel=0.05)
    # Groups are granted whole: a slot stays empty until three more are.
    assert result.slots_filled > 0.9 and result.rollout_busy > 0.99


SYSTEMS = st.builds(
    system,
    num_engines=st.integers(1, 5),
    slots=st.sampled_from([1, 4, 7, 16, 64]),
    group_size=st.sampled_from([1, 4, 8]),
    batch_size=st.sampled_from([8, 32, 64]),
    eta=st.integers(0, 5),
    drain=st.booleans(),
    recompute_kv=st.booleans(),
    resume_together=st.booleans(),
    bounded=st.booleans(),
    queue_factor=st.sampled_from([1.0, 1.5, 4.0]),
    total_steps=st.sampled_from([0, 8]),
    checkpoint_every=st.sampled_from([0, 3]),
    trainer_waits=st.booleans(),
    rates=st.builds(replace, st.just(RATES), train_tokens_s=st.sampled_from([2e3, 5e4, 1e6])),
)


@settings(max_examples=80, deadline=None)
@given(SYSTEMS, st.integers(0, 1000))
def test_invariants(one, seed):
    trace: list = []
    lengths = LogNormal(100, 600)
    result = Simulation(one, lengths, seed, trace).run(8)
    admitted = live = trained = 0
    last = 0.0
    for time, event, value in trace:
        assert time >= last
        last = time
        if event == "admit":
            # Equation 3, for each trajectory of the group.
            for ordinal in range(admitted + 1, value + 1):
                assert (ordinal - 1) // one.batch_size <= live + one.eta
            admitted = value
        elif event == "train":
            assert value == trained + 1
            assert admitted >= value * one.batch_size, "trained on what was never admitted"
            if one.trainer_waits:
                assert live == trained
        elif event == "trained":
            trained = value
        elif event == "live":
            assert live < value <= trained
            live = value
    assert trained == len(result.steps) == 8
    assert result.generated_tokens == pytest.approx(result.trained_tokens + result.unused_tokens, rel=1e-6)
    for share in (result.trainer_busy, result.rollout_busy, result.slots_filled):
        assert 0 <= share <= 1
    assert all(step.staleness_max >= 0 for step in result.steps)
    if one.bounded and one.trainer_waits:
        assert result.staleness_max <= one.eta
    if one.total_steps:
        assert admitted == 8 * one.batch_size and result.unused_tokens == pytest.approx(0, abs=1e-3)


def test_same_seed_same_run_other_seed_another():
    runs = [Simulation(system(), LogNormal(200, 1000), seed).run(6).seconds for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]


def test_more_staleness_is_not_slower_and_sync_is_slowest():
    speeds = [Simulation(system(eta=eta), LogNormal(300, 3000), 0).run(40).tokens_per_s for eta in (0, 1, 4)]
    assert speeds[0] < speeds[1] <= speeds[2] * 1.02


def test_a_batch_waits_for_stragglers_rather_than_training_them_late():
    """Long tails at eta = 1: without the bound they are trained too old, with it the trainer waits."""
    lengths = LogNormal(300, 3000)
    free, bounded = (
        Simulation(system(eta=1, bounded=b, num_engines=8), lengths, 0).run(40) for b in (False, True)
    )
    assert free.staleness_max > 1
    assert bounded.staleness_max == 1
    assert bounded.tokens_per_s < free.tokens_per_s


def test_keeping_the_cache_saves_the_prefill():
    """Slow prefill: recomputing must cost what the caches hold, no more and no less than that."""
    rates = replace(RATES, prefill_tokens_s=2e3)
    kept, recomputed = (
        Simulation(system(rates=rates, recompute_kv=again), LogNormal(300, 1500), 0).run(20).tokens_per_s
        for again in (False, True)
    )
    assert recomputed < 0.9 * kept


def test_a_batch_that_groups_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="no multiple"):
        Simulation(system(batch_size=30), constant(5))


@pytest.mark.parametrize("mean,limit", [(5500, 27648), (100, 200), (190, 200), (3, 4096)])
def test_lengths_have_the_moments_they_promise(mean, limit):
    lengths = LogNormal(mean, limit)
    rng = np.random.default_rng(0)
    drawn = np.array([lengths.sample(rng, 8) for _ in range(20_000)], dtype=float)
    assert drawn.max() <= limit and drawn.min() >= 1
    # Rounding to whole tokens shifts very short answers.
    assert drawn.mean() == pytest.approx(mean, rel=0.02 if mean > 10 else 0.1)
    assert (drawn**2).mean() == pytest.approx(lengths.mean_square, rel=0.04 if mean > 10 else 0.15)


def test_answers_to_one_prompt_resemble_each_other():
    rng = np.random.default_rng(0)
    logs = np.log([LogNormal(2000, 10**6).sample(rng, 8) for _ in range(4000)])
    between = np.cov(logs[:, 0], logs[:, 1])[0, 1]
    assert between / logs.var() == pytest.approx(0.5, abs=0.05)


def test_measured_lengths_come_in_their_groups():
    rng = np.random.default_rng(0)
    lengths = Empirical([[1, 2], [30, 40]])
    assert (lengths.mean, lengths.max_tokens) == (73 / 4, 40)
    assert {tuple(lengths.sample(rng, 2)) for _ in range(50)} == {(1, 2), (30, 40)}
    wider = lengths.sample(rng, 5)
    assert len(wider) == 5 and (set(wider) <= {1, 2} or set(wider) <= {30, 40})
    with pytest.raises(ValueError):
        Empirical([])
    with pytest.raises(ValueError, match="between 1 and"):
        LogNormal(50, 20)
    assert math.isclose(LogNormal(7, 7, sigma=0.0).mean_square, 49)
