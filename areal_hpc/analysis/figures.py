"""The figures of a report, drawn with matplotlib: pure functions from runs to figures.

One colour means one thing throughout: a role, an activity, or (where several runs are laid
over each other) a run. Axes carry units; titles and captions stand in the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.colors import to_rgb  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import LogFormatter, MaxNLocator, PercentFormatter  # noqa: E402

from areal_hpc.analysis.run_data import RunData  # noqa: E402
from areal_hpc.analysis.samples import spread  # noqa: E402
from areal_hpc.analysis.timeline import ACTIVITIES, NUM_BINS, RankTime  # noqa: E402
from areal_hpc.analysis.trained import quantile  # noqa: E402
from areal_hpc.rewards.right import PART  # noqa: E402

WIDTH_IN = 10.4
INK, MUTED, GRID = "#22272e", "#667080", "#e4e8ee"
RUN_COLOURS = ("#2f6db5", "#d9772b", "#3a9a5b", "#9256b5", "#c2405a", "#2a9aa8", "#8a6d3b", "#5c6470")
REWARD, ACCURACY, TRAINER, ROLLOUT = "#8fb3dd", "#1f8a4d", "#2f6db5", "#e08a1e"
ACTIVITY_COLOURS = {
    "start-up": "#c9ced6", "generate": "#e08a1e", "evaluate": "#f2c14e", "score": "#4fa58b", "log-probs": "#7fb0e3",
    "forward + backward": "#2f6db5", "optimizer": "#1d3f73", "other step work": "#a9c4e4", "weights": "#9256b5",
    "checkpoint": "#8a6d3b", "idle": "#f3dfe0", "control": "#8d97a5",
}  # fmt: skip
BOUND_COLOUR = "#c2405a"
MAX_PARTS = 4
MAX_ROWS = 24
"""Ranks drawn in a timeline; sums are taken over more."""
RUN_LEGEND_IN = 0.3
FAR_BOUND = 4
"""A bound beyond this many times the largest staleness is told in words: a line there would flatten all bars."""
ROW_PIXELS = 16
"""Pixel rows of a rank in the timeline."""

STYLE = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#aab2bd",
    "axes.labelcolor": INK, "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED, "axes.grid": True,
    "grid.color": GRID, "axes.axisbelow": True, "lines.linewidth": 1.6, "legend.frameon": False,
    "legend.fontsize": 8.5, "svg.fonttype": "none", "figure.dpi": 100, "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
}  # fmt: skip
matplotlib.rcParams.update(STYLE)


@dataclass(frozen=True)
class Drawn:
    """A figure with its file name, title and caption."""

    name: str
    title: str
    caption: str
    figure: Figure


def curves(runs: list[RunData]) -> Drawn:
    """Reward and held-out accuracy against step, run time and cost."""
    unit = runs[0].cost.unit if len({run.cost.unit for run in runs}) == 1 else "core-hours"
    longest_h = max((run.history.clock.total_s for run in runs), default=0.0) / 3600
    scale, name = (60.0, "run time (min)") if longest_h < 2 else (1.0, "run time (h)")
    views: list[tuple[str, Callable[[RunData, dict], list[float]]]] = [
        ("training step", lambda run, records: [float(step) for step in records]),
        (name, lambda run, records: [hours * scale for hours in run.run_hours(records)]),
        (unit, lambda run, records: [hours * (run.cost.width if unit == run.cost.unit else run.cost.cores)
                                     for hours in run.run_hours(records)]),
    ]  # fmt: skip
    evaluated = [run for run in runs if run.history.evals]
    figure, panels = _figure(3, 2.9, sharey=True)
    for axes, (label, place) in zip(panels, views, strict=True):
        for run, colour in _coloured(runs):
            single = len(runs) == 1
            axes.plot(place(run, run.history.steps), run.column("reward_mean"), lw=1.3,
                      color=REWARD if single else colour, alpha=1.0 if single else 0.55,
                      label=_label(runs, run, "reward, mean of each batch"))  # fmt: skip
            if not run.history.evals:
                continue
            axes.plot(place(run, run.history.evals), [record["accuracy"] for record in run.history.evals.values()],
                      "o-", ms=4, color=ACCURACY if single else colour,
                      label="held-out accuracy" if run is evaluated[0] else None)  # fmt: skip
        axes.set_xlabel(label)
        _restarts(axes, runs, label)
    panels[0].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    panels[0].set_ylabel("reward, accuracy")
    handles, texts = panels[0].get_legend_handles_labels()
    _legend(figure, runs, handles, texts)
    return Drawn("curves", "Reward and held-out accuracy",
                 "Reward is the mean over the samples of each training batch; accuracy is measured on held-out prompts "
                 "that are never trained on. Run time counts only while the ranks ran"
                 + (", not the time between restarts" if any(len(run.history.lives) > 1 for run in runs) else "")
                 + (" (dotted lines)." if len(runs) == 1 and len(runs[0].history.lives) > 1 else ".")
                 + f" {unit[0].upper()}{unit[1:]} are run time times what the run held.", figure)  # fmt: skip


def speed(runs: list[RunData]) -> Drawn:
    """Tokens per second of both sides, and where a step's wall time went."""
    figure, (rates, waits) = _figure(2, 2.5)
    for run, colour in _coloured(runs):
        single = len(runs) == 1
        rates.plot(run.steps, run.column("gen_tokens_per_s"), color=ROLLOUT if single else colour, ls="-",
                   label=_label(runs, run, "generated"))  # fmt: skip
        rates.plot(run.steps, [sums.num_answer_tokens / seconds if seconds else math.nan for sums, seconds in
                               zip(run.sums(), run.column("step_seconds"), strict=True)],
                   color=TRAINER if single else colour, ls="-" if single else "--",
                   label=_label(runs, run, "trained"))  # fmt: skip
        waits.plot(run.steps, run.column("step_seconds"), color=MUTED if single else colour,
                   label=_label(runs, run, "whole step"))  # fmt: skip
        waits.plot(run.steps, run.column("trainer/seconds"), color=TRAINER if single else colour, lw=1.1, ls="--",
                   label=_label(runs, run, "training"))  # fmt: skip
        waits.plot(run.steps, run.column("wait_s"), color="#c2405a" if single else colour, lw=1.1, ls=":",
                   label=_label(runs, run, "waiting for samples"))  # fmt: skip
    _robust_top(waits, [value for run in runs for value in run.column("step_seconds")])
    _robust_top(rates, [value for run in runs for value in run.column("gen_tokens_per_s")], floor=1.3)
    rates.set_ylabel("answer tokens per second")
    waits.set_ylabel("seconds per training step")
    _by_step(runs, rates, waits)
    return Drawn("speed", "Speed of both sides",
                 "Answer tokens per second of wall time between the ends of consecutive steps, and how long steps "
                 "took. The first step of a start holds the start-up and may lie outside the axis.", figure)  # fmt: skip


