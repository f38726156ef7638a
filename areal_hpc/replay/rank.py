"""One trainer rank of a replay: `python -m areal_hpc.replay.rank`, started by `command` with mpiexec.

Builds the same engine and training step as a run's trainers, feeds them the recorded batches
in order and, at the end, compares this rank's weights with those of the run's checkpoint.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_hpc.config.load import read_config
from areal_hpc.config.schema import Config
from areal_hpc.controller.ledger import read_ledger
from areal_hpc.controller.progress import describe_batch, name_metrics
from areal_hpc.paths import RunPaths
from areal_hpc.replay.compare import HEADER, WeightGap, line_of, step_records, write_verdict
from areal_hpc.replay.history import RecordedStep, read_history, select_groups, step_manifest
from areal_hpc.telemetry import Telemetry, append_jsonl, setup_logging
from areal_hpc.terminal import echo, keep_terminal

if TYPE_CHECKING:
    from areal_hpc.trainer.megatron import MegatronTrainer

HEADER_EVERY = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m areal_hpc.replay.rank", description=__doc__)
    parser.add_argument("--run", required=True, type=Path, help="run folder to replay")
    parser.add_argument("--output", required=True, type=Path, help="folder of the replay, with its config.yaml")
    parser.add_argument("--steps", required=True, type=int, help="last step to train")
    arguments = parser.parse_args()
    os.umask(0o077)
    keep_terminal()
    source, target = RunPaths(arguments.run), RunPaths(arguments.output)
    config = read_config(target.config)
    from areal_hpc.mpi.world import gather, load_mpi, strip_launcher_environment

    communicator = load_mpi()
    rank = communicator.Get_rank()
    setup_logging(target.log("trainer", rank), label=f"replay[{rank}]", verbose=config.run.verbose)
    faulthandler.enable()
    try:
        host, port = _meeting_point(gather, config.run.start_deadline_s)
        strip_launcher_environment()
        Replay(config, source, target, rank, host, port).run(arguments.steps)
    except BaseException as error:
        logging.exception("the replay failed")
        summary, log = " ".join(str(error).split())[:500], target.log("trainer", rank)
        echo(f"areal-hpc: replay rank {rank} failed: {type(error).__name__}: {summary} (log: {log})")
        communicator.Abort(1)
    from mpi4py import MPI

    MPI.Finalize()
    # gloo's threads may still wait for peers that have left.
    os._exit(0)


def _meeting_point(gather: Any, deadline_s: float) -> tuple[str, int]:
    """Address and free port of rank 0, known to all ranks."""
    from areal_hpc.trainer.parallel import free_port

    mine = f"{socket.gethostname()[:200]} {free_port()}"
    found = [answer.decode().split() for answer in gather(mine.encode(), "the meeting point", deadline_s)]
    single_host = len({host for host, _ in found}) == 1
    # A host's own name need not resolve to an address it listens on.
    return "127.0.0.1" if single_host else found[0][0], int(found[0][1])


class Replay:
    """Engine and step of one rank; all ranks do the same, rank 0 writes."""

    def __init__(self, config: Config, source: RunPaths, target: RunPaths, rank: int, host: str, port: int) -> None:
        from areal_hpc.trainer import parallel
        from areal_hpc.trainer.build import build_step

        trainer = config.trainer
        self._config, self._source, self._target = config, source, target
        self._place = parallel.start(
            parallel.Layout(tp=trainer.tp, pp=trainer.pp, dp=trainer.dp, ep=trainer.ep),
            rank=rank, host=host, port=port, device=config.run.device.value,
            timeout_s=config.run.start_deadline_s, seed=config.run.seed,
        )  # fmt: skip
        self._telemetry = Telemetry(target.spans("trainer", rank))
        self._engine, self._step = build_step(config, self._place, source, self._telemetry)
        self._lead = self._place.rank == 0
        self._recorded = step_records(source.metrics)

    def run(self, last_step: int) -> None:
        """Train up to `last_step`, save, compare."""
        history = read_history(read_ledger(self._source.ledger), last_step)
        before, eta = read_config(self._source.config).algorithm.max_staleness, self._config.algorithm.max_staleness
        # Without a new bound nothing is left out: what was trained kept the bound of its time.
        bound = None if eta == before else eta
        for number, step in enumerate(history.steps):
            record = self._train(step, bound)
            if self._lead:
                append_jsonl(self._target.metrics, record)
                if number % HEADER_EVERY == 0:
                    echo(HEADER)
                echo(line_of(step.train_step, self._recorded.get(step.train_step), record))
        self._save(last_step)
        gap = self._compare(last_step)
        if self._lead:
            write_verdict(self._target, self._source, last_step, gap)
        self._telemetry.close()

    def _train(self, step: RecordedStep, max_staleness: int | None) -> dict[str, Any]:
        """One step; its line of metrics.jsonl."""
        begin = time.perf_counter()
        groups = select_groups(self._config.algorithm, step, max_staleness)
        record: dict[str, Any] = {
            "kind": "step" if groups else "skipped", "time": time.time(), "attempt": 1, "train_step": step.train_step,
            "version": step.version, "left_out_groups": len(step.groups) - len(groups),
        }  # fmt: skip
        if groups:
            with self._telemetry.span("train.step", train_step=step.train_step):
                metrics = self._step.run(step_manifest(self._config, step, groups))
            record |= describe_batch(groups, step.version)
            record |= name_metrics(metrics)
        return {**record, "step_seconds": time.perf_counter() - begin}

    def _save(self, last_step: int) -> None:
        from areal_hpc.trainer.checkpoint import Checkpoints
        from areal_hpc.trainer.export import export_hf

        limit_s = self._config.run.start_deadline_s
        checkpoints = Checkpoints(self._config, self._target, self._step.engines, limit_s)
        checkpoints.save(last_step, last_step)
        checkpoints.wait(limit_s)
        if self._config.checkpoint.export_hf:
            export_hf(self._engine, self._target.export(last_step), Path(self._config.model.tokenizer))

    def _compare(self, last_step: int) -> WeightGap | None:
        """How far the weights lie from the run's own of that step; None without its checkpoint."""
        folder = self._source.checkpoint(last_step)
        if not folder.is_dir():
            return None
        return compare_weights(self._engine, folder / "policy")


def compare_weights(engine: MegatronTrainer, checkpoint: Path) -> WeightGap:
    """Differences between an engine's weights and a checkpoint's, over all ranks. The engine then
    holds the checkpoint's."""
    import torch
    import torch.distributed as dist

    from areal_hpc.trainer.checkpoint import load_state

    mine = engine.snapshot()
    load_state(engine, checkpoint)
    theirs = engine.snapshot()
    unequal = largest = squares = norm = 0.0
    for ours, other in zip(mine, theirs, strict=True):
        distance = (ours.double() - other.double()).abs()
        unequal += float((distance != 0).sum())
        largest = max(largest, float(distance.max()) if distance.numel() else 0.0)
        squares += float((distance**2).sum())
        norm += float((other.double() ** 2).sum())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (unequal, sum(part.numel() for part in mine), largest, squares, norm))
    unequal, total, _, squares, norm = (sum(column) for column in zip(*everyone, strict=True))
    largest = max(entry[2] for entry in everyone)
    # Ranks that hold copies of the same weights count them alike: the ratios stay right.
    relative = (squares / norm) ** 0.5 if norm else 0.0
    return WeightGap(num_unequal=int(unequal), num_weights=int(total), largest=largest, relative=relative)


if __name__ == "__main__":
    sys.exit(main())
