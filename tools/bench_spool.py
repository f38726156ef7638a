"""Shards against raw bytes: how much of the disk's own speed the spool gives.

    python tools/bench_spool.py [--quick] [--json FILE] [--folder FOLDER]

write: ShardWriter.commit, from trajectories to a whole file under its final name, over the
same number of bytes written, synced, renamed and the folder synced. read: read_rows of a whole
shard, to trajectories, over one read of the same file; both after the page cache forgot it
(the shard was written by another node). Both in turns, the fastest round of each (other work
on the machine only adds), for shards of 1 MB and more; the figures in JSON are the lowest over
the sizes. `--folder` should lie on the filesystem
that runs are on.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from areal_hpc.durable import write_durably
from areal_hpc.spool.shard import ShardWriter, read_rows
from areal_hpc.types import PROMPT_VERSION, Trajectory

MEGABYTE = 1_000_000
TOKEN_BYTES = 13
GROUP_SIZE = 8


def make_trajectories(num_bytes: int, seed: int = 0) -> list[Trajectory]:
    """Groups of long-tailed answers (median 800 tokens) that fill about `num_bytes`."""
    generator = np.random.default_rng(seed)
    trajectories: list[Trajectory] = []
    missing = num_bytes // TOKEN_BYTES
    while missing > 0:
        prompt, answer = 100, int(min(generator.lognormal(np.log(800), 0.8), missing + 50))
        total = prompt + answer
        mask = np.r_[np.zeros(prompt, np.uint8), np.ones(answer, np.uint8)]
        trajectories.append(
            Trajectory(
                tokens=generator.integers(0, 150_000, total, dtype=np.int32),
                loss_mask=mask,
                rollout_logprobs=-generator.random(total, dtype=np.float32),
                versions=np.where(mask, 7, PROMPT_VERSION).astype(np.int32),
                reward=1.0,
                prompt_id=len(trajectories) // GROUP_SIZE,
                group_id=len(trajectories) // GROUP_SIZE,
                sample_index=len(trajectories) % GROUP_SIZE,
                finish_reason="stop",
                reward_parts={"math": 1.0},
            )
        )
        missing -= total
    return trajectories


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def measure(folder: Path, num_bytes: int, rounds: int) -> dict[str, float]:
    """Seconds of both ways of writing and reading, taken in turns: the fastest of the rounds."""
    trajectories = make_trajectories(num_bytes)
    writer = ShardWriter(folder / "shards", "bench", 0)
    shard = writer.commit(trajectories).path
    data = shard.read_bytes()
    raw = folder / "raw"
    seconds: dict[str, list[float]] = {"write": [], "raw_write": [], "read": [], "raw_read": []}
    for number in range(rounds):
        target = folder / f"raw-{number}"
        seconds["raw_write"].append(timed(lambda target=target: write_durably(target, data)))
        seconds["write"].append(timed(lambda: writer.commit(trajectories)))
        target.rename(raw)
        for name, path, read in (("raw_read", raw, raw.read_bytes), ("read", shard, lambda: read_rows(shard))):
            forget(path)
            seconds[name].append(timed(read))
    for path in (folder / "shards").iterdir():
        path.unlink()
    return {name: min(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write (default: here); made if new")
    arguments = parser.parse_args()
    rounds = 9 if arguments.quick else 41
    try:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--folder {arguments.folder}: {error.strerror}")
    ratios: dict[str, list[float]] = {"write_over_raw": [], "read_over_raw": []}
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix=".bench-spool-") as name:
        for megabytes in (1, 4, 16):
            found = measure(Path(name), megabytes * MEGABYTE, rounds)
            ratios["write_over_raw"].append(found["raw_write"] / found["write"])
            ratios["read_over_raw"].append(found["raw_read"] / found["read"])
            print(
                f"{megabytes:>3} MB: write {1e3 * found['write']:.2f} ms (raw {1e3 * found['raw_write']:.2f}), "
                f"read {1e3 * found['read']:.2f} ms (raw {1e3 * found['raw_read']:.2f}); "
                f"over raw {ratios['write_over_raw'][-1]:.2f} and {ratios['read_over_raw'][-1]:.2f}",
                flush=True,
            )
    figures = {name: min(values) for name, values in ratios.items()}
    for name, value in figures.items():
        print(f"{name}: {value:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
