"""Calibration recovers what a run was made with, and says what is missing."""

import json
from pathlib import Path

import numpy as np
import pytest

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import load_config, save_config
from areal_hpc.plan.calibrate import _intervals, calibrate, fit_decode, fit_training, measured_speed
from areal_hpc.spool.shard import ShardWriter
from areal_hpc.telemetry import Telemetry
from areal_hpc.types import Trajectory

MODEL = {
    "model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 256, "tie_word_embeddings": True,
}  # fmt: skip
BASE, PER_SEQUENCE = 8e-3, 3e-4
STEP_S, TOKENS_S = 0.4, 2000.0


def trajectory(group: int, index: int, prompt: int, answer: int) -> Trajectory:
    length = prompt + answer
    mask = np.zeros(length, np.uint8)
    mask[prompt:] = 1
    return Trajectory(
        tokens=np.ones(length, np.int32), loss_mask=mask, rollout_logprobs=np.zeros(length, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32), reward=1.0, prompt_id=group, group_id=group,
        sample_index=index, finish_reason="stop",
    )  # fmt: skip


def made_run(root: Path, *, steps: int = 12, skip: tuple[str, ...] = ()) -> Path:
    """A run folder whose telemetry follows known rates."""
    rng = np.random.default_rng(0)
    (root / "model").mkdir(parents=True)
    (root / "model" / "config.json").write_text(json.dumps(MODEL))
    config_file = root / "given.yaml"
    config_file.write_text(
        f"model: {{path: {root}/model}}\nrollout: {{group_size: 4}}\ntrainer: {{batch_size: 16}}\n"
    )
    run = root / "run"
    (run / "telemetry").mkdir(parents=True)
    save_config(load_config(config_file), run / "config.yaml")
    if "spool" not in skip:
        writer = ShardWriter(run / "spool" / "rollout-00000", "run", 0)
        for group in range(8):
            writer.commit([trajectory(group, n, 10, 20 + 10 * n + group) for n in range(4)])
    if "trainer" not in skip:
        telemetry = Telemetry(run / "telemetry" / "trainer-00000.jsonl")
        clock = 1000.0
        for step in range(1, steps + 1):
            tokens = int(rng.integers(800, 1600))
            seconds = STEP_S + tokens / TOKENS_S + (5.0 if step <= 2 else 0.0)  # they warm up
            telemetry.record_span("train.step", clock, seconds, train_step=step, num_tokens=tokens)
            telemetry.record_span("weights.publish", clock + seconds, 0.3, version=step, total_s=0.3)
            clock += 700.0
        telemetry.close()
    if "rollout" not in skip:
        telemetry = Telemetry(run / "telemetry" / "rollout-00000.jsonl")
        lines = []
        for clock in (1000.0, 1001.0, 1002.0):  # warming up: three tokens a second
            lines.append({"t": clock, "c": "rollout.generated_tokens", "v": 3 * (clock - 1000)})
            lines.append({"t": clock, "c": "rollout.running", "v": 50})
        clock, tokens = 2000.0, 9.0
        for _ in range(60):
            running = int(rng.integers(4, 60))
            # Two readings a second apart, with the same sequences running all the time.
            for _ in range(2):
                lines.append({"t": clock, "c": "rollout.generated_tokens", "v": tokens})
                lines.append({"t": clock, "c": "rollout.running", "v": running})
                clock += 1.0
                tokens += running / (BASE + PER_SEQUENCE * running)
            clock += 100.0
        # Across an update only the time in which the engine decodes counts: a second less 0.2.
        # (The rest of that time goes to the prefill of 50 sequences, some tenth of a millisecond.)
        for reading in (0.0, 1.0):
            lines.append({"t": clock + reading, "c": "rollout.generated_tokens", "v": tokens})
            lines.append({"t": clock + reading, "c": "rollout.running", "v": 50})
            tokens += 0.8 * 50 / (BASE + PER_SEQUENCE * 50)
            if not reading:
                lines.append({"t": clock + 0.15, "d": 0.15, "s": "rollout.update", "version": 1,
                              "pause_s": 0.05, "load_s": 0.1, "stage_s": 0.05,
                              "pause_to_resume_s": 0.15})  # fmt: skip
        lines.append({"t": clock + 1, "c": "rollout.reward_s", "v": 6.0, "checks": 300})
        text = "\n".join(map(json.dumps, lines)) + '\n{"t": 12, "c": "rollout.run'
        (run / "telemetry" / "rollout-00000.jsonl").write_text(text)
    return run


def test_a_run_gives_back_its_rates(tmp_path):
    found = calibrate(made_run(tmp_path))
    assert found.rates.train_tokens_s == pytest.approx(TOKENS_S, rel=0.01)
    assert found.rates.train_step_s == pytest.approx(STEP_S, rel=0.01)
    assert found.rates.decode_base_s == pytest.approx(BASE, rel=0.02)
    # Prompts are prefilled within the measured time and counted by the simulation again.
    prefill = 10 / (4 * found.lengths.mean * found.rates.prefill_tokens_s)
    assert found.rates.decode_seq_s + prefill == pytest.approx(PER_SEQUENCE, rel=0.02)
    assert (found.rates.stage_s, found.rates.load_s) == (pytest.approx(0.1), pytest.approx(0.2))
    assert found.rates.reward_s == pytest.approx(0.02)
    assert found.prompt_tokens == 10
    assert found.lengths.mean == pytest.approx(np.mean([20 + 10 * n + g for g in range(8) for n in range(4)]))
    assert found.rates_of(8).train_tokens_s == pytest.approx(
        8 * found.rates.train_tokens_s / found.trainer_ranks
    )
    assert found.tokens_per_s > 0 and found.predict().tokens_per_s > 0


