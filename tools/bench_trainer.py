"""Trainer throughput as ratios measured in one run.

    python tools/bench_trainer.py [--quick] [--json FILE]

packed_over_padded: tokens/s of one update over long-tailed lengths, packed by Algorithm 1
within a token budget, over padded micro-batches of a fixed count of sequences in order of
arrival. trainer_over_transformers: tokens/s of one update of this trainer (one rank) over
plain transformers with torch.optim.AdamW on the same sequences of one length. Both sides
of a ratio take turns; the figure is the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch


def make_model(folder: Path) -> None:
    """A model of the quickstart's size."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
        )
    ).save_pretrained(folder)


def make_rows(lengths: list[int]) -> list:
    from areal_hpc.trainer.batch import Row

    generator = np.random.default_rng(1)
    return [
        Row(generator.integers(0, 1024, length), {"loss_mask": np.arange(length) > 0}) for length in lengths
    ]


def long_tailed(num: int, longest: int) -> list[int]:
    """Lengths as reasoning models write them: most short, a few at the limit."""
    generator = np.random.default_rng(2)
    return [int(length) for length in np.clip(generator.lognormal(4.6, 0.9, num), 16, longest)]


class Ours:
    """One update of the project's trainer."""

    def __init__(self, folder: Path) -> None:
        from areal_hpc.config.schema import OptimizerConfig
        from areal_hpc.trainer import parallel
        from areal_hpc.trainer.megatron import MegatronTrainer
        from areal_hpc.trainer.model import ModelOptions

        place = parallel.start(
            parallel.Layout(), rank=0, host="127.0.0.1", port=parallel.free_port(), device="cpu", timeout_s=120.0
        )
        self._engine = MegatronTrainer(
            place, folder, ModelOptions(), optimizer=OptimizerConfig(lr=1e-4), total_updates=1000
        )

    def update(self, rows: list, micro_batches: list[list[int]]) -> None:
        from areal_hpc.trainer.objective import LossOutput

        total = float(sum(int(row.values["loss_mask"].sum()) for row in rows))

        def loss(micro_batch, logprobs, _entropy):
            return LossOutput(-torch.where(micro_batch.loss_mask, logprobs, 0.0).sum() / total, {}, {})

        self._engine.train_minibatch(rows, micro_batches, ["loss_mask"], loss)


class Transformers:
    """One update of plain transformers and torch, on sequences of one length."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.05
        )

    def update(self, rows: list) -> None:
        tokens = torch.from_numpy(np.stack([row.tokens for row in rows]))
        self._optimizer.zero_grad()
        logits = self._model(tokens).logits[:, :-1]
        chosen = torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]
        (-chosen.sum() / chosen.numel()).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()


def pad(rows: list, micro_batches: list[list[int]]) -> list:
    """Each row filled up to the longest of its micro-batch, with untrained tokens."""
    from areal_hpc.trainer.batch import Row

    result = list(rows)
    for micro_batch in micro_batches:
        longest = max(rows[index].num_tokens for index in micro_batch)
        for index in micro_batch:
            missing = longest - rows[index].num_tokens
            result[index] = Row(
                np.pad(rows[index].tokens, (0, missing)),
                {"loss_mask": np.pad(rows[index].values["loss_mask"], (0, missing))},
            )
    return result


def compare(first, second, turns: int) -> tuple[float, float, float]:
    """(seconds of first, seconds of second, median of second/first) over alternating turns."""
    first(), second()  # warm-up
    times: list[tuple[float, float]] = []
    for turn in range(turns):
        measured = {}
        for name, run in sorted({"first": first, "second": second}.items(), reverse=bool(turn % 2)):
            begin = time.perf_counter()
            run()
            measured[name] = time.perf_counter() - begin
        times.append((measured["first"], measured["second"]))
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return medians[0], medians[1], statistics.median(second / first for first, second in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter sequences, fewer turns")
    parser.add_argument("--json", type=Path, help="write the ratios to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    from areal_hpc.trainer.microbatch import balanced, padded

    budget, longest = (1024, 512) if options.quick else (2048, 1024)
    turns = 7 if options.quick else 21
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        ours, plain = Ours(folder), Transformers(folder)

        lengths = long_tailed(32 if options.quick else 64, longest)
        rows = make_rows(lengths)
        packed = balanced(lengths, budget)
        fixed = padded(lengths, budget // longest)
        filled = pad(rows, fixed)
        packing = compare(lambda: ours.update(rows, packed), lambda: ours.update(filled, fixed), turns)

        same = make_rows([128] * 16)
        single = [list(range(len(same)))]
        stack = compare(lambda: ours.update(same, single), lambda: plain.update(same), turns)

    tokens, equal = sum(lengths), sum(row.num_tokens for row in same)
    print(f"{torch.get_num_threads()} threads, {turns} turns, lengths {min(lengths)} to {max(lengths)}")
    print(f"{'update':<44}{'micro-batches':>14}{'tokens/s':>12}{'ratio':>8}")
    for label, count, rate, ratio in (
        ("packed, Algorithm 1", len(packed), tokens / packing[0], packing[2]),
        (f"padded, {budget // longest} sequences each", len(fixed), tokens / packing[1], 1.0),
        ("this trainer, one rank", 1, equal / stack[0], stack[2]),
        ("transformers + torch.optim.AdamW", 1, equal / stack[1], 1.0),
    ):
        print(f"{label:<44}{count:>14}{rate:>12.0f}{ratio:>8.2f}")
    figures = {"packed_over_padded": round(packing[2], 3), "trainer_over_transformers": round(stack[2], 3)}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
