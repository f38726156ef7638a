"""Makes the spool and the journal of a large run, with the writers that runs use.

    python tools/make_spool.py FOLDER [--trajectories 100000] [--tokens 200]

The folder then serves every `areal-hpc spool` command: shards of two rollout ranks, 4 MB each,
a journal in which every group was trained (batches of 1,024, one version a step) and a
byte-level tokenizer in FOLDER/tokenizer. Contents are made up from a seed.
"""

from __future__ import annotations

import argparse
import os
import string
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from areal_hpc.controller.ledger import Ledger
from areal_hpc.data.byte_tokenizer import save_byte_tokenizer
from areal_hpc.paths import RunPaths
from areal_hpc.spool.shard import TOKEN_BYTES, ShardWriter
from areal_hpc.types import PROMPT_VERSION, Trajectory

GROUP_SIZE = 8
BATCH_GROUPS = 128
PROMPT_TOKENS = 60
SHARD_BYTES = 4 * 1024 * 1024
NUM_PROMPTS = 32 * BATCH_GROUPS
"""A multiple of the batch: no batch spans two epochs, as in a run."""
LETTERS = string.ascii_letters + string.digits + " .,+=\n"


def make_group(
    generator: np.random.Generator, letters: np.ndarray, group: int, version: int, mean_tokens: int
) -> list[Trajectory]:
    """Long-tailed answers (log-normal) to one prompt, begun at `version` or one before it."""
    prompt = generator.choice(letters, PROMPT_TOKENS)
    mu = np.log(mean_tokens) - 0.32  # the mean of exp(N(mu, 0.8^2)) is mean_tokens
    lengths = np.clip(np.rint(generator.lognormal(mu, 0.8, GROUP_SIZE)), 1, 20 * mean_tokens).astype(int)
    found = []
    for sample, length in enumerate(lengths.tolist()):
        mask = np.zeros(PROMPT_TOKENS + length, np.uint8)
        mask[PROMPT_TOKENS:] = 1
        logprobs = -generator.random(len(mask), dtype=np.float32)
        logprobs[:PROMPT_TOKENS] = 0
        versions = np.full(len(mask), version, np.int32)
        versions[: PROMPT_TOKENS + length // 2] = max(0, version - 1)
        versions[:PROMPT_TOKENS] = PROMPT_VERSION
        right = float(generator.random() < 0.6)
        found.append(
            Trajectory(
                tokens=np.r_[prompt, generator.choice(letters, length)],
                loss_mask=mask,
                rollout_logprobs=logprobs,
                versions=versions,
                reward=right,
                prompt_id=group % NUM_PROMPTS,
                group_id=group,
                sample_index=sample,
                finish_reason="stop",
                reward_parts={"math": right},
            )
        )
    return found


def make_spool(folder: Path, num_trajectories: int, mean_tokens: int, seed: int = 0) -> RunPaths:
    """Write the run folder; at most one shard's trajectories are in memory."""
    paths = RunPaths(folder)
    paths.create()
    (folder / "tokenizer").mkdir(exist_ok=True)
    save_byte_tokenizer(folder / "tokenizer")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    letters = np.array(tokenizer.encode(LETTERS).ids, np.int32)
    generator = np.random.default_rng(seed)
    writers = [ShardWriter(paths.rollout_spool(rank), "made", rank) for rank in range(2)]
    ledger = Ledger(paths.ledger)
    ledger.add(
        "run", attempt=1, train_step=0, data="made", config="made", batch_size=BATCH_GROUPS * GROUP_SIZE,
        group_size=GROUP_SIZE, max_staleness=1, overlap=False, num_prompts=NUM_PROMPTS, time=0.0,
    )  # fmt: skip
    num_groups = -(-num_trajectories // GROUP_SIZE)
    pending: list[Trajectory] = []
    for first in range(0, num_groups, BATCH_GROUPS):
        groups = range(first, min(first + BATCH_GROUPS, num_groups))
        step = first // BATCH_GROUPS + 1
        for group in groups:
            ledger.add("admitted", group=group, epoch=group // NUM_PROMPTS, version=step - 1)
            pending += make_group(generator, letters, group, step - 1, mean_tokens)
            if TOKEN_BYTES * sum(one.num_tokens for one in pending) >= SHARD_BYTES:
                _commit(writers[group % 2], ledger, paths, pending)
        if pending:
            _commit(writers[step % 2], ledger, paths, pending)
        ledger.add("consumed", train_step=step, version=step - 1, groups=list(groups))
        ledger.add("live", version=step)
        ledger.sync()
    ledger.close()
    return paths


def _commit(writer: ShardWriter, ledger: Ledger, paths: RunPaths, pending: list[Trajectory]) -> None:
    info = writer.commit(pending)
    rows: dict[int, list] = {}
    for row in info.rows:
        rows.setdefault(row.group_id, []).append(row)
    groups = [{"group": group, "epoch": group // NUM_PROMPTS, "rows": found} for group, found in rows.items()]
    ledger.add("committed", path=paths.relative(info.path), digest=info.digest, groups=groups)
    pending.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="run folder to make; must not exist")
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=200, help="mean answer (default 200)")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists: name a folder to make")
    os.umask(0o077)
    make_spool(arguments.folder, arguments.trajectories, arguments.tokens)


if __name__ == "__main__":
    main()
