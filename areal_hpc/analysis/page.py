"""The report as one HTML page: no script, no network, figures as SVG in the page itself.

Everything that comes from a run (texts of samples, events, names) is escaped here and
nowhere else; the only markup is this module's own.
"""

from __future__ import annotations

import io
import re
import time
from html import escape
from importlib import resources

from areal_hpc.analysis.advice import busy_share
from areal_hpc.analysis.figures import (
    ACTIVITY_COLOURS,
    RUN_COLOURS,
    Drawn,
    curves,
    lengths,
    objective,
    parts,
    speed,
    staleness,
    timeline,
    transfers,
    utilisation,
)
from areal_hpc.analysis.records import number, read_json
from areal_hpc.analysis.run_data import RunData
from areal_hpc.analysis.run_status import inspect
from areal_hpc.analysis.samples import Shown
from areal_hpc.analysis.status_view import duration
from areal_hpc.analysis.timeline import ACTIVITIES
from areal_hpc.launch.drain import read_events

MAX_EVENTS = 40


def render(runs: list[RunData]) -> tuple[str, list[Drawn]]:
    """(HTML, all figures of the page)."""
    drawn: list[Drawn] = []
    body: list[str] = [_head(runs)]
    if len(runs) > 1:
        body.append(_comparison(runs))
    else:
        body += [_tiles(runs[0]), _advice(runs[0])]
    if any(run.history.steps or run.history.evals for run in runs):
        body.append("<h2>Learning</h2>")
        body += _figures(drawn, curves(runs))
        body.append("<h2>Samples and their age</h2>")
        body += _figures(drawn, staleness(runs), lengths(runs), parts(runs))
        body.append("<h2>Training</h2>")
        body += _figures(drawn, objective(runs), speed(runs), transfers(runs))
    else:
        body.append('<p class="note">No training step has been finished yet: there is nothing to draw.</p>')
    for run in runs:
        prefix = f"{run.label}: " if len(runs) > 1 else ""
        body.append(f"<h2>{escape(prefix)}{'where the time went' if prefix else 'Where the time went'}</h2>")
        if len(runs) > 1:
            body.append(_advice(run))
        if run.timeline.ranks and run.history.clock.total_s > 0:
            body += _figures(drawn, timeline(run), utilisation(run), suffix=f"-{runs.index(run) + 1}" if prefix else "")
            body.append(_activities(run))
        body += [_cost(run), _faults(run), _samples(run)]
    return _document(runs, "\n".join(body)), drawn


# ---- parts of the page -----------------------------------------------------------------


def _head(runs: list[RunData]) -> str:
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs compared"
    lines = []
    for run in runs:
        config, status = run.history.config, inspect(run.history.paths.root)
        groups = config.groups
        lines.append(
            f"{escape(run.label) + ': ' if len(runs) > 1 else ''}{status.state} at step "
            f"{max(run.history.steps, default=0)} of {config.run.total_steps}, model "
            f"{escape(config.model.path.rstrip('/').rpartition('/')[2])}, {config.run.mode.value}, "
            f"{groups.trainer.ranks} trainer and {groups.rollout.ranks} rollout ranks, "
            + (f"{groups.reward.ranks} reward ranks, " if groups.reward.ranks else "")
            + f"batch {config.trainer.batch_size}, bound η = {run.history.bound}, seed {config.run.seed}"
        )
    when = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return f"<h1>{escape(title)}</h1>" + "".join(f'<p class="sub">{line}</p>' for line in lines) + (
        f'<p class="sub">Written {when} from the run folder{"s" if len(runs) > 1 else ""} alone.</p>'
    )


