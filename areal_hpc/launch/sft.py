"""`areal-hpc sft`: checks, prepares the starting weights and starts the trainer ranks with mpiexec."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.model_rules import check_model
from areal_hpc.config.sft_schema import SftConfig, load_sft_config, sft_config_yaml
from areal_hpc.data.byte_tokenizer import END_ID, VOCAB_SIZE, save_byte_tokenizer
from areal_hpc.data.examples import load_examples
from areal_hpc.launch.local import find_mpiexec, rank_environment
from areal_hpc.launch.preflight import read_model_folder


def run_sft(config_path: str, overrides: list[str]) -> int:
    """Train and write the Hugging Face folder; returns the exit code."""
    config = load_sft_config(config_path, overrides)
    output = Path(config.output).expanduser().resolve()
    if output.exists():
        raise ConfigError(f"output={config.output} exists already; choose another folder")
    examples = load_examples(config.data)
    output.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    # Beside the output: the same filesystem, which every rank sees.
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as work:
        folder = Path(work)
        if not config.init.path:
            config.init.path = str(folder / "init")
            make_scratch_model(config, Path(config.init.path))
        else:
            layout = config.trainer
            model = read_model_folder(config.init.path, "init.path")
            check_model(model, tp=layout.tp, pp=layout.pp, dp=layout.dp, key="init.path")
        config.output = str(output)
        (folder / "sft.yaml").write_text(sft_config_yaml(config))
        print(f"sft: {len(examples)} examples, {config.trainer.steps} steps of {config.trainer.batch_size}, "
              f"{config.trainer.ranks} trainer ranks", flush=True)
        code = _start(config, folder)
    if code == 0:
        print(f"sft: wrote {config.output} in {time.monotonic() - start:.0f} s", flush=True)
    return code


def _start(config: SftConfig, folder: Path) -> int:
    environment = rank_environment()
    cores = len(os.sched_getaffinity(0))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // config.trainer.ranks)))
    command = [
        find_mpiexec(), "-n", str(config.trainer.ranks),
        sys.executable, "-m", "areal_hpc.trainer.sft", "--config", str(folder / "sft.yaml"),
    ]  # fmt: skip
    log = folder / "log"
    with open(log, "w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=errors)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            return 130
    if code:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        print("\n".join(tail), file=sys.stderr)
        print("areal-hpc: supervised training failed; the last lines of its log are above", file=sys.stderr)
    return 1 if code else 0


def make_scratch_model(config: SftConfig, folder: Path) -> None:
    """Write a randomly initialised Qwen2-architecture model and the byte-level tokenizer."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    scratch = config.init.scratch
    folder.mkdir()
    torch.manual_seed(config.seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=scratch.hidden_size,
            num_hidden_layers=scratch.num_layers,
            num_attention_heads=scratch.num_heads,
            num_key_value_heads=scratch.num_kv_heads,
            intermediate_size=scratch.intermediate_size,
            max_position_embeddings=scratch.max_positions,
            tie_word_embeddings=scratch.tie_embeddings,
            bos_token_id=END_ID,
            eos_token_id=END_ID,
            pad_token_id=END_ID,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=END_ID, pad_token_id=END_ID, bos_token_id=END_ID)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
