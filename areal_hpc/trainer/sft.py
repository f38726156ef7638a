"""Supervised training: `python -m areal_hpc.trainer.sft --config FILE` on every trainer rank.

Started by `areal-hpc sft` (mpiexec) or srun. Reads prompt/response examples, trains the
response tokens with the same model, layouts and optimizer as reinforcement learning, and
writes a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from areal_hpc.config.load import merge_config
from areal_hpc.config.sft_schema import SftConfig
from areal_hpc.data.examples import load_examples
from areal_hpc.telemetry import setup_logging
from areal_hpc.terminal import echo, keep_terminal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, type=Path)
    config = merge_config(SftConfig, parser.parse_args().config)
    keep_terminal()
    from areal_hpc.mpi.world import load_mpi, strip_launcher_environment

    communicator = load_mpi()
    rank, size = communicator.Get_rank(), communicator.Get_size()
    setup_logging(None, label=f"sft[{rank}]")
    try:
        if size != config.trainer.ranks:
            raise RuntimeError(f"MPI world has {size} ranks but trainer.tp*pp*dp = {config.trainer.ranks}")
        host, port = _meeting_point(communicator)
        strip_launcher_environment()
        train(config, rank, host, port)
    except BaseException as error:
        logging.exception("supervised training failed")
        echo(f"areal-hpc: sft rank {rank} failed: {type(error).__name__}: {' '.join(str(error).split())}")
        communicator.Abort(1)
    from mpi4py import MPI

    MPI.Finalize()
    # gloo's threads may still wait for peers that have left.
    os._exit(0)


def _meeting_point(communicator) -> tuple[str, int]:
    """Address of rank 0 and a port that is free there, known to all ranks."""
    import socket

    from mpi4py import MPI

    from areal_hpc.trainer.parallel import free_port

    names = [None] * communicator.Get_size()
    names = communicator.allgather(socket.gethostname())
    host = "127.0.0.1" if len(set(names)) == 1 else names[0]
    port = np.array([free_port() if communicator.Get_rank() == 0 else 0], dtype=np.int64)
    communicator.Bcast([port, MPI.INT64_T], root=0)
    return host, int(port[0])


def train(config: SftConfig, rank: int, host: str, port: int) -> None:
    """The whole training of one rank; writes config.output."""
    import torch

    from areal_hpc.trainer.export import export_hf
    from areal_hpc.trainer.megatron import MegatronTrainer
    from areal_hpc.trainer.model import ModelOptions
    from areal_hpc.trainer.parallel import Layout, start

    trainer_config = config.trainer
    layout = Layout(trainer_config.tp, trainer_config.pp, trainer_config.dp)
    place = start(layout, rank=rank, host=host, port=port, device=config.device.value,
                  timeout_s=config.timeout_s, seed=config.seed)  # fmt: skip
    options = ModelOptions(dtype=getattr(torch, config.init.dtype), recompute=trainer_config.recompute)
    trainer = MegatronTrainer(
        place, config.init.path, options, optimizer=trainer_config.optimizer, total_updates=trainer_config.steps
    )
    rows = make_rows(config)
    begun = time.monotonic()
    for step, chosen in enumerate(batches(len(rows), trainer_config.batch_size, config.seed), start=1):
        loss, update = update_once(trainer, config, rows, chosen)
        if place.rank == place.layout.size - 1 and (step % config.log_every == 0 or step == trainer_config.steps):
            echo(f"sft: step {step}/{trainer_config.steps} loss {loss:.4f} lr {update.lr:.2e} "
                 f"grad norm {update.grad_norm:.3f} {time.monotonic() - begun:.0f} s")
        if step == trainer_config.steps:
            break
    export_hf(trainer, Path(config.output))
    torch.distributed.barrier()


def make_rows(config: SftConfig) -> list:
    """Tokenized examples: prompt, response, end of sequence; loss on the last two."""
    from transformers import AutoTokenizer

    from areal_hpc.config.errors import ConfigError
    from areal_hpc.trainer.batch import Row

    tokenizer = AutoTokenizer.from_pretrained(config.init.path, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"init.path={config.init.path}: the tokenizer has no end-of-sequence token")
    rows = []
    for number, (prompt, response) in enumerate(load_examples(config.data)):
        before = tokenizer(prompt).input_ids
        after = tokenizer(response, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
        if len(before) + len(after) > config.data.max_length:
            raise ConfigError(
                f"example {number} has {len(before) + len(after)} tokens, more than "
                f"data.max_length={config.data.max_length}: raise it or shorten the example"
            )
        mask = np.concatenate([np.zeros(len(before), bool), np.ones(len(after), bool)])
        rows.append(Row(np.array(before + after, dtype=np.int64), {"loss_mask": mask}))
    return rows


def batches(num_rows: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Endless batches; every example once before any comes again."""
    generator, queue = random.Random(seed), []
    while True:
        while len(queue) < batch_size:
            order = list(range(num_rows))
            generator.shuffle(order)
            queue += order
        yield queue[:batch_size]
        queue = queue[batch_size:]


def update_once(trainer, config: SftConfig, rows: list, chosen: list[int]):
    """One update on the examples `chosen` (the same on every rank); the mean loss per token."""
    import torch
    import torch.distributed as dist

    from areal_hpc.trainer.microbatch import balanced, pad_count
    from areal_hpc.trainer.objective import LossOutput

    dp = trainer.place.layout.dp
    # Every rank works out every rank's micro-batches: no collective is needed to agree.
    shares = [chosen[rank::dp] for rank in range(dp)]
    cut = [balanced([rows[index].num_tokens for index in share], config.trainer.micro_batch_tokens) for share in shares]
    count = max(map(len, cut))
    mine = [rows[index] for index in shares[trainer.place.dp_rank]]
    denominator = float(sum(rows[index].values["loss_mask"][1:].sum() for index in chosen))

    def loss_fn(micro_batch, logprobs, _entropies) -> LossOutput:
        kept = torch.where(micro_batch.loss_mask, logprobs, torch.zeros_like(logprobs))
        return LossOutput(-kept.sum() / denominator, {}, {})

    result = trainer.train_minibatch(mine, pad_count(cut[trainer.place.dp_rank], count), ["loss_mask"], loss_fn)
    total = torch.tensor([result.loss], dtype=torch.float64, device=trainer.place.device)
    dist.all_reduce(total)
    return float(total), result.update


if __name__ == "__main__":
    sys.exit(main())