def staleness(runs: list[RunData]) -> Drawn:
    """Histogram of the staleness of every trained sample, with the bound."""
    figure, (axes, trend) = _figure(2, 2.5)
    totals = [run.trained.total.staleness for run in runs]
    low, high = (chosen([0, *(value for total in totals for value in total)]) for chosen in (min, max))
    width = 0.8 / len(runs)
    for index, ((run, colour), total) in enumerate(zip(_coloured(runs), totals, strict=True)):
        count = sum(total.values())
        # Every value that there is, so that the bars of a run are all of its samples.
        places = [value + (index - (len(runs) - 1) / 2) * width for value in sorted(total)]
        axes.bar(places, [total[value] / count for value in sorted(total)], width * 0.92, color=colour)
        trend.plot(run.steps, run.column("staleness_mean"), color=colour, label=_label(runs, run, "mean"))
        trend.plot(run.steps, run.column("staleness_max"), color=colour, lw=1.0, ls=":",
                   label=_label(runs, run, "largest"))  # fmt: skip
    bounds = sorted({run.history.bound for run in runs})
    near = [bound for bound in bounds if bound <= FAR_BOUND * (high + 2)]
    for bound in near:
        axes.axvline(bound + 0.5, color=BOUND_COLOUR, lw=1.2, ls="--")
        axes.text(bound + 0.5, 1.02, f"bound η = {bound}", color=BOUND_COLOUR, ha="right", va="bottom", fontsize=8.5,
                  transform=axes.get_xaxis_transform())  # fmt: skip
        trend.axhline(bound, color=BOUND_COLOUR, lw=1.0, ls="--")
    axes.set_xlim(low - 0.6, max([high, *near]) + 0.6)
    far = [str(bound) for bound in bounds if bound not in near]
    axes.set_xlabel("staleness of a sample (versions)")
    axes.set_ylabel("share of trained samples")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="x", visible=False)
    trend.set_ylabel("staleness (versions)")
    trend.set_ylim(bottom=min(0.0, *_finite(run.column("staleness_mean") for run in runs)))
    _by_step(runs, trend)
    return Drawn("staleness", "Staleness",
                 "Version trained from minus the version of a sample's oldest token, for every trained sample. "
                 "Admission keeps it within the bound (dashed)."
                 + (f" The bound η = {', '.join(far)} lies far beyond the figure." if far else "")
                 + (" Below 0 are answers of versions after the checkpoint from which a run went on." if low < 0 else ""),
                 figure)  # fmt: skip