def _tiles(run: RunData) -> str:
    evals = list(run.history.evals.values())
    total, clock = run.trained.total, run.history.clock
    tiles = []
    if evals:
        gain = f"{evals[0]['accuracy']:.3f} → {evals[-1]['accuracy']:.3f}" if len(evals) > 1 else (
            f"{evals[-1]['accuracy']:.3f}")  # fmt: skip
        tiles.append((gain, f"held-out accuracy ({number(evals[-1], 'num_prompts'):.0f} prompts)"))
    tiles += [
        (f"{len(run.history.steps)}", f"training steps of {run.history.config.run.total_steps}"),
        (f"{total.num_answer_tokens:,}", f"answer tokens trained, in {total.num_samples:,} samples"),
        (duration(clock.total_s), "run time" + (f" in {len(clock.lives)} starts" if len(clock.lives) > 1 else "")),
        (f"{run.cost.unit_hours:.3g}", run.cost.unit),
        (f"{max(total.staleness, default=0)} of {run.history.bound}", "largest staleness, and the bound"),
        (f"{busy_share(run.timeline, 'trainer'):.0%} / {busy_share(run.timeline, 'rollout'):.0%}",
         "of their time trainers trained / engines generated"),
        (run.slower or "neither", "is the slower side"),
    ]  # fmt: skip
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(text)}</span></div>' for value, text in tiles
    ) + "</div>"


def _advice(run: RunData) -> str:
    return f'<div class="advice"><p>{escape(run.advice)}</p></div>'


def _comparison(runs: list[RunData]) -> str:
    """One column a run, one row a figure."""
    header = [_swatch(RUN_COLOURS[index % len(RUN_COLOURS)]) + escape(run.label) for index, run in enumerate(runs)]
    rows: dict[str, list[str]] = {}
    for run in runs:
        evals, total = list(run.history.evals.values()), run.trained.total
        for name, value in (
            ("training steps", str(len(run.history.steps))),
            ("held-out accuracy", f"{evals[0]['accuracy']:.3f} → {evals[-1]['accuracy']:.3f}" if evals else "–"),
            ("reward of the last step", f"{run.column('reward_mean')[-1]:.3f}" if run.history.steps else "–"),
            ("trained samples", f"{total.num_samples:,}"),
            ("trained answer tokens", f"{total.num_answer_tokens:,}"),
            ("run time", duration(run.history.clock.total_s)),
            ("cost", f"{run.cost.unit_hours:.3g} {run.cost.unit}"),
            ("largest staleness, bound", f"{max(total.staleness, default=0)}, {run.history.bound}"),
            ("trainers busy", f"{busy_share(run.timeline, 'trainer'):.0%}"),
            ("engines busy", f"{busy_share(run.timeline, 'rollout'):.0%}"),
            ("slower side", run.slower or "neither"),
        ):
            rows.setdefault(name, []).append(escape(value))
    return _table(["", *header], [[escape(name), *values] for name, values in rows.items()])


def _activities(run: RunData) -> str:
    """Seconds of each activity by role, and what idleness waited for."""
    roles = [role for role in ("trainer", "rollout", "reward") if run.timeline.of(role)]
    totals = {role: sum(rank.run_s for rank in run.timeline.of(role)) or 1.0 for role in roles}
    seconds = {role: run.timeline.seconds(role) for role in roles}
    rows = [
        [_swatch(ACTIVITY_COLOURS[name]) + escape(name),
         *(text for role in roles for text in _seconds(seconds[role][name], totals[role]))]
        for name in ACTIVITIES if any(seconds[role][name] > 0 for role in roles)
    ]  # fmt: skip
    for role in roles:
        for why, value in sorted(run.timeline.waits(role).items(), key=lambda item: -item[1]):
            cells = [cell for other in roles for cell in _seconds(value if other == role else 0.0, totals[other])]
            rows.append([f'<span class="inner">idle {escape(why)}</span>', *cells])
    names = [text for role in roles for text in (f"{role} ranks, rank-seconds" if role == "reward" else
                                                 f"{role}s, rank-seconds", "share")]  # fmt: skip
    note, read = "", len(run.timeline.ranks)
    if read < sum(run.timeline.num_ranks.values()):
        note = (f'<p class="note">From {read} of {sum(run.timeline.num_ranks.values())} ranks, of each role its '
                "share.</p>")  # fmt: skip
    if any(rank.gauge_s for rank in run.timeline.of("rollout")):
        mean = sum(rank.running_s for rank in run.timeline.of("rollout")) / sum(
            rank.gauge_s for rank in run.timeline.of("rollout"))  # fmt: skip
        note += (f'<p class="note">While it generated, an engine ran {mean:,.0f} sequences at once '
                f"(rollout.max_num_seqs = {run.history.config.rollout.max_num_seqs}). At most "
                f"{run.timeline.reward_queue:,} checks waited for a reward worker.</p>")  # fmt: skip
    return _table(["activity", *names], rows) + note


