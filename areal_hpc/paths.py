"""Where everything of a run lies. The only module that knows file names in a run folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from areal_hpc.durable import VISIBLE_S

REFUSAL_BYTES = 4096


@dataclass(frozen=True)
class RunPaths:
    """Paths below one run folder `root`.

    visible_s: how long readers wait for a file whose name was announced; a run measures it
    at its start.
    """

    root: Path
    visible_s: float = VISIBLE_S

    @property
    def config(self) -> Path:
        """Resolved configuration (YAML)."""
        return self.root / "config.yaml"

    @property
    def lock(self) -> Path:
        return self.root / "lock.json"

    @property
    def status(self) -> Path:
        """Latest state of the run, replaced about once a second by the controller (JSON)."""
        return self.root / "status.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a training step or evaluation."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def slurm(self) -> Path:
        """Batch scripts, batch logs and submitit's files."""
        return self.root / "slurm"

    @property
    def job(self) -> Path:
        """Slurm job of the run (JSON): id and time of submission."""
        return self.slurm / "job.json"

    @property
    def slurm_events(self) -> Path:
        """What the supervisor of the job did, one JSON object a line."""
        return self.slurm / "events.jsonl"

    def refusal(self, job_id: str) -> Path:
        """Why a rank of a job refused to start or ended, where starting again cannot help; blank if none did.

        REFUSAL_BYTES long, kept by the supervisor: it is written in place when the disk is full.
        """
        return self.slurm / f"refused-{job_id}.txt"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, role: str, role_rank: int) -> Path:
        return self.logs / f"{role}-{role_rank:05d}.log"

    def engine_log(self, role_rank: int) -> Path:
        """What the engine's own processes write (vLLM), apart from their rank's log."""
        return self.logs / f"engine-{role_rank:05d}.log"

    @property
    def telemetry(self) -> Path:
        return self.root / "telemetry"

    def spans(self, role: str, role_rank: int) -> Path:
        return self.telemetry / f"{role}-{role_rank:05d}.jsonl"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    def rollout_spool(self, role_rank: int) -> Path:
        return self.spool / f"rollout-{role_rank:05d}"

    def unfinished(self, role_rank: int) -> Path:
        """Shards of answers that a stop cut short, by the rollout that wrote them."""
        return self.root / "unfinished" / f"rollout-{role_rank:05d}"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, train_step: int) -> Path:
        return self.checkpoints / f"step-{train_step:08d}"

    @property
    def exports(self) -> Path:
        """Hugging Face folders written by the run."""
        return self.root / "exports"

    def export(self, train_step: int) -> Path:
        return self.exports / f"step-{train_step:08d}"

    @property
    def evals(self) -> Path:
        """One JSONL file of scored answers per evaluation."""
        return self.root / "evals"

    @property
    def replay(self) -> Path:
        """In a replay's folder: what was replayed and how near it came (JSON)."""
        return self.root / "replay.json"

    @property
    def weight_files(self) -> Path:
        """Scratch of the `file` weight backend."""
        return self.root / "weights"

    def seen_after(self, seconds: float) -> RunPaths:
        """The same folder, in which other nodes saw new files `seconds` after they were written."""
        # Twice the delay: it is one sample of many.
        return replace(self, visible_s=max(self.visible_s, 2 * seconds))

    def create(self) -> None:
        """Make the folder tree, private to the user."""
        for folder in (self.root, self.logs, self.telemetry, self.spool, self.checkpoints, self.evals):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def outward_links(self) -> Iterator[Path]:
        """Symbolic links in the run folder, down to the shards, that lead out of it.

        What is written below the folder must land there; the folder itself may be a link.
        """
        pending = [(str(self.root), 0)]
        while pending:
            folder, depth = pending.pop()
            try:
                entries = list(os.scandir(folder))
            except (FileNotFoundError, NotADirectoryError):
                continue
            for entry in entries:
                if entry.is_symlink():
                    if not self._is_inside(os.path.realpath(entry.path)):
                        yield Path(entry.path)
                elif depth < 2 and entry.is_dir():
                    pending.append((entry.path, depth + 1))

    def relative(self, path: Path) -> str:
        """`path` relative to the run folder; ValueError if it lies outside."""
        return str(Path(path).relative_to(self.root))

    def resolve_inside(self, relative: str) -> Path:
        """The path a message or manifest names, refused if it would leave the run folder."""
        path = os.path.realpath(os.path.join(os.path.realpath(self.root), relative))
        if not self._is_inside(path):
            raise ValueError(f"path {relative!r} leaves the run folder {self.root}")
        return Path(path)

    def _is_inside(self, path: str) -> bool:
        root = os.path.realpath(self.root)
        return path == root or path.startswith(root + os.sep)
