"""`areal-hpc replay RUN`: checks what a run recorded and starts the trainer ranks on it.

Reads the run's configuration, journal, spool and checkpoints and changes none of them;
writes a folder of its own that looks like a run's: config.yaml, metrics.jsonl, logs,
checkpoints, exports, and replay.json with the verdict.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import check_config, read_config, save_config
from areal_hpc.config.schema import Config
from areal_hpc.controller.ledger import LedgerError, read_ledger
from areal_hpc.launch.local import find_mpiexec, rank_environment, role_environments
from areal_hpc.launch.preflight import check_model_layout, read_model_config
from areal_hpc.paths import RunPaths
from areal_hpc.replay.compare import print_comparison
from areal_hpc.replay.history import History, read_history
from areal_hpc.trainer.checkpoint_folder import find_checkpoint

CHANGEABLE = ("algorithm.", "trainer.", "groups.trainer.", "checkpoint.", "run.verbose")
FIXED = ("trainer.batch_size",)
"""What a batch holds was decided when the run went by."""
END_GRACE_S = 10.0


def run_replay(run: str, overrides: list[str], output: str | None) -> int:
    """Check, train again, compare and print; returns the exit code."""
    source = RunPaths(Path(run).expanduser().resolve())
    config = replay_config(source, run, overrides, output)
    history = check_history(source, run)
    last_step = history.steps[-1].train_step
    target = RunPaths(Path(config.run.folder))
    if target.root.exists():
        raise ConfigError(f"-o {target.root} exists already; choose another folder with -o FOLDER")
    target.create()
    save_config(config, target.config)
    for step, changes in history.changes.items():
        print(f"the run's settings changed after step {step}: {'; '.join(changes)}; the last ones are used for all steps")
    options = f" with {' '.join(overrides)}" if overrides else ""
    print(f"replaying {last_step} steps of {source.root}{options} in {target.root}", flush=True)
    code = _start_ranks(config, source, target, last_step)
    if code == 0:
        print_comparison(source, target)
    return code


def replay_config(source: RunPaths, run: str, overrides: list[str], output: str | None) -> Config:
    """The run's configuration with the overrides; ConfigError for keys that a replay cannot change."""
    if not source.config.exists() or not source.ledger.exists():
        raise ConfigError(f"RUN={run} is no run folder: it has no config.yaml or no ledger.jsonl")
    for override in overrides:
        key = override.partition("=")[0]
        if key in FIXED or not key.startswith(CHANGEABLE):
            raise ConfigError(
                f"{key} cannot be changed in a replay, whose answers and batches are recorded: change keys of "
                "algorithm, trainer, groups.trainer or checkpoint"
            )
    config = read_config(source.config, overrides)
    check_config(config)
    # The folder from which the run began must still be there, and fit another layout.
    check_model_layout(config, read_model_config(config))
    folder = Path(output).expanduser().resolve() if output else _free_folder(source.root)
    config.run.folder = str(folder)  # the name stays: shards carry it
    return config


def _free_folder(root: Path) -> Path:
    """`ROOT-replay`, or the first of `ROOT-replay-2`, ... that is free."""
    number = 1
    while (folder := root.with_name(f"{root.name}-replay" + (f"-{number}" if number > 1 else ""))).exists():
        number += 1
    return folder


def check_history(source: RunPaths, run: str) -> History:
    """The steps up to the newest whole checkpoint, to which weights can be compared; without one all of
    them. ConfigError if there is none, or a shard that they lie in is gone."""
    found = find_checkpoint(source)
    try:
        history = read_history(read_ledger(source.ledger), found[1].train_step if found else None)
    except (LedgerError, ValueError) as error:
        raise ConfigError(f"RUN={run}: {error}") from None
    if not history.steps:
        raise ConfigError(f"RUN={run} has not finished a single training step: there is nothing to replay")
    for step in history.steps:
        for path in sorted({group.path for group in step.groups}):
            if not source.resolve_inside(path).is_file():
                raise ConfigError(f"RUN={run}: shard {path}, which step {step.train_step} was trained on, is gone")
    return history


def _start_ranks(config: Config, source: RunPaths, target: RunPaths, last_step: int) -> int:
    # As many threads as the run's trainers had on this machine: sums depend on it.
    environment = rank_environment() | next(env for role, _, env in role_environments(config) if role == "trainer")
    command = [
        find_mpiexec(), "-n", str(config.groups.trainer.ranks), sys.executable, "-m", "areal_hpc.replay.rank",
        "--run", str(source.root), "--output", str(target.root), "--steps", str(last_step),
    ]  # fmt: skip
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    try:
        # Ranks end by themselves: their collectives have deadlines, and an error aborts them all.
        code = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        try:
            process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
        return 130
    return code if code in (0, 2) else 1