def _seconds(value: float, total: float) -> tuple[str, str]:
    return (f"{value:,.1f}", f"{value / total:.1%}") if value > 0 else ("", "")


def _cost(run: RunData) -> str:
    cost, total = run.cost, run.trained.total
    millions = total.num_answer_tokens / 1e6
    rows = [
        ["node-hours", f"{cost.node_hours:.4g}", f"{cost.node_hours / millions:.4g}" if millions else "–"],
        ["core-hours", f"{cost.core_hours:.4g}", f"{cost.core_hours / millions:.4g}" if millions else "–"],
    ]
    if cost.gpus:
        rows.insert(1, ["GPU-hours", f"{cost.gpu_hours:.4g}", f"{cost.gpu_hours / millions:.4g}" if millions else "–"])
    notes = [f"By {cost.source}: {cost.nodes} node{'s' if cost.nodes != 1 else ''}, "
             + (f"{cost.gpus} GPUs, " if cost.gpus else "") + f"{cost.cores} cores."]  # fmt: skip
    wasted = run.trained.num_answer_tokens_committed - total.num_answer_tokens
    if wasted > 0:
        notes.append(f"{wasted:,} answer tokens in the spool were not trained ({run.trained.num_discarded} groups "
                     "discarded; the rest waits).")  # fmt: skip
    if run.history.replaced:
        notes.append(f"{len(run.history.replaced)} steps were trained again after restarts: "
                     f"{duration(run.replaced_s)} lost.")  # fmt: skip
    return ("<h3>What it cost</h3>" + _table(["", "total", "per million trained answer tokens"], rows)
            + f'<p class="note">{escape(" ".join(notes))}</p>')  # fmt: skip


