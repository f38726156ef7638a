"""Checks before the start: model, layout, prompts and run folder, each one line."""

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_hpc import runlock
from areal_hpc.cli import main
from areal_hpc.config.load import ConfigError, load_config, save_config
from areal_hpc.launch import local, supervise
from areal_hpc.launch.local import role_environments
from areal_hpc.controller.ledger import Ledger
from areal_hpc.data.identity import prompts_identity
from areal_hpc.launch.preflight import check_files, check_run_folder, count_parameters
from areal_hpc.launch.status import write_record
from areal_hpc.paths import RunPaths
from areal_hpc.plan.shape import read_shape

MODEL = {
    "model_type": "qwen2", "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 64, "vocab_size": 259, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    (model / "model.safetensors").write_bytes(b"")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(sorted(alphabet))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model / "tokenizer.json"))
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": "q" * n, "answer": str(n)}) + "\n" for n in range(1, 41)))
    file = tmp_path / "config.yaml"
    file.write_text(
        f"run: {{folder: {tmp_path}/run}}\n"
        f"model: {{path: {model}, max_context: 64}}\n"
        f"data: {{train: {{path: {data}}}}}\n"
        "rollout: {max_new_tokens: 24}\n"
    )
    return file


def refused(capsys, *arguments: str) -> str:
    code = main(list(arguments))
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_good_configuration_passes(config_file, capsys):
    assert main(["check", str(config_file)]) == 0
    assert "longest prompt 40 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("override", ["rollout.top_p=0.9", "rollout.top_k=20"])
def test_cut_sampling_is_warned_of_by_name_and_only_for_training(config_file, capsys, override):
    assert main(["check", str(config_file), override]) == 0
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and override in warning and "importance weights are biased" in warning
    assert main(["check", str(config_file), override.replace("rollout", "eval")]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.tp=2", "groups.trainer.ranks_per_node=2"], ["trainer.tp=2", "9 attention heads"]),
        (["trainer.pp=2", "groups.trainer.ranks_per_node=2"], ["trainer.pp=2", "3 layers"]),
        (["trainer.ep=2"], ["trainer.ep=2"]),
        (["rollout.max_new_tokens=25"], ["prompt 39", "40 tokens", "leaves 39", "model.max_context"]),
        (["model.max_context=200"], ["model.max_context=200", "max_position_embeddings 128"]),
        (["model.path=/no/such/folder"], ["model.path=/no/such/folder"]),
        (["data.train.path=/no/such/file"], ["data.train.path=/no/such/file"]),
        (["run.totl_steps=1"], ["run.totl_steps", "run.total_steps"]),
        (["rollout.top_p=0"], ["rollout.top_p=0.0", "(0, 1]"]),
        (["eval.top_k=-2"], ["eval.top_k=-2"]),
        (["eval.temperature=-1"], ["eval.temperature=-1.0"]),
        (["trainer.critic_lr=-1"], ["trainer.critic_lr=-1.0"]),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(config_file, capsys, overrides, words):
    message = refused(capsys, "check", str(config_file), *overrides)
    for word in words:
        assert word in message


TP2 = ["trainer.tp=2", "groups.trainer.ranks_per_node=2"]
DP2 = ["trainer.dp=2", "groups.trainer.ranks_per_node=2"]
EVEN = {"num_attention_heads": 6, "num_key_value_heads": 2}
EXPERTS = EVEN | {
    "model_type": "qwen3_moe", "num_local_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "overrides", "words"),
    [
        ({"model_type": "mistral"}, [], "model.path: a model of type mistral is not supported"),
        ({"hidden_act": "gelu"}, [], "hidden_act=gelu"),
        ({"use_sliding_window": True}, [], "sliding-window"),
        ({"mlp_bias": True}, [], "mlp_bias"),
        ({"attention_bias": True}, [], "attention_bias"),
        ({"attention_dropout": 0.1}, [], "attention_dropout=0.1"),
        ({"rope_scaling": {"type": "yarn"}}, [], "type yarn"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, [], "type dynamic"),
        (EXPERTS | {"mlp_only_layers": [0]}, [], "dense layers"),
        (EXPERTS | {"decoder_sparse_step": 2}, [], "dense layers"),
        (EXPERTS | {"norm_topk_prob": False}, [], "norm_topk_prob=false"),
        (EVEN | {"num_key_value_heads": 3}, TP2, "trainer.tp=2 and the model's 3 key-value heads"),
        (EVEN | {"intermediate_size": 97}, TP2, "trainer.tp=2 does not divide the model's intermediate_size 97"),
        (EXPERTS | {"moe_intermediate_size": 33}, TP2, "moe_intermediate_size 33"),
        (EXPERTS, TP2, "trainer.sequence_parallel=false with trainer.tp=2 and experts"),
        ({}, [*DP2, "trainer.ep=2"], "trainer.ep=2 needs a model with experts"),
        (EXPERTS | {"num_local_experts": 3}, [*DP2, "trainer.ep=2"], "the model's 3 experts"),
        (EXPERTS, ["trainer.ep=2"], "trainer.ep=2 does not divide trainer.tp*dp=1"),
        ({"num_hidden_layers": None}, [], "num_hidden_layers=None"),
        (EVEN | {"num_key_value_heads": 3}, ["rollout.tensor_parallel=2"], "rollout.tensor_parallel=2 and the model's 3"),
        ({}, ["rollout.tensor_parallel=2"], "rollout.tensor_parallel=2 does not divide the model's 9 attention heads"),
        ({}, ["trainer.sequence_parallel=true"], "trainer.sequence_parallel=true needs trainer.tp > 1"),
    ],
)
def test_a_model_that_the_ranks_would_refuse_is_refused_here(config_file, capsys, tmp_path, changes, overrides, words):
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | changes))
    assert words in refused(capsys, "check", str(config_file), *overrides)


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        (EVEN | {"num_key_value_heads": 1}, TP2),
        ({"rope_scaling": {"rope_type": "llama3"}, "model_type": "llama"}, []),
        (EXPERTS, [*DP2, "trainer.ep=2"]),
        (EXPERTS, [*TP2, "trainer.sequence_parallel=true"]),
    ],
)
def test_what_the_ranks_can_compute_passes(config_file, tmp_path, changes, overrides):
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | changes))
    assert main(["check", str(config_file), *overrides]) == 0


