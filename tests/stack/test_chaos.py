"""Faults in the whole real system: nothing is lost, nothing is trained twice, every recovery is clean.

The random faults are those of tools/chaos.py, which counts with code of its own; damage in
the spool is made here while the run reads it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_hpc.analysis.audit import audit
from areal_hpc.controller.ledger import read_ledger
from areal_hpc.paths import RunPaths

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
LIMIT_S = 900.0
GROUP_SIZE, STEPS = 8, 4


def test_eight_faults_lose_nothing_and_train_nothing_twice(tmp_path):
    figures = tmp_path / "chaos.json"
    result = subprocess.run(
        [sys.executable, "tools/chaos.py", "--kills", "8", "--quick", "--max-minutes", "4", "--seed", "11",
         "--folder", str(tmp_path / "work"), "--json", str(figures)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=3 * LIMIT_S,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("seed 11, ")
    values = json.loads(figures.read_text())
    assert (values["lost"], values["trained_twice"], values["audit_failures"], values["problems"]) == (0, 0, 0, 0)
    assert values["kills"] >= 2 and values["lives"] >= 2 and values["trajectories"] > 0
    assert 0 < values["max_recovery_s"] < LIMIT_S


@pytest.mark.parametrize("how", ["zeros", "truncated"])
def test_a_shard_damaged_before_it_is_read_is_refused_quarantined_and_answered_again(tmp_path, how):
    """The very first shard, of fewer groups than a batch: nobody can have read it when it is damaged."""
    from chaos import make_model

    paths = RunPaths(tmp_path / "run")
    output = tmp_path / "output.txt"
    with open(output, "wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "areal_hpc.cli", "run", "configs/quickstart.yaml", f"run.folder={paths.root}",
             f"model.path={make_model(tmp_path / 'model')}", f"run.total_steps={STEPS}", "data.heldout.task=",
             f"rollout.group_size={GROUP_SIZE}", "trainer.batch_size=64", "rollout.max_num_seqs=16",
             "rollout.shard_latency_s=0.0", "rollout.enforce_eager=true", "checkpoint.export_hf=false"],
            cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        end = time.monotonic() + LIMIT_S
        while not (shards := sorted(paths.spool.glob("rollout-*/*.h5"))):
            assert process.poll() is None and time.monotonic() < end, output.read_text()
            time.sleep(0.005)
        damaged = shards[0]
        with open(damaged, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if how == "zeros":
                file.write(bytes(size))
            else:
                file.truncate(size - 50)
        process.wait(LIMIT_S)
    finally:
        process.kill()
    text = output.read_text()
    assert process.returncode == 0, text
    relative = paths.relative(damaged)
    told = [line for line in text.splitlines() if f"shard {relative} cannot be read" in line]
    assert len(told) == 1 and "groups are asked again" in told[0], text
    assert [path.name for path in paths.quarantine.iterdir()] == [f"{damaged.parent.name}-{damaged.name}"]
    records = list(read_ledger(paths.ledger))
    (damage,) = [record for record in records if record["k"] == "damaged"]
    assert damage["path"] == relative and damage["groups"]
    trained = [group for record in records if record["k"] == "consumed" for group in record["groups"]]
    refused = [record["train_step"] for record in records if record["k"] == "unconsumed"]
    # Refused once with these groups; trained once, from another shard.
    assert len(refused) == 1
    again = [record["path"] for record in records if record["k"] == "committed"
             for group in record["groups"] if group["group"] in damage["groups"]]  # fmt: skip
    assert len(again) == 2 * len(damage["groups"]) and again.count(relative) == len(damage["groups"])
    assert all(trained.count(group) <= 2 for group in trained)
    assert not audit(paths).problems
