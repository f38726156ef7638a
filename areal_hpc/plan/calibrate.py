"""Rates and lengths of a measured run, from its folder alone.

Reads config.yaml, telemetry/*.jsonl and the spool. What the files hold:
trainer-*.jsonl   spans train.step (num_tokens), weights.publish (total_s)
rollout-*.jsonl   gauges rollout.running and rollout.generated_tokens once a second,
                  spans rollout.update (stage_s, pause_s, load_s, pause_to_resume_s), rollout.idle,
                  gauge rollout.reward_s
reward-*.jsonl    gauge reward.seconds, where rewards have ranks of their own
spool             answers of whole groups

A decode step is fitted to the gauges: an interval of s seconds with g new tokens at m
running sequences held g / m steps, so s = base * g / m + per_sequence * g. Called by `cli`
and by benchmarks that compare the prediction with the run.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import read_config
from areal_hpc.config.schema import Config, KvOnUpdate, OnUpdate
from areal_hpc.paths import RunPaths
from areal_hpc.plan.lengths import Empirical
from areal_hpc.plan.memory import engine_slots, memory_limit, rollout_memory
from areal_hpc.plan.rates import estimate_rates
from areal_hpc.plan.shape import ModelShape, find_shape
from areal_hpc.plan.simulate import Simulation
from areal_hpc.plan.splits import MAX_TRAJECTORIES, Workload, simulate, system_of
from areal_hpc.plan.system import Rates, Result

MAX_SHARDS = 64
"""Shards read for lengths, spread evenly over the run."""
MAX_ENGINES = 8
"""Rollout ranks whose telemetry is read: engines are alike, and files may be large."""
MAX_GAP_S = 5.0
"""Gauges further apart than this say nothing about the time between."""
MIN_SPREAD = 1.5
"""Batches must differ by this factor to tell a step's base from its share per sequence."""
WARMUP_STEPS = 2
"""Training steps at the start that are not counted: libraries warm up, the first batch is awaited."""


