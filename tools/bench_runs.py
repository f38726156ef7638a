"""Short real runs for benchmarks: a random model of the quickstart's size, and `areal-hpc run` on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parent
CONFIG = TOOLS.parent / "configs" / "quickstart.yaml"
OVERRIDES = (
    "data.heldout.task=", "data.heldout.size=0", "checkpoint.every=0", "checkpoint.export_hf=false",
    "rollout.workflow=bench_workflow:LongTailed", "rewards.fn=length", "trainer.weight_history=1",
    "trainer.optimizer.lr=1.0e-6", "trainer.optimizer.min_lr=0", "trainer.optimizer.warmup_steps=0",
)  # fmt: skip
"""The quickstart without evaluations and checkpoints, its answers as long as tools/bench_workflow.py draws them."""


def make_model(folder: Path) -> None:
    """A Qwen2 as small as the quickstart's, random, without a token that ends an answer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from areal_hpc.data.byte_tokenizer import END_ID, save_byte_tokenizer

    torch.manual_seed(0)
    shape = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 2048, "vocab_size": END_ID,
    }  # fmt: skip
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, **ends, tie_word_embeddings=True))
    model.generation_config.eos_token_id = None
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)


def run_system(folder: Path, model: Path, overrides: list[str], timeout_s: float = 1800.0) -> None:
    """One whole run into `folder`; ends the program with the run's own output if it fails."""
    command = [sys.executable, "-m", "areal_hpc.cli", "run", str(CONFIG), f"run.folder={folder}", f"model.path={model}"]
    path = os.pathsep.join(filter(None, (str(TOOLS), os.environ.get("PYTHONPATH", ""))))
    result = subprocess.run(
        [*command, *OVERRIDES, *overrides],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    if result.returncode:
        sys.exit(f"run in {folder} ended with exit code {result.returncode}:\n{result.stdout[-3000:]}")