def test_sft_applies_the_same_rules(capsys, tmp_path, config_file):
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | {"model_type": "mistral"}))
    file = tmp_path / "sft.yaml"
    file.write_text(f"{{output: {tmp_path}/out, init: {{path: {tmp_path}/model}}, data: {{worked: {{size: 4}}}}}}")
    assert "init.path: a model of type mistral" in refused(capsys, "sft", str(file))


def test_experts_are_counted_by_either_name():
    names = [{key: 4} for key in ("num_experts", "num_local_experts")]
    shapes = [{key: value for key, value in (MODEL | EXPERTS).items() if key != "num_local_experts"} | name
              for name in names]
    counts = {count_parameters(shape) for shape in shapes} | {read_shape(shape).parameters for shape in shapes}
    assert len(counts) == 1 and counts != {count_parameters(MODEL)}


def test_run_refuses_before_anything_starts(config_file, capsys, tmp_path):
    assert "9 attention heads" in refused(
        capsys, "run", str(config_file), "trainer.tp=2", "groups.trainer.ranks_per_node=2"
    )
    assert not (tmp_path / "run").exists()


def check_folder(config_file: Path, *overrides: str) -> bool:
    config = load_config(config_file, list(overrides))
    return check_run_folder(config, check_files(config).prompts)


