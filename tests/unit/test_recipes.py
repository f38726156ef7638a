"""Every shipped configuration parses, and its layout fits the model that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_hpc.config import load_config
from areal_hpc.config.algorithm import CHOICES
from areal_hpc.config.schema import Device, WeightBackend
from areal_hpc.launch.preflight import check_model_layout

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(file.name for file in CONFIGS.glob("*.yaml") if "quickstart" not in file.name)

# Attention heads, KV heads, layers, MLP width: from each model's config.json.
MODELS = {
    "1.5B": (12, 2, 28, 8960),
    "7B": (28, 4, 28, 18944),
    "14B": (40, 8, 48, 13824),
    "32B": (40, 8, 64, 27648),
}
KEYS = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "intermediate_size")


def size_of(name: str) -> str:
    return next(part for part in name.removesuffix(".yaml").upper().split("-") if part in MODELS)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name):
    config = load_config(CONFIGS / name)
    model = {**dict(zip(KEYS, MODELS[size_of(name)])), "model_type": "qwen2", "max_position_embeddings": 131072}
    check_model_layout(config, model)
    assert model["num_key_value_heads"] % config.trainer.tp == 0
    assert config.run.name == name.removesuffix(".yaml")
    assert (config.run.device, config.weights.backend) == (Device.cuda, WeightBackend.nccl)
    assert size_of(name).lower() in config.model.path.lower()
    groups = config.groups
    for group in (groups.trainer, groups.rollout):
        assert group.ranks_per_node * group.gpus_per_rank <= 8
    assert groups.rollout.gpus_per_rank == config.rollout.tensor_parallel
    assert groups.controller.gpus_per_rank == 0
    assert config.trainer.micro_batch_tokens >= config.model.max_context // 2
    assert config.rewards.fn == ("code" if "code" in name else "math")


@pytest.mark.parametrize("name", ["math-1.5b.yaml", "math-7b.yaml", "code-14b.yaml", "code-32b.yaml"])
def test_the_papers_numbers(name):
    config = load_config(CONFIGS / name)
    optimizer, algorithm = config.trainer.optimizer, config.algorithm
    assert config.trainer.batch_size == 512 * 16 and config.rollout.group_size == 16
    assert config.rollout.max_new_tokens == 27648 and config.rollout.temperature == 1.0
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.eps) == (2e-5, 0.9, 0.95, 1e-5)
    assert (optimizer.weight_decay, optimizer.clip_grad, optimizer.schedule) == (0.05, 1.0, "constant")
    assert (algorithm.minibatches, algorithm.clip_eps, algorithm.kl_coef) == (4, 0.2, 0.0)
    assert algorithm.max_staleness == (4 if "math" in name else 8)
    train, generate = config.groups.trainer, config.groups.rollout
    assert train.nodes * 3 == generate.nodes


def test_each_stage_starts_from_what_the_one_before_exports():
    for before, after in (("8k", "16k"), ("16k", "24k")):
        first = load_config(CONFIGS / f"deepscaler-1.5b-{before}.yaml")
        second = load_config(CONFIGS / f"deepscaler-1.5b-{after}.yaml")
        assert second.model.path == f"{first.run.folder}/exports/step-{first.run.total_steps:08d}"
        assert first.checkpoint.export_hf
        assert second.rollout.max_new_tokens > first.rollout.max_new_tokens
    coder = [load_config(CONFIGS / f"deepcoder-14b-{size}.yaml") for size in ("16k", "32k")]
    assert coder[1].model.path == f"{coder[0].run.folder}/exports/step-{coder[0].run.total_steps:08d}"


def test_the_readme_names_every_file_and_only_valid_methods():
    text = (CONFIGS / "README.md").read_text()
    for file in CONFIGS.glob("*.yaml"):
        stem, _, stage = file.stem.rpartition("-")
        assert f"`{file.name}`" in text or f"`-{stage}`" in text and stem in text, file.name
    for key in CHOICES:
        for line in text.splitlines():
            if f"`{key}: " in line:
                assert line.split(f"`{key}: ")[1].split("`")[0] in CHOICES[key], line