def lengths(runs: list[RunData]) -> Drawn:
    """Answer lengths per step and the share that was cut off."""
    figure, (axes, cut) = _figure(2, 2.5)
    for run, colour in _coloured(runs):
        sums = run.sums()
        single = len(runs) == 1
        mean = [step.num_answer_tokens / step.num_samples if step.num_samples else math.nan for step in sums]
        axes.plot(run.steps, mean, color=colour, label=_label(runs, run, "mean"))
        if single:
            low, high = ([quantile(step.lengths, share) for step in sums] for share in (0.1, 0.9))
            axes.fill_between(run.steps, low, high, color=colour, alpha=0.15, lw=0, label="10 % to 90 %")
        axes.plot(run.steps, [step.longest for step in sums], color=colour, lw=1.0, ls=":",
                  label=_label(runs, run, "longest"))  # fmt: skip
        cut.plot(run.steps, [step.num_truncated / step.num_samples if step.num_samples else math.nan for step in sums],
                 color=colour, label=_label(runs, run, "cut off at the token limit"))  # fmt: skip
    for limit in {run.history.config.rollout.max_new_tokens for run in runs}:
        axes.axhline(limit, color=BOUND_COLOUR, lw=1.0, ls="--")
    axes.set_ylabel("answer length (tokens)")
    axes.set_ylim(bottom=0)
    cut.set_ylabel("share of trained samples")
    _share_axis(cut)
    _by_step(runs, axes, cut)
    return Drawn("lengths", "Answer lengths and truncation",
                 "Tokens of the policy in each trained sample, and the share of samples that reached the limit "
                 "rollout.max_new_tokens (dashed).", figure)  # fmt: skip


def objective(runs: list[RunData]) -> Drawn:
    """Importance weights, clipping and the behaviour gap."""
    figure, (weights, clip, gap) = _figure(3, 2.5)
    for run, colour in _coloured(runs):
        weights.plot(run.steps, run.column("trainer/importance_weight_mean"), color=colour,
                     label=_label(runs, run, "mean"))  # fmt: skip
        weights.plot(run.steps, run.column("trainer/importance_weight_max"), color=colour, lw=1.0, ls=":",
                     label=_label(runs, run, "largest"))  # fmt: skip
        clip.plot(run.steps, run.column("trainer/clip_fraction"), color=colour, label=_label(runs, run, "clipped"))
        values = [value if value > 0 else math.nan for value in run.column("trainer/behave_gap_fresh_max")]
        gap.plot(run.steps, values, color=colour, label=_label(runs, run, "largest"))
        values = [value if value > 0 else math.nan for value in run.column("trainer/behave_gap_fresh_mean")]
        gap.plot(run.steps, values, color=colour, lw=1.0, ls=":", label=_label(runs, run, "mean"))
    weights.set_yscale("log")
    gap.set_yscale("log")
    # Weights lie near 1: written out, not as powers of ten.
    weights.yaxis.set_major_formatter(LogFormatter(labelOnlyBase=False))
    weights.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.4)))
    _share_axis(clip)
    weights.set_ylabel("importance weight")
    clip.set_ylabel("share of trained tokens")
    gap.set_ylabel("|Δ log-prob| (nats)")
    _by_step(runs, weights, clip, gap)
    return Drawn("objective", "Importance weights, clipping, behaviour gap",
                 "The weight π_prox / π_behav corrects for the versions between generation and training; clipped are "
                 "tokens whose ratio left the trust region. The gap compares trainer and engine on the same tokens "
                 "under the same weights: it should be numerical noise.", figure)  # fmt: skip