@pytest.fixture
def run(config_file, tmp_path) -> RunPaths:
    """A folder with a run that was begun with the configuration's prompts."""
    paths = RunPaths(tmp_path / "run")
    paths.create()
    config = load_config(config_file)
    save_config(config, paths.config)
    ledger = Ledger(paths.ledger)
    ledger.add("run", attempt=1, train_step=0, data=prompts_identity(config, check_files(config).prompts))
    ledger.close()
    return paths


def test_a_folder_with_a_run_is_refused_or_resumed_but_never_overwritten(config_file, run, capsys):
    assert "already holds a run" in refused(capsys, "run", str(config_file))
    assert check_folder(config_file, "run.on_existing=resume") is True
    with pytest.raises(ConfigError, match="holds another run"):
        check_folder(config_file, "run.on_existing=resume", "run.name=other")


def test_a_folder_that_is_not_there_is_a_new_run(config_file):
    assert check_folder(config_file) is False


# ---- a folder in use -------------------------------------------------------------------


def contents(paths: RunPaths) -> dict[str, bytes]:
    return {str(file.relative_to(paths.root)): file.read_bytes() for file in paths.root.rglob("*") if file.is_file()}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """slurm(state) makes squeue say it of every job; sbatch leaves a trace."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    def say(state: str) -> None:
        for program, text in (("scontrol", ""), ("squeue", f"echo '50+0|{state}|n1|None'"), ("sbatch", f"touch {folder}/queued")):
            (folder / program).write_text(f"#!/bin/sh\n{text}\n")
            (folder / program).chmod(0o755)

    say("RUNNING")
    return say


@pytest.mark.parametrize("command", ["run", "submit"])
@pytest.mark.parametrize("more", [[], ["run.on_existing=resume"], ["run.on_existing=resume", "run.take_over=true"]])
def test_a_second_start_changes_nothing_in_the_folder_of_a_running_run(config_file, run, slurm, capsys, command, more):
    with runlock.acquire(run.lock):
        before = contents(run)
        message = refused(capsys, command, str(config_file), "run.total_steps=7", *more)
        assert "is in use by" in message and f"pid {os.getpid()}" in message
        assert contents(run) == before


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "REQUEUED"])
@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_run_whose_job_waits_or_runs_is_refused_by_name(config_file, run, slurm, capsys, tmp_path, command, state):
    run.slurm.mkdir()
    write_record(run, "50")
    slurm(state)
    before = contents(run)
    message = refused(capsys, command, str(config_file), "run.on_existing=resume")
    assert f"has job 50, which is {state}" in message and "run.take_over=true" in message
    assert contents(run) == before and not (tmp_path / "bin" / "queued").exists()


@pytest.mark.parametrize("case", ["ended", "ending", "own job", "on request"])
def test_a_run_whose_job_is_over_or_that_is_asked_for_goes_on(config_file, run, slurm, monkeypatch, case):
    run.slurm.mkdir()
    write_record(run, "50")
    slurm({"ended": "COMPLETED", "ending": "COMPLETING"}.get(case, "RUNNING"))
    if case == "own job":
        monkeypatch.setenv("SLURM_JOB_ID", "50")
    more = ["run.take_over=true"] if case == "on request" else []
    assert check_folder(config_file, "run.on_existing=resume", *more) is True


@pytest.mark.parametrize("count", [None, "1"])
def test_a_batch_script_of_another_job_changes_nothing_either(config_file, run, slurm, monkeypatch, capfd, count):
    """The plain road, as a first start and as a requeued one."""
    run.slurm.mkdir()
    write_record(run, "50")
    monkeypatch.setenv("SLURM_JOB_ID", "51")
    if count:
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    slurm("COMPLETED")
    with runlock.acquire(run.lock):
        before = contents(run)
        assert supervise.main([str(config_file), "run.on_existing=resume"]) == 2
        assert "is in use by" in capfd.readouterr().err
        assert contents(run) == before


def test_of_two_starts_at_once_the_later_one_leaves_the_configuration_alone(config_file, run, capsys, monkeypatch):
    """The first launcher holds the lock before it writes, until its controller has it."""
    seen = []

    def ranks(config, paths, token):
        seen.append((token, contents(paths)["config.yaml"]))
        assert runlock.read_holder(paths.lock).token == token
        assert "its process is running" in refused(
            capsys, "run", str(config_file), "run.on_existing=resume", "run.total_steps=9"
        )
        assert contents(paths)["config.yaml"] == seen[0][1]
        return 0

    monkeypatch.setattr(local, "start_ranks", ranks)
    assert main(["run", str(config_file), "run.on_existing=resume", "run.total_steps=8"]) == 0
    assert len(seen) == 1 and b"total_steps: 8" in seen[0][1] and not run.lock.exists()


@pytest.mark.parametrize("change", ["data.train.size=39", "run.seed=1", "data.shuffle=false", "content"])
def test_other_prompts_are_refused_on_the_login_node_and_begun_on_request(config_file, run, capsys, tmp_path, change):
    overrides = ["run.on_existing=resume"]
    if change == "content":
        data = tmp_path / "data.jsonl"
        data.write_text(data.read_text().replace('"answer": "7"', '"answer": "8"'))
    else:
        overrides.append(change)
    message = refused(capsys, "run", str(config_file), *overrides)
    assert "data.train, run.seed or data.shuffle is not what this run was last started with" in message
    assert "data.on_change=restart" in message
    assert check_folder(config_file, *overrides, "data.on_change=restart") is True


@pytest.mark.parametrize("name", ["spool", "spool/rollout-00000", "metrics.jsonl", "logs/controller-00000.log"])
def test_a_link_that_leads_out_of_the_run_folder_is_refused(config_file, run, capsys, tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    link = run.root / name
    if link.is_dir():
        link.rmdir()
    link.symlink_to(outside)
    message = refused(capsys, "run", str(config_file), "run.on_existing=resume")
    assert f"{link} is a symbolic link to {outside}" in message
    link.unlink()
    (run.root / "elsewhere").mkdir()
    link.symlink_to(run.root / "elsewhere")  # it stays inside
    assert check_folder(config_file, "run.on_existing=resume") is True


def test_the_run_folder_itself_may_be_a_link(config_file, run, tmp_path):
    moved = tmp_path / "scratch"
    run.root.rename(moved)
    run.root.symlink_to(moved)
    assert check_folder(config_file, "run.on_existing=resume") is True


def test_a_folder_with_foreign_files_is_refused(config_file, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="not empty"):
        check_folder(config_file, "run.on_existing=resume")


def test_parameter_count_is_that_of_transformers():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    for tied in (True, False):
        shape = {**MODEL, "tie_word_embeddings": tied}
        model = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in shape.items() if k != "model_type"}))
        biases = sum(p.numel() for name, p in model.named_parameters() if name.endswith("bias"))
        assert count_parameters(shape) == sum(p.numel() for p in model.parameters()) - biases


def test_cores_are_dealt_to_roles(config_file, monkeypatch):
    overrides = ["trainer.dp=2", "groups.trainer.ranks_per_node=2", "groups.rollout.ranks_per_node=2"]
    config = load_config(config_file, overrides)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    roles = role_environments(config)
    assert [(role, ranks) for role, ranks, _ in roles] == [
        ("controller", 1), ("trainer", 2), ("rollout", 1), ("rollout", 1)
    ]  # fmt: skip
    engines = [environment["AREAL_ENGINE_CORES"].split(",") for *_, environment in roles[2:]]
    assert engines == [["5", "6", "7"], ["2", "3", "4"]]
    with_rewards = load_config(config_file, [*overrides, "groups.reward.nodes=1", "groups.reward.ranks_per_node=3"])
    assert role_environments(with_rewards) == [*roles, ("reward", 3, {"OMP_NUM_THREADS": "1"})]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert [environment.get("AREAL_ENGINE_CORES") for *_, environment in role_environments(config)[2:]] == ["1", "0"]