@dataclass(frozen=True)
class Calibration:
    """What a run measured. `rates` are those of its own layout."""

    run: str
    config: Config
    shape: ModelShape
    rates: Rates
    lengths: Empirical
    prompt_tokens: int
    trainer_ranks: int
    num_steps: int
    """Training steps that the run finished."""
    tokens_per_s: float
    """Answer tokens trained per second of wall time, as measured."""
    notes: tuple[str, ...] = ()
    """Rates that the files do not tell and that are estimates."""

    def rates_of(self, trainer_ranks: int) -> Rates:
        """The same with a trainer of another size, whose tokens/s grow with its ranks."""
        return replace(
            self.rates, train_tokens_s=self.rates.train_tokens_s * trainer_ranks / self.trainer_ranks
        )

    def predict(self, config: Config | None = None) -> Result:
        """The simulation of `config`; without one, of the measured run itself over the steps that count."""
        own, config = config is None, config or self.config
        memory = rollout_memory(config, self.shape, memory_limit(config, None)[1])
        slots = engine_slots(config, memory, self.lengths, self.prompt_tokens)
        workload = Workload(self.lengths, self.prompt_tokens, slots, config.run.seed)
        rates = self.rates_of(config.groups.trainer.ranks)
        system = system_of(config, workload, rates, config.groups.rollout.ranks)
        if not own:
            return simulate(config, system, workload)
        steps = min(self.num_steps, max(WARMUP_STEPS + 3, MAX_TRAJECTORIES // system.batch_size))
        return Simulation(system, self.lengths, workload.seed).run(steps, WARMUP_STEPS)


def calibrate(folder: Path, shape: ModelShape | None = None) -> Calibration:
    """What the run in `folder` measured; ConfigError when it is no run, or too little of one.

    shape: its model, where model.path of the run cannot be read from here.
    """
    paths = RunPaths(Path(folder).expanduser())
    if not paths.config.is_file():
        raise ConfigError(f"--from={folder} holds no config.yaml: give the folder of a run")
    config = read_config(paths.config)
    lengths, prompt_tokens = _lengths(paths)
    shape = shape or find_shape(config, None)
    rates = estimate_rates(config, shape, lengths, prompt_tokens, config.groups.trainer.ranks)
    notes = [f"prefill of {rates.prefill_tokens_s:,.0f} tokens/s is an estimate"]

    trainer = list(_events(paths, "trainer-00000.jsonl"))
    steps = _steps(trainer)
    train_tokens_s, train_step_s = fit_training([(step["num_tokens"], step["d"]) for step in steps[1:]])
    rates = replace(rates, train_tokens_s=train_tokens_s, train_step_s=train_step_s)

    files = _spread(sorted(paths.telemetry.glob("rollout-*.jsonl")), MAX_ENGINES)
    rollouts = [list(_events(paths, file.name)) for file in files]
    if not rollouts:
        raise ConfigError(f"--from={folder} has no telemetry of a rollout rank (telemetry/rollout-*.jsonl)")
    # Everything is taken from the time that `measured_speed` speaks of.
    trainer, *rollouts = (_within(events, steps) for events in (trainer, *rollouts))
    again = config.rollout.kv_on_update is KvOnUpdate.recompute
    context = prompt_tokens + lengths.mean_square / lengths.mean / 2
    prefill_s = context / rates.prefill_tokens_s if again else 0.0
    intervals = [interval for events in rollouts for interval in _intervals(events, prefill_s)]
    guess = (rates.decode_base_s, rates.decode_seq_s)
    base, per_sequence, apart = fit_decode(intervals, guess, str(folder))
    if not apart:
        notes.append(
            "batches were all alike: how a decode step divides into base and sequences is an estimate"
        )
    # The intervals hold the prefill of new prompts too, which the simulation adds by itself.
    prefill = prompt_tokens / (config.rollout.group_size * lengths.mean * rates.prefill_tokens_s)
    rates = replace(rates, decode_base_s=base, decode_seq_s=max(0.0, per_sequence - prefill), decode_kv_s=0.0)
    rates = _publication(config, rates, trainer, rollouts, notes)
    scorers = _spread(sorted(paths.telemetry.glob("reward-*.jsonl")), MAX_ENGINES)
    rates = _scoring(rates, [_within(_events(paths, file.name), steps) for file in scorers] or rollouts, notes)
    return Calibration(
        run=str(folder),
        config=config,
        shape=shape,
        rates=rates,
        lengths=lengths,
        prompt_tokens=prompt_tokens,
        trainer_ranks=config.groups.trainer.ranks,
        num_steps=len(steps) + WARMUP_STEPS - 1,
        tokens_per_s=measured_speed(steps) * lengths.mean / (lengths.mean + prompt_tokens),
        notes=tuple(notes),
    )


# ---- fits (pure) -----------------------------------------------------------------------


def fit_training(steps: list[tuple[float, float]]) -> tuple[float, float]:
    """(tokens/s, fixed seconds) from (tokens, seconds) of training steps.

    The fixed part is told apart only where batches differ in size by a fifth and the line
    has a sensible slope; else all time belongs to the tokens.
    """
    tokens, seconds = np.array(steps, dtype=float).T
    mean_rate = float(tokens.sum() / seconds.sum())
    if len(steps) < 5 or tokens.max() < 1.2 * tokens.min():
        return mean_rate, 0.0
    slope, fixed = np.polyfit(tokens, seconds, 1)
    if slope <= 0 or fixed <= 0:
        return mean_rate, 0.0
    return float(1 / slope), float(fixed)


def fit_decode(
    intervals: list[tuple[float, float, float]], guess: tuple[float, float], run: str = "run"
) -> tuple[float, float, bool]:
    """(base, per sequence, whether they could be told apart) from (seconds, tokens, running).

    Where all batches are alike, `guess` gives the proportion and the data its scale.
    """
    usable = np.array([row for row in intervals if min(row) > 0], dtype=float).reshape(-1, 3)
    if len(usable) < 3:
        raise ConfigError(
            f"--from={run}: {len(usable)} seconds of generation were measured, too few: "
            "let the run generate longer"
        )
    seconds, tokens, running = usable.T
    design = np.stack([tokens / running, tokens], axis=1)
    apart = running.max() >= MIN_SPREAD * running.min()
    found = _nonnegative(design, seconds) if apart else np.array(guess)
    # Slow phases count as much as they lasted: the fit may shape the curve, not the total.
    found = found * seconds.sum() / (design @ found).sum()
    return float(found[0]), float(found[1]), apart


def _nonnegative(design: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares of two coefficients, neither below 0."""
    found = np.linalg.lstsq(design, target, rcond=None)[0]
    if (found >= 0).all():
        return found
    singles = []
    for column in range(2):
        value = max(0.0, float(design[:, column] @ target / (design[:, column] @ design[:, column])))
        only = np.zeros(2)
        only[column] = value
        singles.append(only)
    return min(singles, key=lambda only: float(((design @ only - target) ** 2).sum()))


def measured_speed(steps: list[dict[str, Any]]) -> float:
    """Tokens per second of wall time between the ends of consecutive steps.

    Between two attempts the run stood still.
    """
    tokens = seconds = 0.0
    for before, step in itertools.pairwise(steps):
        same = step.get("a") == before.get("a")
        if same and step["train_step"] == before["train_step"] + 1:
            tokens += step["num_tokens"]
            seconds += step["t"] + step["d"] - before["t"] - before["d"]
    return tokens / seconds if seconds else 0.0


# ---- reading ---------------------------------------------------------------------------


def _events(paths: RunPaths, name: str) -> Iterator[dict[str, Any]]:
    """The lines of one rank's file; a half-written last line is left out."""
    try:
        text = (paths.telemetry / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"--from={paths.root} has no telemetry/{name}: the run recorded nothing") from None
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def _steps(trainer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Spans of the training steps that count, and of the one before."""
    steps = [event for event in trainer if event.get("s") == "train.step" and "num_tokens" in event]
    if len(steps) < WARMUP_STEPS + 3:
        raise ConfigError(
            f"--from: the run finished {len(steps)} training steps; at least {WARMUP_STEPS + 3} are needed"
        )
    return steps[WARMUP_STEPS - 1 :]


def _within(events: Iterable[dict[str, Any]], steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What happened between the end of the first of these steps and the end of the last."""
    first, last = (step["t"] + step["d"] for step in (steps[0], steps[-1]))
    return [event for event in events if first <= event["t"] <= last]


def _intervals(
    events: Iterable[dict[str, Any]], prefill_s: float = 0.0
) -> Iterator[tuple[float, float, float]]:
    """(seconds, tokens, running sequences) between two gauges of one engine.

    The standstill of an update does not count, nor does the prefill of its interrupted
    sequences, `prefill_s` each: the simulation adds both, as it does the time in which an engine
    has nothing to generate. A slow engine may finish no step between two gauges: such an
    interval joins the next.
    """
    readings: list[tuple[float, float, float]] = []
    still: list[tuple[float, float]] = []
    tokens, running = None, 0.0
    for event in events:
        if event.get("s") == "rollout.update":
            still.append((event["t"] - event.get("stage_s", 0.0), event["t"] + event["d"] + prefill_s * running))
        elif event.get("s") == "rollout.idle":
            still.append((event["t"], event["t"] + event["d"]))
        elif event.get("c") == "rollout.generated_tokens":
            tokens = event["v"]
        elif event.get("c") == "rollout.running" and tokens is not None:
            running = event["v"]
            readings.append((event["t"], tokens, running))
            tokens = None
    # Seconds of standstill until each reading; an update of an idle engine counts once.
    edges, stood = [0.0], [0.0]
    for begin, end in sorted(still):
        begin, end = max(begin, edges[-1]), max(end, edges[-1])
        edges += [begin, end]
        stood += [stood[-1], stood[-1] + end - begin]
    still_s = np.interp([time for time, _, _ in readings], edges, stood) if readings else []
    seconds = running_s = 0.0
    for (begin, end), (stood_before, stood_after) in zip(
        itertools.pairwise(readings), itertools.pairwise(still_s), strict=True
    ):
        if not begin[2] or not end[2] or end[0] - begin[0] > MAX_GAP_S:
            seconds = running_s = 0.0
            continue
        length = end[0] - begin[0] - (stood_after - stood_before)
        seconds += length
        running_s += length * (begin[2] + end[2]) / 2
        if end[1] > begin[1] and seconds > 0:
            yield seconds, end[1] - begin[1], running_s / seconds
            seconds = running_s = 0.0


def _publication(
    config: Config, rates: Rates, trainer: list, rollouts: list[list], notes: list[str]
) -> Rates:
    totals = [
        event["total_s"] for event in trainer if event.get("s") == "weights.publish" and "total_s" in event
    ]
    pauses: dict[int, list[float]] = defaultdict(list)
    # A drain waits for answers, which the simulation does by itself.
    drains = config.rollout.on_update is OnUpdate.drain
    for event in (event for events in rollouts for event in events if event.get("s") == "rollout.update"):
        # While bytes arrive the engine's workers do nothing else.
        still = event.get("stage_s", 0.0) + event["pause_to_resume_s"] - (event["pause_s"] if drains else 0.0)
        pauses[event["version"]].append(still)
    if not totals or not pauses:
        notes.append("no publication was measured: its times are estimates")
        return rates
    load_s = fmean(max(slowest) for slowest in pauses.values())
    return replace(rates, stage_s=max(0.0, fmean(totals) - load_s), load_s=load_s)


def _scoring(rates: Rates, scorers: list[list], notes: list[str]) -> Rates:
    last = [
        max((event for event in events if event.get("c") in ("rollout.reward_s", "reward.seconds")),
            key=lambda event: event["t"], default=None)
        for events in scorers
    ]  # fmt: skip
    seconds = sum(event["v"] for event in last if event)
    checks = sum(event.get("checks", 0) for event in last if event)
    if not checks:
        notes.append(f"the time of one reward, {rates.reward_s:g} s, is an estimate")
        return rates
    return replace(rates, reward_s=seconds / checks)


def _lengths(paths: RunPaths) -> tuple[Empirical, int]:
    """Answers of the spool's groups, and the mean prompt."""
    from areal_hpc.spool.schema import ShardError
    from areal_hpc.spool.shard import read_index

    chosen = _spread(sorted(paths.spool.glob("*/*.h5")), MAX_SHARDS)
    groups: list[list[int]] = []
    prompts: list[int] = []
    for path in chosen:
        try:
            rows = read_index(path).rows
        except (ShardError, FileNotFoundError):
            continue
        found: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            found[row.group_id].append(max(1, row.num_loss_tokens))
            prompts.append(row.num_tokens - row.num_loss_tokens)
        groups += found.values()
    if not groups:
        raise ConfigError(f"--from={paths.root} has no readable shard in spool/: lengths cannot be measured")
    return Empirical(groups), max(1, round(sum(prompts) / len(prompts)))


def _spread(files: list[Path], count: int) -> list[Path]:
    """At most `count` of them, evenly."""
    return files[:: max(1, -(-len(files) // count))]
