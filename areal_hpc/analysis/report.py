"""`areal-hpc report RUN [RUN ...]`: one HTML file about one or several runs; figures and figures' numbers beside it."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.analysis.records import number
from areal_hpc.config.errors import ConfigError

if TYPE_CHECKING:
    from areal_hpc.analysis.figures import Drawn
    from areal_hpc.analysis.run_data import RunData

EXAMPLES = """examples:
  areal-hpc report runs/quickstart -o report.html
  areal-hpc report runs/seed0 runs/seed1 -o seeds.html --csv seeds.csv
  areal-hpc report runs/quickstart -o report.html --png figures/

The file needs no network and no script. A run may still run, or have been killed: the
report holds what there is. Of a large spool a sample is read; sums over all samples come
from the journal.
"""
PNG_DPI = 160
STEP_COLUMNS = {
    "reward_mean": "reward_mean", "accuracy": "accuracy", "staleness_mean": "staleness_mean",
    "staleness_max": "staleness_max", "step_seconds": "step_seconds", "wait_s": "wait_s",
    "gen_tokens_per_s": "generated_tokens_per_s", "trainer/num_tokens": "num_tokens",
    "trainer/importance_weight_mean": "importance_weight_mean",
    "trainer/importance_weight_max": "importance_weight_max", "trainer/clip_fraction": "clip_fraction",
    "trainer/behave_gap_fresh_max": "behaviour_gap_max", "trainer/loss": "loss", "trainer/grad_norm": "grad_norm",
}  # fmt: skip
"""Fields of a step record -> columns of the CSV file."""


def main(argv: list[str]) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="areal-hpc report", description="Write one HTML file about one run, or several laid over each other.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("-o", "--output", metavar="FILE", default="report.html", help="default: report.html")
    parser.add_argument("--png", metavar="DIR", help="also write each figure as a PNG file")
    parser.add_argument("--csv", metavar="FILE", help="also write one row a training step")
    arguments = parser.parse_args(argv)
    for folder in arguments.runs:
        if not (Path(folder) / "config.yaml").is_file():
            raise ConfigError(f"RUN={folder} holds no config.yaml: give the folder of a run")
    output = Path(arguments.output)
    if not output.resolve().parent.is_dir():
        raise ConfigError(f"-o {output}: the folder {output.resolve().parent} does not exist")
    try:
        from areal_hpc.analysis.page import render
    except ModuleNotFoundError as error:
        raise ConfigError(f"a report is drawn with {error.name}, which is not installed here: install it") from None
    from areal_hpc.analysis.run_data import load_run, unique_labels

    labels = [""] if len(arguments.runs) == 1 else unique_labels(arguments.runs)
    runs = [load_run(folder, label) for folder, label in zip(arguments.runs, labels, strict=True)]
    page, drawn = render(runs)
    try:
        output.write_text(page, encoding="utf-8")
        written = [str(output)]
        if arguments.png:
            written += write_png(drawn, Path(arguments.png))
        if arguments.csv:
            write_csv(runs, Path(arguments.csv))
            written.append(arguments.csv)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
    print(f"wrote {written[0]} ({output.stat().st_size / 1024:.0f} KiB)"
          + "".join(f"\nwrote {name}" for name in written[1:]))  # fmt: skip
    return 0


def write_png(drawn: list[Drawn], folder: Path) -> list[str]:
    """Every figure under its own name; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for item in drawn:
        files.append(str(folder / f"{item.name}.png"))
        item.figure.savefig(files[-1], dpi=PNG_DPI)
    return files


def write_csv(runs: list[RunData], path: Path) -> None:
    """One row a surviving training step of each run; `-` is the standard output."""
    with sys.stdout if str(path) == "-" else open(path, "w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([
            "run", "train_step", "attempt", "time", "run_hours", f"{runs[0].cost.unit.replace('-', '_')}",
            "num_samples", "num_answer_tokens", "num_truncated", "longest_answer", "heldout_accuracy",
            *STEP_COLUMNS.values(),
        ])  # fmt: skip
        for run in runs:
            hours = run.run_hours(run.history.steps)
            for (step, record), sums, at in zip(run.history.steps.items(), run.sums(), hours, strict=True):
                evaluation = run.history.evals.get(step, {})
                writer.writerow([
                    run.label, step, record.get("attempt", 1), record.get("time", ""), f"{at:.6f}",
                    f"{at * run.cost.width:.6f}", sums.num_samples, sums.num_answer_tokens, sums.num_truncated,
                    sums.longest, evaluation.get("accuracy", ""),
                    *(repr(number(record, name)) if name in record else "" for name in STEP_COLUMNS),
                ])  # fmt: skip
