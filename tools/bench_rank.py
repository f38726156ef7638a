"""A whole rollout rank in a thread, and the models and lengths that bench_rollout drives it with.

The thread runs the rank's own loop with a real engine; this process plays controller and trainer.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import torch

from areal_hpc.config.schema import Config
from areal_hpc.data.byte_tokenizer import END_ID, save_byte_tokenizer
from areal_hpc.messages import GrantLeases, Message, RolloutReady, ShardReady, Stop
from areal_hpc.mpi.channel import LocalNetwork
from areal_hpc.mpi.world import World
from areal_hpc.paths import RunPaths
from areal_hpc.rollout.engine import RolloutEngine
from areal_hpc.rollout.updates import EngineUpdates
from areal_hpc.telemetry import Telemetry
from areal_hpc.types import Lease, Prompt, SamplingSpec
from areal_hpc.weights.transfer import TrainerWeights

SEED = 1
MODELS = {
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": END_ID},
    "100mb": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 7, "vocab_size": 8192},
    "500mb": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 9, "vocab_size": 16384},
}


def make_model(folder: Path, size: str) -> torch.nn.Module:
    """A random Qwen2, saved as a Hugging Face folder; the small one cannot say the end token."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(SEED)
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    model = Qwen2ForCausalLM(Qwen2Config(**MODELS[size], **shape, **ends, tie_word_embeddings=True))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return model


def make_config(folder: Path, max_num_seqs: int = 64) -> Config:
    config = Config()
    config.model.path = config.model.tokenizer = str(folder)
    config.model.max_context = 1280
    config.rollout.max_num_seqs = max_num_seqs
    config.rollout.kv_cache_gib = 0.5
    config.rollout.enforce_eager = True
    config.rewards.fn = "math"
    return config


def long_tailed_lengths(count: int, mean: int, rng: random.Random) -> list[int]:
    """Lognormal lengths as reasoning answers have them: most short, some many times longer."""
    return [max(8, min(1000, int(rng.lognormvariate(0.0, 1.0) * mean / 1.65))) for _ in range(count)]


class Rank:
    """A whole rollout rank in a thread of this process."""

    def __init__(self, config: Config, folder: Path) -> None:
        from areal_hpc.rollout import loop

        def recorded_engine(*arguments: object, **options: object) -> RolloutEngine:
            self.engine = RolloutEngine(*arguments, **options)
            return self.engine

        def recorded_updates(*arguments: object) -> EngineUpdates:
            self.updates = EngineUpdates(*arguments)
            return self.updates

        loop.RolloutEngine, loop.EngineUpdates = recorded_engine, recorded_updates
        network = LocalNetwork(3)
        self.config, self.paths = config, RunPaths(folder)
        self.paths.create()
        self.telemetry = Telemetry(self.paths.spans("bench", 0))
        self.worlds = [
            World(role, 0, rank, (1,), (2,), ("localhost",) * 3, network.channel(rank))
            for rank, role in enumerate(("controller", "trainer", "rollout"))
        ]
        self.channel = self.worlds[0].channel
        self.leases = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(loop.run,), daemon=True)
        self._thread.start()
        self.wait(RolloutReady)

    def _run(self, run) -> None:
        try:
            run(self.config, self.worlds[2], self.paths, self.telemetry)
        except BaseException as error:
            self._error = error

    def wait(self, kind: type[Message]) -> Message:
        end = time.monotonic() + 300.0
        while time.monotonic() < end:
            if self._error is not None:
                raise self._error
            try:
                return self.channel.receive(kind, 1.0, "the rank").message
            except TimeoutError:
                continue
        raise TimeoutError(f"no {kind.__name__} within 300 s")

    def grant(self, lengths: list[int], group_size: int) -> None:
        """One lease for each length."""
        leases = []
        for length in lengths:
            self.leases += 1
            spec = SamplingSpec(max_new_tokens=length)
            prompt = Prompt(self.leases, prompt_text(self.leases), gold="7")
            leases.append(Lease(self.leases, self.leases, 0, 1, group_size, prompt, spec))
        self.channel.send(2, GrantLeases(tuple(leases)))

    def collect(self) -> ShardReady:
        return self.wait(ShardReady)

    def stop(self) -> None:
        self.channel.send(2, Stop("done"))
        self._thread.join(60.0)


def prompt_text(number: int) -> str:
    return f"Problem {number}: add {number * 37 % 1000} and {number * 91 % 1000}, step by step. Answer: "


def connect_trainer(rank: Rank, model: torch.nn.Module) -> TrainerWeights:
    trainer = TrainerWeights(
        rank.config,
        rank.worlds[1],
        rank.paths,
        lambda: [(name, p.dtype, tuple(p.shape)) for name, p in model.named_parameters()],
        lambda: ((name, p.data) for name, p in model.named_parameters()),
        rank.telemetry,
    )
    trainer.connect((2,))
    return trainer
