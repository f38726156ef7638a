"""Time and memory of `areal-hpc spool` on a large spool, each command in a process of its own.

    python tools/bench_spool_commands.py [--quick] [--json FILE] [--folder FOLDER] [--trajectories 100000]

Makes the spool with tools/make_spool.py and removes it. Keys: trajectories, spool_mb, and for
each command its wall seconds, CPU seconds and peak memory (resident, MB; the system's own
figures for the finished child).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOOLS = Path(__file__).parent


def run(command: list[str]) -> tuple[float, float, float]:
    """(wall seconds, CPU seconds, peak resident MB) of a command; ends the program if it fails."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, status, usage = os.wait4(process.pid, 0)
    assert process.stderr is not None
    if code := os.waitstatus_to_exitcode(status):
        sys.exit(f"exit code {code}: {' '.join(command)}: {process.stderr.read().decode(errors='replace')[-500:]}")
    return time.perf_counter() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def commands(root: Path) -> dict[str, list[str]]:
    own = [sys.executable, "-m", "areal_hpc.cli", "spool"]
    tokenizer = ["--tokenizer", str(root / "tokenizer")]
    return {
        "ls": [*own, "ls", str(root)],
        "ls_json": [*own, "ls", str(root), "--json"],
        "ls_rows_filtered": [*own, "ls", str(root), "--rows", "--reward", ">=0.5", "--version", "3..7"],
        "ls_rows_all": [*own, "ls", str(root), "--rows", "--limit", "0"],
        "show": [*own, "show", str(root), "9000.3", *tokenizer],
        "verify": [*own, "verify", str(root)],
        "export_parquet": [*own, "export", str(root), "-o", str(root / "all.parquet")],
        "export_parquet_table": [*own, "export", str(root), "-o", str(root / "table.parquet"), "--no-tokens"],
        "export_jsonl_filtered": [*own, "export", str(root), "-o", str(root / "some.jsonl"), "--length", "..50",
                                  "--text", *tokenizer],
        "audit": [*own, "audit", str(root)],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the trajectories")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to make the spool (default: here)")
    parser.add_argument("--trajectories", type=int, default=100_000)
    arguments = parser.parse_args()
    count = arguments.trajectories // (10 if arguments.quick else 1)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix=".bench-spool-commands-") as name:
        root = Path(name) / "run"
        seconds, cpu, peak = run([sys.executable, str(TOOLS / "make_spool.py"), str(root), "--trajectories", str(count)])
        num_bytes = sum(path.stat().st_size for path in (root / "spool").glob("*/*.h5"))
        print(f"{count:,} trajectories, {num_bytes / 1e6:,.0f} MB made in {seconds:.1f} s ({cpu:.1f} s CPU) with {peak:.0f} MB")
        figures: dict[str, float] = {"trajectories": count, "spool_mb": num_bytes / 1e6}
        for label, command in commands(root).items():
            if label == "show":
                command = [part.replace("9000.3", f"{count // 12}.3") for part in command]
            seconds, cpu, peak = run(command)
            print(f"{label:>22}: {seconds:6.2f} s ({cpu:.2f} s CPU), {peak:6.0f} MB", flush=True)
            figures |= {f"{label}_s": seconds, f"{label}_cpu_s": cpu, f"{label}_mb": peak}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