def test_reward_ranks_tell_the_time_of_a_check_themselves(tmp_path):
    run = made_run(tmp_path)
    telemetry = Telemetry(run / "telemetry" / "reward-00000.jsonl")
    telemetry._write({"t": 5000.0, "c": "reward.seconds", "v": 9.0, "checks": 100})
    telemetry.close()
    assert calibrate(run).rates.reward_s == pytest.approx(0.09)


@pytest.mark.parametrize(
    "skip,words",
    [
        ("trainer", "trainer-00000.jsonl"),
        ("rollout", "rollout-"),
        ("spool", "no readable shard"),
    ],
)
def test_what_is_missing_is_named(tmp_path, skip, words):
    with pytest.raises(ConfigError, match=words):
        calibrate(made_run(tmp_path, skip=(skip,)))


def test_a_run_of_too_few_steps_and_no_run_at_all(tmp_path):
    with pytest.raises(ConfigError, match="finished 2 training steps"):
        calibrate(made_run(tmp_path, steps=2))
    with pytest.raises(ConfigError, match="config.yaml"):
        calibrate(tmp_path / "nowhere")


def test_alike_batches_keep_the_guessed_proportion():
    intervals = [(1.0, 32 / 0.02, 32.0)] * 5  # 20 ms a step, always 32 sequences
    base, per_sequence, apart = fit_decode(intervals, (1e-3, 1e-4))
    assert not apart
    assert base + 32 * per_sequence == pytest.approx(0.02)
    assert base / per_sequence == pytest.approx(10)
    with pytest.raises(ConfigError, match="too few"):
        fit_decode(intervals[:2], (1e-3, 1e-4))


def test_slow_phases_count_as_long_as_they_lasted():
    """Ten intervals at a tenth of the speed: predicted over all of them, the total time is right."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(2, 80, 40).astype(float)
    intervals = [(1.0, m / (BASE + PER_SEQUENCE * m), m) for m in sizes]
    intervals += [(1.0, 0.1 * m / (BASE + PER_SEQUENCE * m), m) for m in sizes[:10]]
    base, per_sequence, _ = fit_decode(intervals, (1, 1))
    assert sum(g / m * (base + per_sequence * m) for _, g, m in intervals) == pytest.approx(50)


def test_an_interval_without_a_token_joins_the_next(tmp_path):
    lines = []
    for clock, tokens in enumerate((0, 0, 60, 60, 60, 200)):
        lines.append({"t": clock, "c": "rollout.generated_tokens", "v": tokens})
        lines.append({"t": clock, "c": "rollout.running", "v": 10 + clock})
    assert list(_intervals(lines)) == [(2.0, 60, 11.0), (3.0, 140, 13.5)]


def test_standstill_and_prefill_of_an_update_do_not_count():
    lines = [
        {"t": 10.0, "c": "rollout.generated_tokens", "v": 0},
        {"t": 10.0, "c": "rollout.running", "v": 20},
        {"t": 10.4, "d": 0.2, "s": "rollout.update", "stage_s": 0.1},
        {"t": 11.0, "c": "rollout.generated_tokens", "v": 100},
        {"t": 11.0, "c": "rollout.running", "v": 20},
    ]
    ((seconds, tokens, running),) = _intervals(lines, prefill_s=0.01)
    assert (seconds, tokens, running) == (pytest.approx(1 - 0.1 - 0.2 - 20 * 0.01), 100, pytest.approx(20))


def test_an_idle_engine_does_not_decode_slowly():
    lines = [
        {"t": 10.0, "c": "rollout.generated_tokens", "v": 0},
        {"t": 10.0, "c": "rollout.running", "v": 20},
        # The update lies in the idleness, which is written when it ends.
        {"t": 10.3, "d": 0.1, "s": "rollout.update", "stage_s": 0.0},
        {"t": 10.2, "d": 0.4, "s": "rollout.idle", "waiting": "lease"},
        {"t": 11.0, "c": "rollout.generated_tokens", "v": 100},
        {"t": 11.0, "c": "rollout.running", "v": 20},
    ]
    ((seconds, tokens, running),) = _intervals(lines)
    assert (seconds, tokens, running) == (pytest.approx(0.6), 100, pytest.approx(20))


def test_a_fixed_cost_is_only_told_from_steps_of_several_sizes():
    assert fit_training([(1000, 1.0)] * 8) == (1000.0, 0.0)
    assert fit_training([(1000, 1.0), (2000, 1.5)]) == (pytest.approx(1200), 0.0)
    rate, fixed = fit_training([(n, 0.5 + n / 2000) for n in (1000, 1500, 2000, 2500, 3000)])
    assert (rate, fixed) == (pytest.approx(2000), pytest.approx(0.5))
    # Larger batches that were faster say nothing about a fixed cost.
    assert fit_training([(n, 5 - n / 1000) for n in (1000, 1500, 2000, 2500, 3000)])[1] == 0.0


def test_time_between_two_lives_of_a_run_does_not_count():
    def step(number: int, end: float) -> dict:
        return {"train_step": number, "t": end - 1, "d": 1.0, "num_tokens": 100}

    alone = [step(n, 2.0 * n) for n in range(1, 6)]
    assert measured_speed(alone) == pytest.approx(50)
    # Resumed from step 3 after an hour.
    assert measured_speed(alone + [step(n, 3600 + 2.0 * n) for n in range(4, 8)]) == pytest.approx(50)
    # Resumed from the checkpoint that was the last step.
    resumed = [step(n, 2.0 * n) | {"a": 1} for n in range(1, 6)]
    resumed += [step(n, 3600 + 2.0 * n) | {"a": 2} for n in range(6, 9)]
    assert measured_speed(resumed) == pytest.approx(50)
