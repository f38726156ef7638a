"""What telemetry takes of a run: the CPU time of a line times the lines of a run, over its time.

    python tools/bench_telemetry.py [--quick] [--json FILE] [--run FOLDER]

Writes many lines like those of a run and takes the CPU time of each, files and flushes
included; then counts the lines of every rank in a run's telemetry (of FOLDER, else of a short
real run that is made here). Keys: telemetry_share, the largest share of any rank; span_us, CPU
microseconds a line; lines_per_s and bytes_per_s of the busiest rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from areal_hpc.paths import RunPaths
from areal_hpc.telemetry import Telemetry
from bench_runs import make_model, run_system

LINES = 20_000


def cost_of_a_line(rounds: int) -> float:
    """CPU seconds of one line, the fastest of the rounds: half spans, half gauges, flushed once a second."""
    fastest = float("inf")
    with tempfile.TemporaryDirectory(prefix="bench-telemetry-") as name:
        for number in range(rounds):
            telemetry = Telemetry(Path(name) / f"{number}.jsonl", attempt=1)
            begin = time.process_time()
            for group in range(LINES // 2):
                with telemetry.span("rollout.episode", group=group, attempt=1) as span:
                    span["tokens"], span["versions"] = 1234, 2
                telemetry.value("rollout.running", 57, waiting=12)
            telemetry.close()
            fastest = min(fastest, (time.process_time() - begin) / LINES)
    return fastest


def share_of_run(paths: RunPaths, line_s: float) -> dict[str, float]:
    """The figures of the rank with the most lines per second of its telemetry."""
    busiest = {"lines_per_s": 0.0, "bytes_per_s": 0.0}
    for file in sorted(paths.telemetry.glob("*.jsonl")):
        lines = file.read_bytes().splitlines()
        times = [event["t"] + event.get("d", 0.0) for event in map(json.loads, lines)]
        seconds = max(times) - min(times)
        print(f"{file.stem}: {len(lines):,} lines, {file.stat().st_size / 1e3:,.0f} kB in {seconds:.0f} s")
        if len(lines) / seconds > busiest["lines_per_s"]:
            busiest = {"lines_per_s": len(lines) / seconds, "bytes_per_s": file.stat().st_size / seconds}
    assert busiest["lines_per_s"], "the run recorded nothing"
    return {"telemetry_share": busiest["lines_per_s"] * line_s, "span_us": 1e6 * line_s, **busiest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, a shorter run")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--run", type=Path, help="a run to count the lines of")
    arguments = parser.parse_args()
    line_s = cost_of_a_line(3 if arguments.quick else 10)
    with tempfile.TemporaryDirectory(prefix="bench-telemetry-") as name:
        folder = arguments.run
        if folder is None:
            folder, model = Path(name) / "run", Path(name) / "model"
            make_model(model)
            # Short answers: as many groups, shards and steps a second as this machine can make.
            run_system(folder, model, [
                "rollout.workflow_options={mean: 20, sigma: 0.5}", "trainer.batch_size=64", "rollout.group_size=8",
                f"run.total_steps={10 if arguments.quick else 40}",
            ])  # fmt: skip
        figures = share_of_run(RunPaths(folder), line_s)
    for name, value in figures.items():
        print(f"{name}: {value:.6f}" if name == "telemetry_share" else f"{name}: {value:.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
