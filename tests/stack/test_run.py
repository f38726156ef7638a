"""The whole real system: controller, two trainer ranks (TP=2) and one rollout rank under mpiexec.

The long run scores on two reward ranks, the others beside the engine.

Oracles: transformers for greedy text and log-probabilities, the shards themselves for versions
and staleness, the journal's audit for admission and single use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_hpc.analysis.audit import audit
from areal_hpc.config.load import read_config
from areal_hpc.config.sft_schema import ScratchConfig, SftConfig, SftInitConfig
from areal_hpc.controller.ledger import read_ledger
from areal_hpc.launch.sft import make_scratch_model
from areal_hpc.paths import RunPaths
from areal_hpc.spool.shard import read_rows

ROOT = Path(__file__).parents[2]
ETA, STEPS, BATCH = 2, 6, 64
REWARD = "tests.stack.run_rewards:parity"
BASE = [
    f"rewards.fn={REWARD}", f"algorithm.max_staleness={ETA}", f"trainer.batch_size={BATCH}",
    "trainer.weight_history=3", "rollout.group_size=8", "rollout.max_num_seqs=32", "eval.batch_prompts=8",
    "trainer.optimizer.lr=1e-3", "run.start_deadline_s=240",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "scratch")


def make_tiny_model(folder: Path) -> Path:
    scratch = ScratchConfig(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=128, max_positions=1024)
    make_scratch_model(SftConfig(seed=3, init=SftInitConfig(scratch=scratch)), folder)
    return folder


def command(*arguments: str | Path, timeout: float = 400.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "areal_hpc.cli", *map(str, arguments)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def launch(folder: Path, model: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return command(
        "run", "configs/quickstart.yaml", f"model.path={model}", f"run.folder={folder}", *BASE, *overrides
    )


def explain(result: subprocess.CompletedProcess[str], folder: Path) -> str:
    """What a failed run said, on the terminal and last in each log."""
    tails = [f"== {log.name}\n" + log.read_text(errors="replace")[-1500:] for log in sorted(folder.glob("logs/*.log"))]
    return "\n".join([result.stdout, result.stderr, *tails])


def records(paths: RunPaths, kind: str) -> list[dict]:
    return [record for line in paths.metrics.read_text().splitlines()
            if (record := json.loads(line))["kind"] == kind]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory, model) -> tuple[RunPaths, str]:
    folder = tmp_path_factory.mktemp("run") / "run"
    result = launch(folder, model, f"run.total_steps={STEPS}", "data.heldout.size=16", "data.train.size=400",
                    "checkpoint.every=3", "groups.reward.nodes=1", "groups.reward.ranks_per_node=2")  # fmt: skip
    assert result.returncode == 0, explain(result, folder)
    return RunPaths(folder), result.stdout


def test_it_ends_with_accuracy_and_folder(run):
    paths, output = run
    *_, accuracy, folder = output.splitlines()
    assert accuracy.startswith("held-out accuracy: ") and " -> " in accuracy
    assert folder == f"run folder: {paths.root}"
    assert [record["train_step"] for record in records(paths, "step")] == list(range(1, STEPS + 1))
    assert [record["train_step"] for record in records(paths, "eval")] == [0, STEPS]
    assert {path.name for path in paths.checkpoints.iterdir()} == {"step-00000003", "step-00000006"}
    assert any(paths.tensorboard.iterdir())
    assert {path.name.split("-")[0] for path in paths.logs.iterdir()} == {
        "controller", "trainer", "rollout", "engine", "reward"
    }


def test_reward_ranks_did_all_the_scoring(run):
    paths, _ = run
    scored = {
        path.stem: [
            span for line in path.read_text().splitlines() if (span := json.loads(line)).get("s") == "reward.score"
        ]
        for path in paths.telemetry.iterdir()
    }
    assert {name for name, spans in scored.items() if spans} == {"reward-00000", "reward-00001"}
    spans = [span for spans in scored.values() for span in spans]
    # 16 held-out prompts twice; of training at least what was trained.
    assert sum(span["num"] for span in spans if span["num"] == 1) == 2 * 16
    assert sum(span["num"] for span in spans if span["num"] == 8) >= STEPS * BATCH
    ranks = json.loads(paths.status.read_text())["ranks"].values()
    assert all(rank["checks"] > 0 and rank["time"] > 0 for rank in ranks if rank["role"] == "reward")
    assert [rank["role"] for rank in ranks].count("reward") == 2


def test_files_are_private(run):
    paths, _ = run
    for path in (paths.metrics, paths.ledger, paths.status, paths.config, *paths.logs.iterdir(), *paths.spool.rglob("*.h5")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_every_trained_token_obeys_the_staleness_bound(run):
    """Versions are read from the shards; the journal only says which groups a step consumed."""
    paths, _ = run
    groups: dict[int, list] = {}
    for shard in paths.spool.rglob("*.h5"):
        for trajectory in read_rows(shard, verify=True):
            groups.setdefault(trajectory.group_id, []).append(trajectory)
    consumed = [record for record in read_ledger(paths.ledger) if record["k"] == "consumed"]
    assert len(consumed) == STEPS
    seen: set[int] = set()
    mixed = 0
    for record in consumed:
        version = record["train_step"] - 1
        ids = [group["group"] if isinstance(group, dict) else group for group in record["groups"]]
        assert not seen & set(ids)
        seen |= set(ids)
        assert sum(len(groups[group]) for group in ids) == BATCH
        for trajectory in (t for group in ids for t in groups[group]):
            versions = trajectory.versions[trajectory.loss_mask == 1]
            assert versions.size and (np.diff(versions) >= 0).all()
            assert versions.max() <= version and version - versions.min() <= ETA
            assert (trajectory.versions[trajectory.loss_mask == 0] == -1).all()
            mixed += versions.min() != versions.max()
    assert mixed, "no answer was interrupted: the run did not exercise weights in flight"
    result = audit(paths)
    assert not result.problems and result.counts["trained"] == STEPS * BATCH // 8


def test_accuracy_and_each_reward_are_those_of_the_shards(run):
    paths, _ = run
    samples: dict[int, list] = {}
    for shard in paths.spool.rglob("*.h5"):
        for trajectory in read_rows(shard):
            samples.setdefault(trajectory.group_id, []).append(trajectory.reward_parts[REWARD])
    consumed = {record["train_step"]: record["groups"] for record in read_ledger(paths.ledger) if record["k"] == "consumed"}
    for record in records(paths, "step"):
        values = [value for group in consumed[record["train_step"]] for value in samples[group]]
        assert record["accuracy"] == record[f"reward.{REWARD}"] == pytest.approx(sum(values) / BATCH)


def test_log_probabilities_agree_at_equal_weights_in_every_step(run):
    paths, _ = run
    for record in records(paths, "step"):
        assert record["trainer/behave_gap_fresh_count"] > 0, record["train_step"]
        assert record["trainer/behave_gap_fresh_max"] < 1e-3


def test_the_engines_last_answers_are_those_of_the_exported_weights(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    paths, _ = run
    export = paths.export(STEPS)
    language_model = AutoModelForCausalLM.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    answers = [json.loads(line) for line in (paths.evals / f"step-{STEPS:08d}.jsonl").read_text().splitlines()]
    assert len(answers) == 16 and all(answer["version"] == STEPS for answer in answers)
    for answer in answers:
        prompt = tokenizer(answer["prompt"], return_tensors="pt")
        with torch.no_grad():
            tokens = language_model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, prompt.input_ids.shape[1] :]
        assert tokenizer.decode(tokens, skip_special_tokens=True) == answer["text"]
    start = AutoModelForCausalLM.from_pretrained(read_config(paths.config).model.path)
    assert any(not torch.equal(a, b) for a, b in zip(start.parameters(), language_model.parameters()))


def test_export_writes_a_checkpoint_of_two_ranks_as_the_run_did(run, tmp_path):
    paths, _ = run
    result = command("export", paths.root, "--step", STEPS, "-o", tmp_path / "exported")
    assert (result.returncode, result.stdout) == (0, f"wrote {tmp_path / 'exported'}\n"), result.stderr
    found, expected = tmp_path / "exported", paths.export(STEPS)
    names = sorted(file.name for file in expected.iterdir())
    assert sorted(file.name for file in found.iterdir()) == names and "model.safetensors" in names
    for name in names:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


def test_eval_of_a_run_finds_what_its_last_evaluation_found(run, tmp_path):
    paths, _ = run
    result = command("eval", paths.config, "--model", paths.root, "-o", tmp_path / "answers.jsonl")
    *_, last = records(paths, "eval")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"mean@1 {last['accuracy']:.3f} over 16 prompts ({paths.export(STEPS)})"
    found, expected = (
        [(sample["prompt_id"], sample["text"], sample["reward"], sample["parts"], sample["finish_reason"])
         for sample in map(json.loads, file.read_text().splitlines())]
        for file in (tmp_path / "answers.jsonl", paths.evals / f"step-{STEPS:08d}.jsonl")
    )  # fmt: skip
    assert sorted(found) == sorted(expected)


def test_a_finished_run_is_not_overwritten(run, model):
    paths, _ = run
    before = paths.ledger.read_bytes()
    result = launch(paths.root, model, "run.total_steps=1")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "already holds a run" in result.stderr
    assert paths.ledger.read_bytes() == before


def test_gsm8k_questions_and_the_end_of_data(tmp_path, model, test_data):
    """30 questions in batches of 16 groups: 16 and 14, each question once, then the run stops."""
    result = launch(
        tmp_path / "run", model, f"data.train.path={test_data}/gsm8k/train_1000.jsonl", "data.train.task=",
        "data.train.size=30", "data.heldout.task=", f"data.heldout.path={test_data}/gsm8k/test.jsonl",
        "data.heldout.size=4", "data.epochs=1", "run.total_steps=9", "model.max_context=1024", "trainer.batch_size=128",
        "rollout.max_new_tokens=24", "rewards.fn=math", "rollout.kv_cache_gib=1",
    )  # fmt: skip
    assert result.returncode == 0, explain(result, tmp_path / "run")
    paths = RunPaths(tmp_path / "run")
    assert [record["num_trajectories"] for record in records(paths, "step")] == [128, 112]
    prompts = [
        trajectory.prompt_id for shard in paths.spool.rglob("*.h5") for trajectory in read_rows(shard)
        if trajectory.sample_index == 0
    ]  # fmt: skip
    assert sorted(prompts) == list(range(30))
    assert not audit(paths).problems


def test_an_error_of_one_rank_ends_the_world_and_is_named(tmp_path, model):
    begun = time.monotonic()
    result = launch(tmp_path / "run", model, "rewards.fn=tests.stack.run_rewards:fail_on_third", "data.train.size=4",
                    "data.heldout.task=", "run.total_steps=9")  # fmt: skip
    assert result.returncode == 1
    line = next(line for line in result.stdout.splitlines() if line.startswith("areal-hpc: rollout 0 on"))
    assert "fail_on_third" in line and "prompt 3" in line and "rollout-00000.log" in line
    log = tmp_path / "run" / "logs" / "rollout-00000.log"
    assert "broken on purpose" in log.read_text()
    # From the failure on, everybody is gone within 15 s: the log's last write marks it.
    assert time.time() - log.stat().st_mtime < 15.0 and time.monotonic() > begun
