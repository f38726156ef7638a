"""Rollout figures as ratios, each side of a ratio measured in the same run.

    python tools/bench_rollout.py --quick --json rollout.json

worker_over_bare_vllm   tokens/s of a whole rollout rank (leases in, scored shards out)
                        over vLLM's own LLM.generate on the same prompts and tokens
interrupt_over_drain    tokens/s with a weight update every step and long-tailed lengths,
                        rollout.on_update=interrupt over drain
update_over_floor_*     one update, from pause to resume, over a bare gloo broadcast of the
                        same bytes plus vLLM's load_weights of the same tensors in memory
                        (about 100 and 500 MB); transfer_s_* is the time before the pause,
                        in which generation goes on
reward_pool_speedup     two reward workers over one process (tools/bench_rewards.py)

The models are random and never end an answer, so that lengths are those of the leases. Each
part runs in a process of its own; this process plays controller and trainer.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch

from areal_hpc.config.schema import OnUpdate
from areal_hpc.messages import ShardReady
from areal_hpc.weights.transfer import TrainerWeights
from bench_rank import SEED, Rank, connect_trainer, long_tailed_lengths, make_config, make_model, prompt_text

MIB = 1024 * 1024
PARTS = ("worker", "interrupt", "update_100mb", "update_500mb", "rewards")


# ---- parts -------------------------------------------------------------------------


def bench_worker(folder: Path, quick: bool) -> dict[str, float]:
    """A rank against LLM.generate; both sides sample with logits' log-probabilities and seeds.

    Both engines stay up and take turns of about ten seconds: a machine that is slower for a
    while is so for both.
    """
    make_model(folder / "model", "small")
    lengths = long_tailed_lengths(24, 120, random.Random(SEED))
    group_size, turns = 8, 5 if quick else 21
    produced = sum(lengths) * group_size
    rank = Rank(make_config(folder / "model"), folder / "run")

    def rank_seconds() -> float:
        tokens, start = rank.engine.gauges.generated_tokens, time.perf_counter()
        rank.grant(lengths, group_size)
        done = 0
        while done < len(lengths):
            done += len(rank.collect().lease_ids)
        seconds = time.perf_counter() - start
        assert rank.engine.gauges.generated_tokens - tokens == produced, "an answer ended early"
        return seconds

    with bare_engine(folder / "model", lengths, group_size) as bare_seconds:
        seconds = []
        for turn in range(turns + 1):
            if turn % 2:
                worker = rank_seconds()
                seconds.append((worker, bare_seconds(turn)))
            else:
                bare = bare_seconds(turn)
                seconds.append((rank_seconds(), bare))
    rank.stop()
    # The first turn is a warm-up of both.
    return {
        "worker_over_bare_vllm": statistics.median(bare / worker for worker, bare in seconds[1:]),
        "worker_tokens_per_s": produced / statistics.median(worker for worker, _ in seconds[1:]),
        "bare_tokens_per_s": produced / statistics.median(bare for _, bare in seconds[1:]),
    }


@contextmanager
def bare_engine(model: Path, lengths: list[int], group_size: int) -> Iterator[Callable[[int], float]]:
    """LLM.generate in a process of its own; yields a function that answers one turn's prompts in seconds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # No daemon: it has the engine's processes below it.
    peer = context.Process(target=_bare_turns, args=(theirs, model, lengths, group_size))
    peer.start()
    theirs.close()

    def once(turn: int) -> float:
        ours.send(turn)
        return ours.recv()

    try:
        yield once
    finally:
        ours.close()
        peer.join(60.0)
        peer.kill()


