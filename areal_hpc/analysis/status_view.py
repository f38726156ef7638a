"""`areal-hpc status RUN [--watch] [--json]`: prints what `run_status` found."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from areal_hpc.analysis.run_status import ENDED, RunStatus, inspect

if TYPE_CHECKING:
    from rich.console import RenderableType

EXAMPLES = """examples:
  areal-hpc status runs/quickstart
  areal-hpc status runs/quickstart --watch
  areal-hpc status runs/quickstart --json | python -m json.tool

Everything comes from the run folder: it works on a login node, for a run of any state.
Exit code: 0; 1 if the run has failed or a rank is silent; 2 if RUN is no run folder.
"""
WATCH_INTERVAL_S = 2.0
MAX_RANKS = 16
"""Ranks listed one by one; of more, the silent ones and the first."""
COLOURS = {"running": "green", "finished": "green", "failed": "bold red", "silent": "bold red"}


def main(argv: list[str]) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="areal-hpc status", description="How a run is: progress, speed, staleness, signs of life of its ranks.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--watch", action="store_true", help="look again every two seconds until the run has ended")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    if arguments.watch:
        return _watch(arguments.run, as_json=arguments.json)
    found = inspect(arguments.run)
    print(json.dumps(found.as_json()) if arguments.json else render(found))
    return found.exit_code


def _watch(run: str, *, as_json: bool) -> int:
    """On a terminal one picture that changes, elsewhere one text (or line of JSON) after the other."""
    if as_json or not sys.stdout.isatty():
        while True:
            found = inspect(run)
            print(json.dumps(found.as_json()) if as_json else render(found) + "\n", flush=True)
            if found.state in ENDED:
                return found.exit_code
            time.sleep(WATCH_INTERVAL_S)
    from rich.live import Live

    found = inspect(run)
    with Live(_picture(found), refresh_per_second=4) as live:
        while found.state not in ENDED:
            time.sleep(WATCH_INTERVAL_S)
            found = inspect(run)
            live.update(_picture(found))
    return found.exit_code


def _picture(found: RunStatus) -> RenderableType:
    """The same lines in a frame, the state in colour, with a bar for the steps."""
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    colour = COLOURS.get(found.state, "yellow")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("", ProgressBar(total=max(1, found.total_steps), completed=found.train_step, width=60))
    for label, text in describe(found):
        alarming = label == "error" or "silent" in text
        grid.add_row(label, Text(text, style="bold red" if alarming else ""))
    return Panel(grid, title=f"{found.name}: {found.state}", border_style=colour, title_align="left")


def render(found: RunStatus) -> str:
    """All of it as aligned lines."""
    return "\n".join(f"{label:<11}{text}" for label, text in describe(found))


def describe(found: RunStatus) -> list[tuple[str, str]]:
    """(label, text) line by line; what is not known is left out."""
    lines = [("state", _state(found))]
    lines += [("step", f"{found.train_step} of {found.total_steps}; version {found.version} trained, "
                       f"{found.live_version} serves")]  # fmt: skip
    if found.reward is not None and found.accuracy is not None:
        lines.append(("reward", f"{found.reward:.3f} in the last step, {found.accuracy:.1%} of its answers right"))
    if found.heldout_accuracy is not None and found.heldout_accuracy_first is not None:
        lines.append(("held-out", f"accuracy {found.heldout_accuracy_first:.3f} -> {found.heldout_accuracy:.3f}"))
    lines.append(("speed", _speed(found)))
    if found.staleness_mean is not None:
        lines.append(("staleness", f"mean {found.staleness_mean:.2f}, max {found.staleness_max:.0f} versions; "
                                   f"bound {found.staleness_bound}"))  # fmt: skip
    if found.state not in ENDED and found.places:
        lines.append(("queue", f"{found.ready_groups} groups ready ({found.groups_per_batch} make a batch), "
                               f"{found.groups_under_way} under way; {found.places_taken} of {found.places} places "
                               "taken"))  # fmt: skip
    if found.state not in ENDED and found.waiting_for:
        lines.append(("waits for", found.waiting_for))
    if found.bottleneck and found.state not in ENDED:
        lines.append(("slower", found.bottleneck))
    if found.left_s is not None and found.state != "queued":
        lines.append(("end", _end(found)))
    if found.allocation_left_s is not None and found.state not in ENDED:
        left = found.allocation_left_s
        lines.append(("allocation", f"{duration(left)} left" if left > 0 else f"over for {duration(-left)}"))
    troubles = {name: value for name, value in found.counters.items() if value and name != "trajectories"}
    if troubles:
        counted = [f"{value:.0f} {name.replace('_', ' ')}" for name, value in troubles.items()]
        lines.append(("counted", ", ".join(counted)))
    lines += _ranks(found)
    return lines + [("error" if not index else "", error) for index, error in enumerate(found.errors)]


def _state(found: RunStatus) -> str:
    text = found.state + (f" ({found.reason})" if found.reason else "")
    if found.job:
        text += f", job {found.job}"
    if found.restarts:
        text += f", restarted {found.restarts} time{'s' if found.restarts > 1 else ''}"
    if found.age_s is not None:
        text += f", reported {duration(found.age_s)} ago"
    if found.silent_ranks:
        text += f"; silent: {', '.join(rank.name for rank in found.silent_ranks[:8])}"
    return text


def _speed(found: RunStatus) -> str:
    parts = []
    if found.generated_tokens_s is not None and found.state not in ENDED:
        parts.append(f"generation {found.generated_tokens_s:,.0f} tokens/s")
    if found.trained_tokens_s is not None:
        parts.append(f"training {found.trained_tokens_s:,.0f} tokens/s")
    if found.step_s is not None:
        parts.append(f"a step every {found.step_s:.1f} s")
    return ", ".join(parts) or "no step yet"


def _end(found: RunStatus) -> str:
    if found.left_s is None:
        return ""
    if found.train_step >= found.total_steps:
        return "all steps are done"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + found.left_s))
    text = f"in about {duration(found.left_s)}, at {when}"
    if found.allocation_left_s is not None and found.left_s > found.allocation_left_s > 0:
        text += "; not within this allocation"
    return text


def _ranks(found: RunStatus) -> list[tuple[str, str]]:
    """Each rank's last sign of life; of many ranks only those that say something."""
    shown = [rank for rank in found.ranks if rank.silent]
    shown += [rank for rank in found.ranks if not rank.silent][: max(0, MAX_RANKS - len(shown))]
    shown.sort(key=found.ranks.index)
    width = max((len(rank.name) for rank in shown), default=0)
    lines = []
    for index, rank in enumerate(shown):
        age = "has not reported" if rank.age_s is None else f"{duration(rank.age_s)} ago"
        text = f"{rank.name:<{width}}  {rank.host:<8}  {age}"
        if rank.silent:
            text = f"{rank.name:<{width}}  {rank.host:<8}  silent for {duration(rank.age_s or 0.0)}"
        lines.append(("" if index else "ranks", text + (f"  after {rank.doing}" if rank.doing else "")))
    hidden = len(found.ranks) - len(shown)
    return lines + ([("", f"and {hidden} more, of which none is silent")] if hidden else [])


def duration(seconds: float) -> str:
    """`42 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`."""
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    for unit, smaller, size, part in (("min", "s", 60, 1), ("h", "min", 3600, 60), ("d", "h", 86400, 3600)):
        if seconds < size * {"min": 60, "h": 24, "d": 1e9}[unit]:
            whole, rest = divmod(seconds, size)
            return f"{whole:.0f} {unit}" + (f" {rest // part:.0f} {smaller}" if rest >= part else "")
    raise AssertionError(seconds)
