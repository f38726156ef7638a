"""run.deterministic: stopped at any moment and resumed, a run ends with bitwise the weights of one
that was not stopped; and `areal-hpc replay` makes the same weights from the spool alone.

Real engine, real trainer; the oracle is the undisturbed run itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_run import ROOT, make_tiny_model, records

from areal_hpc.analysis.audit import audit
from areal_hpc.controller.ledger import read_ledger
from areal_hpc.paths import RunPaths
from areal_hpc.spool.shard import read_rows

STEPS = 6
OPTIONS = [
    "run.deterministic=true", "run.mode=sync", f"run.total_steps={STEPS}", "run.start_deadline_s=400",
    "rewards.fn=tests.stack.run_rewards:parity", "trainer.tp=1", "groups.trainer.ranks_per_node=1",
    "trainer.batch_size=64", "trainer.optimizer.lr=1e-3", "rollout.group_size=8", "rollout.max_num_seqs=24",
    "rollout.enforce_eager=true", "data.train.size=400", "data.heldout.task=", "checkpoint.every=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "scratch")


def command(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "areal_hpc.cli", *arguments], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def start(folder: Path, model: Path, *overrides: str) -> subprocess.Popen[str]:
    place = (f"model.path={model}", f"run.folder={folder}")
    return command("run", "configs/quickstart.yaml", *place, *OPTIONS, *overrides)


def end(process: subprocess.Popen[str], limit_s: float = 500.0) -> str:
    output, _ = process.communicate(timeout=limit_s)
    assert process.returncode == 0, output
    return output


def weights(paths: RunPaths) -> bytes:
    return (paths.export(STEPS) / "model.safetensors").read_bytes()


def samples(paths: RunPaths) -> dict[tuple[int, int], int]:
    """(group, sample) -> checksum of its tokens, of everything that was trained."""
    trained = {group for record in read_ledger(paths.ledger) if record["k"] == "consumed" for group in record["groups"]}
    return {
        (row.group_id, row.sample_index): row.checksum
        for shard in paths.spool.rglob("*.h5") for row in read_rows(shard) if row.group_id in trained
    }  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, model) -> RunPaths:
    paths = RunPaths(tmp_path_factory.mktemp("whole") / "run")
    end(start(paths.root, model))
    return paths


def test_killed_and_stopped_in_the_middle_of_steps_it_ends_with_the_same_bits(undisturbed, model, tmp_path):
    """A kill at step 3 goes back to the checkpoint of step 2, or to the start where that was not whole yet."""
    paths = RunPaths(tmp_path / "run")
    process = start(paths.root, model, "checkpoint.every=2")
    wait_for_step(paths, 3, process)
    os.kill(json.loads(paths.status.read_text())["pid"], signal.SIGKILL)
    process.communicate(timeout=60.0)
    assert process.returncode != 0
    process = start(paths.root, model, "checkpoint.every=2", "run.on_existing=resume")
    wait_for_step(paths, 4, process)
    process.send_signal(signal.SIGINT)
    assert "stopping" in end(process)
    assert max(record["train_step"] for record in records(paths, "step")) < STEPS
    end(start(paths.root, model, "run.on_existing=resume"))
    assert len({record["attempt"] for record in records(paths, "step")}) == 3
    assert samples(paths) == samples(undisturbed)
    assert weights(paths) == weights(undisturbed)
    assert not audit(paths).problems


def wait_for_step(paths: RunPaths, train_step: int, process: subprocess.Popen[str]) -> None:
    """Until that step is done and the answers of the next one are under way."""
    deadline = time.monotonic() + 400.0
    while not (paths.metrics.exists() and train_step in {record["train_step"] for record in records(paths, "step")}):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


def test_a_replay_makes_the_same_weights_from_the_spool_alone(undisturbed, tmp_path):
    output = end(command("replay", str(undisturbed.root), "-o", str(tmp_path / "replay")))
    replay = RunPaths(tmp_path / "replay")
    assert f"{STEPS} of {STEPS} steps have the run's values to the last bit" in output
    assert "equal, bit for bit" in output
    assert weights(replay) == weights(undisturbed)
    verdict = json.loads(replay.replay.read_text())
    assert verdict["weights"]["num_unequal"] == 0 and verdict["weights"]["num_weights"] > 10_000


def test_a_replay_with_another_objective_says_what_it_would_have_changed(undisturbed, tmp_path):
    output = end(command("replay", str(undisturbed.root), "algorithm.clip_eps=0.01", "-o", str(tmp_path / "replay")))
    replay = RunPaths(tmp_path / "replay")
    clipped = [(before["trainer/clip_fraction"], after["trainer/clip_fraction"])
               for before, after in zip(records(undisturbed, "step"), records(replay, "step"), strict=True)]  # fmt: skip
    assert all(after >= before for before, after in clipped)
    assert any(after > before for before, after in clipped)
    assert json.loads(replay.replay.read_text())["weights"]["num_unequal"] > 0
    assert "differ, by" in output and weights(replay) != weights(undisturbed)
