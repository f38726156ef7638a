"""Tiny Hugging Face models, a batch and what plain transformers and autograd make of it."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

TEMPERATURE = 0.7
ENTROPY_WEIGHT = 0.05
NUM_ROWS = 8
SIZES = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=256)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}

DENSE = {
    # 151 tokens: padded to 256, 128 a rank, with divisor 128 and two tensor-parallel ranks.
    "qwen2-tied": ("Qwen2", dict(vocab_size=151, intermediate_size=96, num_key_value_heads=2, tie_word_embeddings=True)),
    # One key-value head: fewer than tensor-parallel ranks.
    "qwen2-one-kv-head": (
        "Qwen2", dict(vocab_size=128, intermediate_size=96, num_key_value_heads=1, tie_word_embeddings=False)
    ),
    # Norms of queries and keys, heads wider than hidden_size / heads.
    "qwen3": (
        "Qwen3",
        dict(vocab_size=151, intermediate_size=96, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False),
    ),
    "llama-tied": ("Llama", dict(vocab_size=151, intermediate_size=96, num_key_value_heads=2, tie_word_embeddings=True)),
    "llama-scaled-rope": (
        "Llama",
        dict(vocab_size=200, intermediate_size=96, num_key_value_heads=4, tie_word_embeddings=False,
             rope_parameters=LLAMA3),
    ),
}
EXPERTS = {
    "qwen3-moe": (
        "Qwen3Moe",
        dict(vocab_size=151, intermediate_size=96, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
             num_key_value_heads=2, head_dim=16, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
             tie_word_embeddings=False),
    ),
}


@dataclass
class Oracle:
    """loss, per-row log-probs and entropies (entry 0 is 0), gradients by Hugging Face name."""

    loss: float
    logprobs: list[np.ndarray]
    entropies: list[np.ndarray]
    gradients: dict[str, torch.Tensor]


def make_model(folder: Path, kind: str, settings: dict, seed: int = 0) -> None:
    """A random model. Norm weights and biases too: ones and zeros would hide their absence."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name))
            else:
                parameter.mul_(4.0)  # far from uniform outputs
    model.save_pretrained(folder)


def add_redundant_head(source: Path, folder: Path) -> None:
    """The same tied model, whose file also holds lm_head.weight."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_rows(vocab_size: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(tokens, loss mask, weight per token) of long-tailed lengths."""
    generator = np.random.default_rng(7)
    rows = []
    for length in (5, 17, 9, 61, 12, 3, 33, 8):
        tokens = generator.integers(0, vocab_size, length)
        mask = np.ones(length, bool)
        mask[: min(3, length - 1)] = False
        rows.append((tokens, mask, generator.normal(size=length).astype(np.float32)))
    return rows


def compute_oracle(folder: Path) -> Oracle:
    """One row after the other, unpadded, eager attention, float32; experts one by one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rows = make_rows(model.config.vocab_size)
    logprobs, entropies, total = [], [], torch.zeros(())
    for tokens, mask, weight in rows:
        ids = torch.from_numpy(tokens)[None]
        distribution = torch.log_softmax(model(ids).logits[0, :-1] / TEMPERATURE, dim=-1)
        chosen = distribution.gather(-1, ids[0, 1:, None])[:, 0]
        entropy = -(distribution.exp() * distribution).sum(-1)
        kept = torch.from_numpy(mask[1:])
        total = total - (kept * (torch.from_numpy(weight[1:]) * chosen + ENTROPY_WEIGHT * entropy)).sum()
        logprobs.append(np.concatenate([[0.0], (chosen * kept).detach().numpy()]))
        entropies.append(np.concatenate([[0.0], (entropy * kept).detach().numpy()]))
    loss = total / sum(int(mask.sum()) for _, mask, _ in rows)
    loss.backward()
    gradients = {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return Oracle(float(loss), logprobs, entropies, per_expert(gradients))


def per_expert(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers keeps all experts of a layer in one tensor; its files and ours hold each by itself."""
    result = {}
    for name, gradient in gradients.items():
        stem, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            for number, both in enumerate(gradient):
                gate, up = both.chunk(2, dim=0)
                result[f"{stem}.experts.{number}.gate_proj.weight"] = gate
                result[f"{stem}.experts.{number}.up_proj.weight"] = up
        elif kind == "down_proj":
            for number, down in enumerate(gradient):
                result[f"{stem}.experts.{number}.down_proj.weight"] = down
        else:
            result[name] = gradient
    return result


def prepare(root: Path) -> None:
    """All models and their oracles below `root`."""
    for name, (kind, settings) in {**DENSE, **EXPERTS}.items():
        make_model(root / name, kind, settings)
    add_redundant_head(root / "qwen2-tied", root / "redundant-head")
    for name in (*DENSE, *EXPERTS):
        torch.save(compute_oracle(root / name).__dict__, root / f"{name}.oracle")
    torch.save(compute_oracle(root / "qwen2-tied").__dict__, root / "redundant-head.oracle")
    (root / "names.json").write_text(json.dumps({"dense": [*DENSE, "redundant-head"], "experts": list(EXPERTS)}))


if __name__ == "__main__":
    import sys

    os.environ["HF_HUB_OFFLINE"] = "1"
    prepare(Path(sys.argv[1]))