def _faults(run: RunData) -> str:
    """Restarts, stops and troubles in order of time."""
    begin = run.history.lives[0].begin if run.history.lives else 0.0
    entries = [(number(event, "time"), str(event.get("text", ""))) for event in run.history.events]
    for event in read_events(run.history.paths):
        values = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("time", "event", "nodes"))
        text = f"supervisor: {event.get('event')}" + (f" ({values})" if values else "")
        entries.append((number(event, "time"), text))
    entries += _starts(run)
    entries.sort()
    counters = read_json(run.history.paths.status).get("counters") or {}
    rows = [[name.replace("_", " "), f"{value:,.0f}"] for name, value in counters.items()
            if value and name != "trajectories"]  # fmt: skip
    if run.trained.damaged_at >= 0:
        rows.append(["journal damaged at byte", f"{run.trained.damaged_at:,}"])
    if run.samples.unreadable:
        rows.append(["unreadable shards of those that were sampled", str(run.samples.unreadable)])
    text = "<h3>Faults and restarts</h3>"
    if not entries and not rows:
        return text + '<p class="note">None.</p>'
    if entries:
        shown = entries if len(entries) <= MAX_EVENTS else entries[: MAX_EVENTS // 2] + entries[-MAX_EVENTS // 2 :]
        text += _table(["after", "what happened"], [[duration(at - begin) if begin else "", escape(what)]
                                                    for at, what in shown], numeric=False)  # fmt: skip
        if len(entries) > len(shown):
            text += f'<p class="note">{len(entries) - len(shown)} more in between.</p>'
    return text + (_table(["counted", "times"], [[escape(name), value] for name, value in rows]) if rows else "")


def _starts(run: RunData) -> list[tuple[float, str]]:
    """(time, what) of every start after the first."""
    lives = run.history.lives
    return [
        (after.begin, f"started again from step {after.first_step}, {duration(after.begin - before.end)} after the "
                      "last sign of life")
        for before, after in zip(lives, lives[1:])
    ]  # fmt: skip


def _samples(run: RunData) -> str:
    found = run.samples
    if not found.best:
        return ""
    note = f"From {found.num_read:,} trained samples of {found.num_shards_read} of {found.num_shards} shards."
    if not found.decoded:
        note += " No tokenizer was found: texts are token ids."
    columns = "".join(
        f"<div><h3>{title}</h3>{''.join(map(_sample, shown)) or '<p class=note>All rewards are equal.</p>'}</div>"
        for title, shown in (("Best", found.best), ("Worst", found.worst))
    )
    return (f'<h3>Best and worst samples</h3><p class="note">{note} Grey: given to the policy; white: its own.</p>'
            f'<div class="samples">{columns}</div>')  # fmt: skip


def _sample(shown: Shown) -> str:
    low, high = shown.versions
    head = [f"<b>reward {shown.reward:g}</b>", f"step {shown.step}", f"{shown.num_tokens} tokens",
            f"versions {low}–{high}" if high > low else f"version {low}", escape(shown.finish_reason)]  # fmt: skip
    if len(shown.parts) > 1:
        head += [escape(f"{name} {value:g}") for name, value in shown.parts.items()]
    texts = "".join(f'<pre class="{stretch.origin}">{escape(stretch.text)}</pre>' for stretch in shown.stretches)
    spans = "".join(f"<span>{part}</span>" for part in head)
    return f'<div class="sample"><div class="head">{spans}</div>{texts}</div>'


# ---- markup ----------------------------------------------------------------------------


def _figures(drawn: list[Drawn], *figures: Drawn | None, suffix: str = "") -> list[str]:
    texts = []
    for item in filter(None, figures):
        item = Drawn(item.name + suffix, item.title, item.caption, item.figure)
        drawn.append(item)
        texts.append(
            f'<figure id="{item.name}"><h3>{escape(item.title)}</h3><figcaption>{escape(item.caption)}</figcaption>'
            f"{to_svg(item)}</figure>"
        )
    return texts


def to_svg(item: Drawn) -> str:
    """The figure as an element of a page; its ids are its own, so that several can stand in one."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": item.name}):
        item.figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{item.name}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{item.name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{item.name}-\1)", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(item.title)}"', 1)


def _table(header: list[str], rows: list[list[str]], *, numeric: bool = True) -> str:
    """Cells are markup already; all columns but the first are figures."""
    def cells(tag: str, row: list[str]) -> str:
        kinds = [" class=n" if numeric and index else "" for index in range(len(row))]
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    return (f"<table><thead><tr>{cells('th', header)}</tr></thead><tbody>"
            + "".join(f"<tr>{cells('td', row)}</tr>" for row in rows) + "</tbody></table>")  # fmt: skip


def _swatch(colour: str) -> str:
    return f'<span class="swatch" style="background:{colour}"></span>'


def _document(runs: list[RunData], body: str) -> str:
    style = resources.files("areal_hpc.analysis").joinpath("page.css").read_text(encoding="utf-8")
    title = escape(", ".join(run.label for run in runs))
    folders = "".join(f"<li><code>{escape(str(run.history.paths.root.resolve()))}</code></li>" for run in runs)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>\n{style}</style></head>\n<body>\n{body}\n"
        f'<footer class="note"><p>Run folders:</p><ul>{folders}</ul></footer></body></html>\n'
    )
