"""`areal-hpc plan CONFIG`: memory per rank, speed of every split of the nodes, the best one marked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from areal_hpc.config.load import ConfigError, load_config
from areal_hpc.config.schema import Config, Device
from areal_hpc.plan import memory as sizes
from areal_hpc.plan.calibrate import Calibration, calibrate
from areal_hpc.plan.lengths import Lengths
from areal_hpc.plan.memory import GIB, RankMemory
from areal_hpc.plan.rates import estimate_rates, guess_lengths, guess_prompt_tokens, hardware_of
from areal_hpc.plan.shape import ModelShape, find_shape
from areal_hpc.plan.splits import (
    RatesOf,
    Split,
    Workload,
    best_split,
    simulate_colocated,
    simulate_splits,
    speed,
)
from areal_hpc.plan.system import Rates, Result
from areal_hpc.plan.tables import Report, Table

CLOSE = 0.97


@dataclass(frozen=True)
class Assumptions:
    """What the simulation is fed with, and where it comes from."""

    rates_of: RatesOf
    lengths: Lengths
    prompt_tokens: int
    source: str


def plan_main(
    config_path: str,
    overrides: Sequence[str] = (),
    *,
    from_run: str | None = None,
    model_size: str | None = None,
    gpu_memory_gib: float | None = None,
    answer_tokens: float | None = None,
    as_json: bool = False,
    out: TextIO | None = None,
) -> int:
    """Print the plan; 1 if the configured layout does not fit. Raises ConfigError for a user's mistake.

    from_run: folder of a measured run that rates and lengths are taken from. model_size:
    a named size instead of model.path's config.json. answer_tokens: mean answer.
    """
    if model_size:
        overrides = [f"model.path={model_size}", *overrides]
    config = load_config(config_path, list(overrides))
    if gpu_memory_gib is not None and gpu_memory_gib <= 0:
        raise ConfigError(f"--gpu-memory-gib={gpu_memory_gib:g} must be above 0")
    if answer_tokens is not None and not 1 <= answer_tokens <= config.rollout.max_new_tokens:
        raise ConfigError(
            f"--answer-tokens={answer_tokens:g} must lie between 1 and rollout.max_new_tokens="
            f"{config.rollout.max_new_tokens}"
        )
    shape = find_shape(config, model_size)
    calibration = calibrate(Path(from_run), shape) if from_run else None
    assumed = _assume(config, shape, calibration, answer_tokens)
    limits = sizes.memory_limit(config, gpu_memory_gib)

    def trainer_memory_of(dp: int) -> RankMemory:
        return sizes.trainer_memory(config, shape, limits[0], dp)

    trainer, rollout = trainer_memory_of(config.trainer.dp), sizes.rollout_memory(config, shape, limits[1])
    report = Report()
    _describe(report, config, shape, assumed)
    _memory_table(report, config, trainer, rollout)
    if rollout.fits:
        slots = sizes.engine_slots(config, rollout, assumed.lengths, assumed.prompt_tokens)
        workload = Workload(assumed.lengths, assumed.prompt_tokens, slots, config.run.seed)
        splits = simulate_splits(config, workload, assumed.rates_of, trainer_memory_of)
        colocated = simulate_colocated(config, workload, assumed.rates_of)
        _split_table(report, config, splits, slots, colocated)
    if calibration:
        _measured(report, calibration)
    report.print(out or sys.stdout, as_json=as_json)
    return 0 if trainer.fits and rollout.fits else 1


def _assume(
    config: Config, shape: ModelShape, calibration: Calibration | None, answer_tokens: float | None
) -> Assumptions:
    lengths: Lengths = guess_lengths(config, answer_tokens)
    if calibration is None:
        prompt_tokens = guess_prompt_tokens(config)

        def rates_of(trainer_ranks: int) -> Rates:
            return estimate_rates(config, shape, lengths, prompt_tokens, trainer_ranks)

        return Assumptions(rates_of, lengths, prompt_tokens, f"estimated for {hardware_of(config).name}")
    return Assumptions(
        calibration.rates_of,
        lengths if answer_tokens else calibration.lengths,
        calibration.prompt_tokens,
        f"measured in {calibration.run}",
    )


def _describe(report: Report, config: Config, shape: ModelShape, assumed: Assumptions) -> None:
    groups = config.groups
    rates = assumed.rates_of(groups.trainer.ranks)
    mean, longest = assumed.lengths.mean, assumed.lengths.max_tokens
    report.line(
        f"model {shape.name}: {shape.parameters / 1e6:,.1f}M parameters in {config.model.dtype}; "
        f"{config.run.mode.value}, eta {config.algorithm.max_staleness}, "
        f"{config.trainer.batch_size:,} trajectories a step, {config.run.total_steps:,} steps"
    )
    report.line(
        f"answers of {mean:,.0f} tokens on average, {longest:,} at most; prompts of {assumed.prompt_tokens}"
    )
    report.line(
        f"rates {assumed.source}: decode step {1e3 * rates.decode_base_s:.2f} ms + "
        f"{1e6 * rates.decode_seq_s:.1f} us per sequence + {1e9 * rates.decode_kv_s:.2f} ns per cached "
        "token; "
        f"prefill {rates.prefill_tokens_s:,.0f} tokens/s per engine; trainer "
        f"{rates.train_tokens_s:,.0f} tokens/s + {rates.train_step_s:.2f} s a step; "
        f"new weights stop generation for {rates.load_s:.2f} s"
    )
    report.data |= {
        "model": {"name": shape.name, "parameters": shape.parameters},
        "rates": {
            "source": assumed.source,
            **{name: getattr(rates, name) for name in rates.__dataclass_fields__},
        },
        "lengths": {"mean": mean, "max": longest, "prompt": assumed.prompt_tokens},
    }


def _memory_table(report: Report, config: Config, *ranks: RankMemory) -> None:
    names = list(dict.fromkeys(name for rank in ranks for name in rank.parts))
    rows = [
        [name, *(f"{rank.parts[name] / GIB:.2f}" if name in rank.parts else "" for rank in ranks)]
        for name in names
    ]
    rows.append(["total", *(f"{rank.total / GIB:.2f}" for rank in ranks)])
    rows.append(["available", *(f"{rank.limit / GIB:.2f}" for rank in ranks)])
    rows.append(["", *("fits" if rank.fits else "DOES NOT FIT" for rank in ranks)])
    on_gpu = config.run.device is Device.cuda
    unit = "GPU" if on_gpu else "rank (host memory)"
    report.table(Table(f"memory per {unit}, GiB", ["", *(rank.role for rank in ranks)], rows))
    lead_copy = ranks[0].parts.get(sizes.LEAD_COPY, 0)
    if lead_copy:
        report.line(
            f"trainer: the lead, shown here, holds {lead_copy / GIB:.2f} GiB that no other rank does, the weights "
            "that weights.overlap publishes from"
        )
    elif config.weights.overlap:
        report.line("trainer: the lead's copy for weights.overlap leaves it below the rank shown here")
    for rank in ranks:
        if not rank.fits:
            report.line(f"{rank.role} does not fit: {rank.advice}")
        if rank.host:
            report.line(f"{rank.role}: {rank.host / GIB:.2f} GiB of host memory per rank beside that")
        if rank.kv_tokens:
            report.line(f"{rank.role}: the KV cache of an engine holds {rank.kv_tokens:,} tokens")
    groups = config.groups
    if not on_gpu and groups.trainer.nodes == groups.rollout.nodes == 1:
        whole = sum(
            rank.total * group.ranks
            for rank, group in zip(ranks, (groups.trainer, groups.rollout), strict=True)
        )
        whole -= lead_copy * (groups.trainer.ranks - 1)
        report.line(f"all ranks on one machine: {whole / GIB:.2f} GiB")
    if on_gpu:
        # An engine takes what memory there is: its device follows from the trainer's need alone.
        report.line(f"smallest device for the trainer: {sizes.smallest_device(ranks[0].total)}")
    report.data["memory"] = {
        rank.role: {
            "parts_bytes": rank.parts, "total_bytes": rank.total, "limit_bytes": rank.limit,
            "fits": rank.fits, "advice": rank.advice, "host_bytes": rank.host, "kv_tokens": rank.kv_tokens,
        }
        for rank in ranks
    }  # fmt: skip


def _split_table(report: Report, config: Config, splits: list[Split], slots: int, colocated: Result) -> None:
    best = best_split(splits)
    rows, data, marked = [], [], set()
    for index, split in enumerate(splits):
        words = (("best", split is best), ("configured", split.configured), (split.problem, split.problem))
        mark = " ".join(word for word, holds in words if holds)
        if split is best:
            marked.add(index)
        rows.append([f"{split.trainer_nodes} + {split.rollout_nodes}", *_cells(config, split), mark])
        data.append(_split_data(config, split, split is best))
    columns = ["nodes", "dp", "engines", "async tok/s", "sync tok/s", "ratio", "stale mean/max",
               "trainer busy", "rollout busy", "slots", "hours", "node-hours", ""]  # fmt: skip
    title = "trainer + rollout nodes (tok/s: answer tokens trained)"
    report.table(Table(title, columns, rows, frozenset(marked)))
    close = [f"{split.trainer_nodes} + {split.rollout_nodes}" for split in splits
             if best and split.synchronous and split is not best
             and speed(split) > CLOSE * speed(best)]  # fmt: skip
    if close:
        report.line(
            f"within {1 - CLOSE:.0%} of the best, less than the simulation can tell apart: {', '.join(close)}"
        )
    report.line(f"engines hold {slots} sequences at once")
    report.line(
        f"for comparison, taking turns on all nodes (colocated, synchronous): "
        f"{colocated.tokens_per_s:,.0f} tok/s, {colocated.hours(config.run.total_steps):.2f} hours"
    )
    report.data |= {"slots": slots, "splits": data, "colocated_sync_tokens_per_s": colocated.tokens_per_s}


def _cells(config: Config, split: Split) -> list[str]:
    if not split.synchronous:
        return [str(split.dp), str(split.engines), *[""] * 9]
    main, other = split.asynchronous or split.synchronous, split.synchronous
    asynchronous = [f"{main.tokens_per_s:,.0f}", f"{other.tokens_per_s:,.0f}",
                    f"{main.tokens_per_s / other.tokens_per_s:.2f}"]  # fmt: skip
    return [
        str(split.dp),
        str(split.engines),
        *(asynchronous if split.asynchronous else ["", f"{other.tokens_per_s:,.0f}", ""]),
        f"{main.staleness_mean:.1f}/{main.staleness_max}",
        f"{main.trainer_busy:.0%}",
        f"{main.rollout_busy:.0%}",
        f"{main.slots_filled:.0%}",
        f"{main.hours(config.run.total_steps):.2f}",
        f"{_node_hours(config, split, main):,.1f}",
    ]


def _node_hours(config: Config, split: Split, result: Result) -> float:
    """Of all groups."""
    nodes = config.groups.controller.nodes + split.trainer_nodes + split.rollout_nodes + config.groups.reward.nodes
    return result.hours(config.run.total_steps) * nodes


def _split_data(config: Config, split: Split, best: bool) -> dict[str, object]:
    data: dict[str, object] = {
        "trainer_nodes": split.trainer_nodes, "rollout_nodes": split.rollout_nodes, "dp": split.dp,
        "engines": split.engines, "best": best, "configured": split.configured, "problem": split.problem,
    }  # fmt: skip
    for name, result in (("async", split.asynchronous), ("sync", split.synchronous)):
        if result:
            data[name] = {
                "tokens_per_s": result.tokens_per_s,
                "step_s": result.step_s,
                "staleness_mean": result.staleness_mean,
                "staleness_max": result.staleness_max,
                "trainer_busy": result.trainer_busy,
                "rollout_busy": result.rollout_busy,
                "slots_filled": result.slots_filled,
                "hours": result.hours(config.run.total_steps),
                "node_hours": _node_hours(config, split, result),
            }
    return data


def _measured(report: Report, calibration: Calibration) -> None:
    """The model against the run it was calibrated from."""
    predicted, measured = calibration.predict().tokens_per_s, calibration.tokens_per_s
    for note in calibration.notes:
        report.line(f"note: {note}")
    report.line(
        f"check on {calibration.run}: predicted {predicted:,.0f} tok/s, measured {measured:,.0f} "
        f"({predicted / measured - 1:+.1%})"
    )
    report.data["calibration"] = {
        "run": calibration.run, "predicted_tokens_per_s": predicted, "measured_tokens_per_s": measured,
        "plan_error": abs(predicted / measured - 1), "notes": list(calibration.notes),
    }  # fmt: skip