def _bare_turns(connection, model: Path, lengths: list[int], group_size: int) -> None:
    from vllm import LLM, SamplingParams

    from areal_hpc.rollout.engine import engine_arguments
    from areal_hpc.rollout.environment import engine_cores_of_process, engine_environment
    from areal_hpc.rollout.tokens import load_tokenizer

    config = make_config(model)
    with engine_environment(engine_cores_of_process(config), os.devnull, 600.0):
        arguments = engine_arguments(config, 0)
        del arguments["enable_log_requests"]
        llm = LLM(**arguments)
    tokenizer = load_tokenizer(config.model.tokenizer)
    while True:
        try:
            turn = connection.recv()
        except EOFError:
            break
        prompts, params = [], []
        for number, length in enumerate(lengths):
            ids = tokenizer(prompt_text(turn * len(lengths) + number + 1)).input_ids
            for index in range(group_size):
                prompts.append({"prompt_token_ids": ids})
                params.append(
                    SamplingParams(
                        max_tokens=length, logprobs=0, seed=number * group_size + index, detokenize=False
                    )
                )
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(output.outputs[0].token_ids) for output in outputs] == [
            length for length in lengths for _ in range(group_size)
        ], "an answer ended early"
        connection.send(seconds)
    llm.llm_engine.engine_core.shutdown(timeout=0)


def bench_interrupt(folder: Path, quick: bool) -> dict[str, float]:
    """Steps of a batch each; a publication after every step, generation full at all times."""
    model = make_model(folder / "model", "small")
    rank = Rank(make_config(folder / "model", max_num_seqs=32), folder / "run")
    rng = random.Random(SEED)
    trainer = connect_trainer(rank, model)
    steps, rounds = (4, 2) if quick else (8, 3)
    rates: dict[OnUpdate, list[float]] = {OnUpdate.interrupt: [], OnUpdate.drain: []}
    version = 0
    for _ in range(rounds):
        for mode in rates:
            rank.config.rollout.on_update = mode
            version, rate = _steps(rank, trainer, rng, version, steps)
            rates[mode].append(rate)
    rank.stop()
    interrupt, drain = (statistics.median(values) for values in rates.values())
    return {
        "interrupt_over_drain": interrupt / drain,
        "interrupt_tokens_per_s": interrupt,
        "drain_tokens_per_s": drain,
    }