def transfers(runs: list[RunData]) -> Drawn:
    """How long each publication took, and how long the engines stood still for it."""
    figure, (total, pause) = _figure(2, 2.3)
    for run, colour in _coloured(runs):
        single = len(runs) == 1
        entries = sorted(run.timeline.transfers, key=lambda entry: entry["time"])
        versions = [entry.get("version", math.nan) for entry in entries]
        total.plot(versions, [entry.get("total_s", math.nan) for entry in entries], "o", ms=3.5,
                   color="#9256b5" if single else colour, label=_label(runs, run, "whole publication"))  # fmt: skip
        pause.plot(versions, [entry.get("pause_to_resume_s", math.nan) for entry in entries], "o", ms=3.5,
                   color=ROLLOUT if single else colour,
                   label=_label(runs, run, "slowest engine, pause to resume"))  # fmt: skip
    for axes in (total, pause):
        axes.set_ylabel("seconds")
        axes.set_ylim(bottom=0)
    _by_step(runs, total, pause)
    for axes in (total, pause):
        axes.set_xlabel("version")
    return Drawn("transfers", "Weight transfers",
                 "From the trainer's first byte until every engine serves the version; and the part of it in which "
                 "the slowest engine generated nothing.", figure)  # fmt: skip


def parts(runs: list[RunData]) -> Drawn | None:
    """Mean of each part of the reward per step; None where the steps have none."""
    names = sorted({name for run in runs for record in run.history.steps.values() for name in record
                    if name.startswith(PART)})  # fmt: skip
    if not names:
        return None
    figure, panels = _figure(len(names[:MAX_PARTS]), 2.3)
    for axes, name in zip(panels, names, strict=False):
        for run, colour in _coloured(runs):
            axes.plot(run.steps, run.column(name), "-", marker=".", color=colour)
        axes.set_ylabel(f"mean of {name.removeprefix(PART)}")
    _by_step(runs, *panels)
    return Drawn("parts", "Rewards by part",
                 "Mean of each part over all samples of a step; weights are not applied."
                 + (f" The first {MAX_PARTS} of {len(names)} parts." if len(names) > MAX_PARTS else ""), figure)  # fmt: skip


def timeline(run: RunData) -> Drawn:
    """What each rank did over the run, one row a rank."""
    ranks = spread([rank for rank in run.timeline.ranks if rank.run_s > 0], MAX_ROWS)
    height = max(1.6, 0.8 + 0.26 * len(ranks))
    figure, (axes,) = _figure(1, height)
    total = run.history.clock.total_s
    scale, unit = (60.0, "min") if total < 7200 else (3600.0, "h")
    gap = 4
    picture = np.ones((max(1, len(ranks)) * (ROW_PIXELS + gap), NUM_BINS, 3))
    for index, rank in enumerate(ranks):
        top = index * (ROW_PIXELS + gap)
        picture[top : top + ROW_PIXELS] = _row(rank, total / NUM_BINS)
    rows = max(1, len(ranks))
    axes.imshow(picture, aspect="auto", extent=(0, max(total, 1e-9) / scale, rows, 0), interpolation="nearest")
    axes.set_yticks([index + ROW_PIXELS / (ROW_PIXELS + gap) / 2 for index in range(len(ranks))],
                    [f"{rank.role} {rank.rank}" for rank in ranks])  # fmt: skip
    axes.tick_params(length=0)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for start in run.history.clock.starts[1:]:
        axes.axvline(start / scale, color=INK, lw=1.0, ls=":")
    axes.set_xlabel(f"run time ({unit})")
    used = [name for name in ACTIVITIES if any(rank.seconds[name] > 0 for rank in ranks)]
    handles = [Patch(color=ACTIVITY_COLOURS[name], label=name) for name in used]
    figure.legend(handles=handles, loc="outside upper left", ncols=min(11, len(used)), handlelength=1.0,
                  columnspacing=1.1, handletextpad=0.5, borderpad=0.0, fontsize=8)  # fmt: skip
    left_out = sum(run.timeline.num_ranks.values()) - len(ranks)
    return Drawn("timeline", "What each rank did",
                 "Each column is a short stretch of run time, filled by the shares of what the rank did in it."
                 + (f" {left_out} further ranks are left out." if left_out else "")
                 + (" Dotted lines: restarts." if len(run.history.lives) > 1 else ""), figure)  # fmt: skip


def _row(rank: RankTime, bin_s: float) -> np.ndarray:
    """Colours [ROW_PIXELS, NUM_BINS, 3] of one rank: in each bin the activities one above the other."""
    shares = np.clip(rank.bins, 0.0, None)
    edges = np.cumsum(shares, axis=0) * ROW_PIXELS
    levels = np.arange(ROW_PIXELS)[::-1, None] + 0.5
    colours = np.ones((ROW_PIXELS, NUM_BINS, 3))
    for index in reversed(range(len(ACTIVITIES))):
        colours[levels < edges[index][None, :]] = to_rgb(ACTIVITY_COLOURS[ACTIVITIES[index]])
    return colours


