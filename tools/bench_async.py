"""The real system, asynchronous against synchronous, and the plan's prediction against both.

    python tools/bench_async.py [--quick] [--json FILE] [--keep FOLDER] [--overrides key=value ...]

Both modes run the same configuration on the same cores and train the same number of samples:
a random model of the quickstart's size, answers of log-normal length (mean 100 tokens, the
longest about ten times as long), the lengths drawn from the same seed (tools/bench_workflow.py).
run.mode is all that differs; eta is 8, as in the paper's mathematical runs. Speed is answer
tokens trained per second of wall time from the end of the second step to the end of the last:
without the start, with the end, where nothing new is asked any more.

Keys: async_over_sync; async_tokens_per_s and sync_tokens_per_s; plan_error, the larger of the
two modes' relative errors of the plan's simulator, calibrated from each run (areal-hpc plan
--from), against what the run measured; cross_error, the same for the asynchronous speed
predicted from the synchronous run alone; other_cores, cores that other programs took while the
runs were measured (above 0 the figures are those of a shared machine).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import time
from pathlib import Path

import psutil

from areal_hpc.config.load import read_config
from areal_hpc.config.schema import Mode
from areal_hpc.paths import RunPaths
from areal_hpc.plan.calibrate import Calibration, calibrate
from bench_runs import make_model, run_system

BATCH = 64
MAX_OTHER_CORES = 0.2
"""More than this in the hands of other programs makes the ratio one of two machines."""
SETTINGS = [
    "rollout.workflow_options={mean: 100, sigma: 1.0}", "rollout.max_new_tokens=1024", "model.max_context=1100",
    "rollout.group_size=8", f"rollout.max_num_seqs={BATCH}", f"trainer.batch_size={BATCH}", "trainer.tp=1",
    "groups.trainer.ranks_per_node=1", "algorithm.minibatches=1", "algorithm.max_staleness=8",
]  # fmt: skip


class OtherPrograms:
    """Cores that programs outside this process's tree take, sampled while a run goes on."""

    def __init__(self, interval_s: float = 2.0) -> None:
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._samples: list[float] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> OtherPrograms:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def cores(self) -> float:
        return sum(self._samples) / len(self._samples) if self._samples else 0.0

    def _watch(self) -> None:
        own, before = psutil.Process(), None
        while not self._ended.wait(self._interval_s):
            total = psutil.cpu_times()
            used = sum(total) - total.idle - total.iowait
            mine: dict[int, float] = {}
            for process in (own, *own.children(recursive=True)):
                try:
                    mine[process.pid] = sum(process.cpu_times()[:2])
                except psutil.Error:
                    continue
            now = time.monotonic()
            if before is not None:
                grown = sum(seconds - before[2].get(pid, 0.0) for pid, seconds in mine.items())
                self._samples.append(max(0.0, used - before[1] - grown) / (now - before[0]))
            before = (now, used, mine)


def measure(folder: Path, model: Path, mode: str, steps: int, overrides: list[str]) -> tuple[Calibration, float]:
    """Run one mode; what it measured and the cores that others took meanwhile."""
    with OtherPrograms() as others:
        run_system(folder, model, [*SETTINGS, f"run.mode={mode}", f"run.total_steps={steps}", *overrides])
    found = calibrate(folder)
    print(
        f"{mode:>5}: {found.tokens_per_s:,.0f} answer tokens/s trained, predicted "
        f"{found.predict().tokens_per_s:,.0f}; other programs took {others.cores:.1f} cores",
        flush=True,
    )
    return found, others.cores


def trained_samples(folder: Path) -> int:
    records = map(json.loads, RunPaths(folder).metrics.read_text().splitlines())
    return sum(record["num_trajectories"] for record in records if record["kind"] == "step")


def error(predicted: float, measured: float) -> float:
    return abs(predicted / measured - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--keep", type=Path, help="leave the runs in this folder, which must not exist")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="key=value", help="for both modes")
    arguments = parser.parse_args()
    steps = 10 if arguments.quick else 24
    root = arguments.keep or Path(tempfile.mkdtemp(prefix="bench-async-"))
    try:
        make_model(root / "model")
        runs = {
            mode: measure(root / mode, root / "model", mode, steps, arguments.overrides) for mode in ("sync", "async")
        }
        samples = {trained_samples(root / mode) for mode in runs}
        assert samples == {steps * BATCH}, f"the modes trained {samples} samples"
        sync, asynchronous = runs["sync"][0], runs["async"][0]
        config = read_config(RunPaths(root / "async").config)
        assert config.run.mode is Mode("async") and sync.config.run.mode is Mode("sync")
        figures = {
            "async_over_sync": asynchronous.tokens_per_s / sync.tokens_per_s,
            "async_tokens_per_s": asynchronous.tokens_per_s,
            "sync_tokens_per_s": sync.tokens_per_s,
            "plan_error": max(
                error(found.predict().tokens_per_s, found.tokens_per_s) for found in (sync, asynchronous)
            ),
            "cross_error": error(sync.predict(config).tokens_per_s, asynchronous.tokens_per_s),
            "samples": float(steps * BATCH),
            "other_cores": max(cores for _, cores in runs.values()),
        }
    finally:
        if not arguments.keep:
            shutil.rmtree(root, ignore_errors=True)
    for name, value in figures.items():
        print(f"{name}: {value:.2f}")
    if figures["other_cores"] > MAX_OTHER_CORES:
        print(f"warning: other programs took {figures['other_cores']:.1f} cores: the modes did not meet the same machine")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