def _steps(
    rank: Rank, trainer: TrainerWeights, rng: random.Random, version: int, steps: int
) -> tuple[int, float]:
    """Tokens/s over `steps` publications, each after a batch of answers has come in."""
    group_size, batch, ahead = 4, 32, 96
    waiting = 0
    arrived = 0
    publishing: threading.Thread | None = None
    published = 0
    start, tokens = time.perf_counter(), rank.engine.gauges.generated_tokens
    while published < steps or waiting:
        lengths = long_tailed_lengths(max(0, ahead - waiting) // group_size, 120, rng)
        if lengths and published < steps:
            rank.grant(lengths, group_size)
            waiting += len(lengths) * group_size
        try:
            shard = rank.channel.receive(ShardReady, 0.005, "a shard").message
            waiting -= len(shard.rows)
            arrived += len(shard.rows)
        except TimeoutError:
            pass
        if publishing is not None and not publishing.is_alive():
            publishing = None
            published += 1
            if published == steps:
                seconds = time.perf_counter() - start
                produced = rank.engine.gauges.generated_tokens - tokens
        if arrived >= batch and publishing is None and published < steps:
            arrived -= batch
            version += 1
            publishing = threading.Thread(target=trainer.publish, args=(version,), daemon=True)
            publishing.start()
    return version, produced / seconds


def bench_update(folder: Path, quick: bool, size: str) -> dict[str, float]:
    """Updates of an engine with requests under way, between measurements of the floor."""
    model = make_model(folder / "model", size)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    config = make_config(folder / "model", max_num_seqs=8)
    config.rollout.engine_options = {"worker_extension_cls": "bench_worker.BenchCalls"}
    rank = Rank(config, folder / "run")
    trainer = connect_trainer(rank, model)
    trainer.publish(1)
    transfers, updates, broadcasts, loads = [], [], [], []
    with broadcast_peer(num_bytes) as broadcast:
        for version in range(2, 6 if quick else 10):
            rank.grant([200], group_size=4)
            time.sleep(0.5)
            timings = trainer.publish(version)
            transfers.append(timings["stage_s"])
            updates.append(timings["pause_to_resume_s"])
            rank.collect()
            broadcasts.append(broadcast())
            loads.append(_load_in_memory(rank))
    rank.stop()
    update = statistics.median(updates)
    floor = statistics.median(broadcasts) + statistics.median(loads)
    return {
        f"update_over_floor_{size}": update / floor,
        f"update_s_{size}": update,
        f"transfer_s_{size}": statistics.median(transfers),
        f"broadcast_s_{size}": statistics.median(broadcasts),
        f"load_s_{size}": statistics.median(loads),
        f"megabytes_{size}": num_bytes / 1e6,
    }


def _load_in_memory(rank: Rank) -> float:
    """Seconds of vLLM's reload of the tensors of the last update, from the worker's private memory."""
    import asyncio

    async def call() -> list[float]:
        info = rank.updates._served.info
        return await rank.engine._llm.collective_rpc("bench_load", args=(info,))

    # The engine belongs to the rank's event loop.
    return asyncio.run_coroutine_threadsafe(call(), rank.engine._llm.output_handler.get_loop()).result()[0]


@contextmanager
def broadcast_peer(num_bytes: int) -> Iterator[Callable[[], float]]:
    """A second process to broadcast to; yields a function that does it once and returns seconds."""
    from torch.distributed import ProcessGroupGloo, TCPStore

    timeout = timedelta(seconds=120)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    peer = multiprocessing.get_context("spawn").Process(
        target=_receive_broadcasts, args=(store.port, num_bytes), daemon=True
    )
    peer.start()
    group = ProcessGroupGloo(store, 0, 2, timeout)
    data = torch.ones(num_bytes, dtype=torch.uint8)

    def once() -> float:
        _broadcast(group, torch.ones(1))
        start = time.perf_counter()
        for bucket in data.split(16 * MIB):
            _broadcast(group, bucket)
        return time.perf_counter() - start

    yield once
    peer.kill()


def _receive_broadcasts(port: int, num_bytes: int) -> None:
    from torch.distributed import ProcessGroupGloo, TCPStore

    timeout = timedelta(seconds=120)
    group = ProcessGroupGloo(TCPStore("127.0.0.1", port, is_master=False, timeout=timeout), 1, 2, timeout)
    data = torch.empty(num_bytes, dtype=torch.uint8)
    while True:
        _broadcast(group, torch.ones(1))
        for bucket in data.split(16 * MIB):
            _broadcast(group, bucket)


def _broadcast(group, tensor: torch.Tensor) -> None:
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


def run_part(part: str, quick: bool) -> dict[str, float]:
    if part == "rewards":
        from bench_rewards import measure_pool_speedup

        return measure_pool_speedup(1000 if quick else 5000)
    with tempfile.TemporaryDirectory(prefix="bench-rollout-") as folder:
        if part == "worker":
            return bench_worker(Path(folder), quick)
        if part == "interrupt":
            return bench_interrupt(Path(folder), quick)
        return bench_update(Path(folder), quick, part.removeprefix("update_"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer prompts, steps and repeats")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part (may be repeated)")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_process:
        [part] = arguments.part
        print("figures: " + json.dumps(run_part(part, arguments.quick)), flush=True)
        # Threads of gloo and vLLM have nothing to finish.
        os._exit(0)
    figures: dict[str, float] = {}
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "VLLM_LOGGING_LEVEL": "ERROR"}
    for part in arguments.part or PARTS:
        command = [sys.executable, __file__, "--in-process", "--part", part]
        command += ["--quick"] if arguments.quick else []
        result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=1800)
        lines = [line for line in result.stdout.splitlines() if line.startswith("figures: ")]
        if result.returncode or not lines:
            sys.exit(f"bench_rollout: part {part} failed (exit code {result.returncode})")
        found = json.loads(lines[-1].removeprefix("figures: "))
        figures |= found
        for name, value in found.items():
            print(f"{name}: {value:.4g}", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