def utilisation(run: RunData) -> Drawn:
    """Shares of the run time of each node group."""
    roles = [role for role in ("trainer", "rollout", "reward") if run.timeline.share(role)]
    figure, (axes,) = _figure(1, 1.55 if len(roles) < 3 else 1.95)
    for place, role in enumerate(roles):
        shares, left = run.timeline.share(role), 0.0
        for name in ACTIVITIES:
            share = max(0.0, shares.get(name, 0.0))
            axes.barh(place, share, 0.62, left=left, color=ACTIVITY_COLOURS[name])
            if share >= 0.05:
                dark = name in ("forward + backward", "optimizer", "weights", "checkpoint")
                axes.text(left + share / 2, place, f"{share:.0%}", ha="center", va="center", fontsize=8.5,
                          color="white" if dark else INK)  # fmt: skip
            left += share
    axes.set_yticks(range(len(roles)), [f"{role} ranks" for role in roles])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("share of the ranks' run time")
    axes.grid(axis="y", visible=False)
    return Drawn("utilisation", "Use of each node group",
                 "Sums over all ranks of a group and all lives of the run; colours as above.", figure)  # fmt: skip


# ---- helpers ---------------------------------------------------------------------------


def _figure(columns: int, height_in: float, **options: object) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False, **options)[0]
    figure.get_layout_engine().set(w_pad=0.06, wspace=0.03)
    return figure, list(panels)


def _coloured(runs: list[RunData]) -> Iterable[tuple[RunData, str]]:
    return [(run, RUN_COLOURS[index % len(RUN_COLOURS)]) for index, run in enumerate(runs)]


def _label(runs: list[RunData], run: RunData, text: str) -> str | None:
    """Lines of the same kind share one entry of the legend; runs have a legend of their own."""
    return text if run is runs[0] else None


def _restarts(axes: Axes, runs: list[RunData], label: str) -> None:
    """Dotted lines where a single run was started again."""
    if len(runs) != 1 or not label.startswith(("training step", "run time")):
        return
    clock = runs[0].history.clock
    scale = 60.0 if "min" in label else 3600.0
    places = [life.first_step for life in clock.lives[1:]] if label == "training step" else [
        start / scale for start in clock.starts[1:]]  # fmt: skip
    for place in places:
        axes.axvline(place, color=MUTED, lw=0.9, ls=":")


def _by_step(runs: list[RunData], *panels: Axes) -> None:
    """Panels over the training step, each with the legend of its lines, and one of the runs above all."""
    for axes in panels:
        axes.set_xlabel("training step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        if axes.get_legend_handles_labels()[0]:
            legend = axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, borderaxespad=0.2,
                                 handlelength=1.6, columnspacing=1.2)  # fmt: skip
            _neutral(runs, legend.legend_handles)
    figure = panels[0].figure
    if len(runs) > 1:
        figure.set_figheight(figure.get_figheight() + RUN_LEGEND_IN)
    _legend(figure, runs, [], [])


def _legend(figure: Figure, runs: list[RunData], handles: list, texts: list[str]) -> None:
    """Above all panels: the runs, where there are several, then the lines."""
    named = [Line2D([], [], color=colour, lw=3) for _, colour in _coloured(runs)] if len(runs) > 1 else []
    if named or handles:
        legend = figure.legend(named + handles, [run.label for run in runs[: len(named)]] + texts,
                               loc="outside upper left", ncols=6)  # fmt: skip
        _neutral(runs, legend.legend_handles[len(named) :])


def _neutral(runs: list[RunData], handles: list) -> None:
    """A line's kind has no colour where colours are runs."""
    for handle in handles if len(runs) > 1 else []:
        handle.set_color(MUTED)


def _share_axis(axes: Axes) -> None:
    """Shares from 0 on, in percent; where all of them are nearly 0 the axis goes to 1 %."""
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    axes.set_ylim(0, max(0.01, 1.05 * max(_finite(line.get_ydata() for line in axes.lines))))


def _finite(columns: Iterable[Iterable[float]]) -> list[float]:
    """All numbers of the columns; at least one."""
    return [value for column in columns for value in column if math.isfinite(value)] or [0.0]


def _robust_top(axes: Axes, values: list[float], floor: float = 1.6) -> None:
    """Keep one outlier (the first step) from flattening everything else."""
    known = sorted(value for value in values if math.isfinite(value))
    high = known[int(0.9 * (len(known) - 1))] if known else 0.0
    if len(known) >= 5 and 0 < 3 * high < known[-1]:
        axes.set_ylim(0, floor * high)
    else:
        axes.set_ylim(bottom=0)
