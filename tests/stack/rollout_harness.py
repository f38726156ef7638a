"""A real rollout rank (vLLM, rewards, spool) in a thread; the test plays controller and trainer.

World: rank 0 controller, rank 1 trainer lead, rank 2.. rollouts, over the in-process network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from areal_hpc.config.schema import Config
from areal_hpc.data.byte_tokenizer import END_ID, VOCAB_SIZE, save_byte_tokenizer
from areal_hpc.messages import (
    GrantLeases,
    LeaseFailed,
    Message,
    RolloutReady,
    ShardReady,
    Stop,
)
from areal_hpc.mpi.channel import LocalNetwork
from areal_hpc.mpi.world import World
from areal_hpc.paths import RunPaths
from areal_hpc.rollout.engine import RolloutEngine
from areal_hpc.spool.shard import read_rows
from areal_hpc.telemetry import Telemetry
from areal_hpc.types import Begun, Lease, Prompt, SamplingSpec, Trajectory
from areal_hpc.weights.transfer import TrainerWeights

TensorsFn = Callable[[], Iterator[tuple[str, torch.Tensor]]]

SECOND_END_ID = 257
"""A further end-of-sequence id of the test model, known only to its generation_config."""


def make_model(
    folder: Path, *, seed: int = 0, hidden: int = 128, layers: int = 2, vocab: int = VOCAB_SIZE + 7, tied: bool = True
) -> Qwen2ForCausalLM:
    """A random Qwen2, with tied embeddings or not, whose answers are long and lively, with the byte tokenizer."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=2 * hidden,
            max_position_embeddings=1024,
            tie_word_embeddings=tied,
            bos_token_id=END_ID,
            eos_token_id=END_ID,
            pad_token_id=END_ID,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=[END_ID, SECOND_END_ID], pad_token_id=END_ID)
    shake(model, seed + 1, 0.05)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return model.eval()


def shake(model: Qwen2ForCausalLM, seed: int, scale: float) -> None:
    """Change every weight a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def make_config(model: Path, **overrides: object) -> Config:
    """A small rollout on CPU; overrides by dotted key with __ for the dot."""
    config = Config()
    config.model.path = config.model.tokenizer = str(model)
    config.model.max_context = 512
    config.rollout.kv_cache_gib = 0.25
    config.rollout.max_num_seqs = 32
    config.rollout.enforce_eager = True
    config.rewards.fn = "math"
    config.weights.timeout_s = 240.0
    config.weights.bucket_bytes = 1 << 20
    for key, value in overrides.items():
        *groups, name = key.split("__")
        node = config
        for group in groups:
            node = getattr(node, group)
        assert hasattr(node, name), key
        setattr(node, name, value)
    return config


class Director:
    """Controller and trainer lead of a test."""

    def __init__(self, config: Config, root: Path, num_rollouts: int = 1) -> None:
        self.config = config
        self.paths = RunPaths(root)
        self.paths.create()
        self.num_rollouts = num_rollouts
        network = LocalNetwork(2 + num_rollouts)
        self._worlds = [self._world(network, rank) for rank in range(2 + num_rollouts)]
        self.channel = self._worlds[0].channel
        self.telemetry = Telemetry(self.paths.spans("test", 0))
        self.error: BaseException | None = None
        self.engines: dict[int, RolloutEngine] = {}
        """The rollouts' engines by role_rank: tests look at gauges and process ids."""
        self._threads: list[threading.Thread] = []
        self._num_leases = 0

    def _world(self, network: LocalNetwork, rank: int) -> World:
        role = ("controller", "trainer")[rank] if rank < 2 else "rollout"
        size = 2 + self.num_rollouts
        return World(
            role=role,
            role_rank=max(0, rank - 2),
            world_rank=rank,
            trainer_ranks=(1,),
            rollout_ranks=tuple(range(2, size)),
            hosts=("localhost",) * size,
            channel=network.channel(rank),
        )

    def start(self) -> list[RolloutReady]:
        from areal_hpc.rollout import loop

        def recorded(config: Config, *, index: int, **arguments: object) -> RolloutEngine:
            self.engines[index] = RolloutEngine(config, index=index, **arguments)
            return self.engines[index]

        loop.RolloutEngine = recorded
        for world in self._worlds[2:]:
            thread = threading.Thread(target=self._serve, args=(world,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return [self.wait_for(RolloutReady, deadline_s=240.0) for _ in range(self.num_rollouts)]

    def _serve(self, world: World) -> None:
        from areal_hpc.rollout import loop

        try:
            loop.run(self.config, world, self.paths, self.telemetry)
        except BaseException as error:  # noqa: BLE001 (handed to the test)
            self.error = error

    def stop(self) -> None:
        for rank in range(2, 2 + self.num_rollouts):
            self.channel.send(rank, Stop("test"))
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive(), "the rollout did not stop"

    def wait_until(self, condition: Callable[[], object], what: str, deadline_s: float = 60.0) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            if self.error is not None:
                raise self.error
            if time.monotonic() > end:
                raise TimeoutError(f"{what} did not happen within {deadline_s:.0f} s")
            time.sleep(0.005)

    def wait_for(self, *kinds: type[Message], deadline_s: float = 60.0) -> Message:
        """The next message of these kinds; the rollout's own error if it fails meanwhile."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if self.error is not None:
                raise self.error
            try:
                return self.channel.receive(kinds, 0.05, "a message").message
            except TimeoutError:
                continue
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TimeoutError(f"no {names} within {deadline_s:.0f} s")

    # -- prompts -------------------------------------------------------------------

    def grant(
        self,
        texts: list[str],
        sampling: SamplingSpec,
        *,
        group_size: int = 1,
        attempt: int = 1,
        first_group: int | None = None,
        rank: int = 2,
        gold: str = "7",
        begun: Begun | None = None,
    ) -> list[int]:
        """Lease these prompts to a rollout; the lease ids."""
        leases = []
        for index, text in enumerate(texts):
            self._num_leases += 1
            group = self._num_leases if first_group is None else first_group + index
            leases.append(
                Lease(
                    lease_id=self._num_leases,
                    group_id=group,
                    epoch=0,
                    attempt=attempt,
                    group_size=group_size,
                    prompt=Prompt(prompt_id=group, text=text, gold=gold),
                    sampling=sampling,
                    begun=begun,
                )
            )
        self.channel.send(rank, GrantLeases(tuple(leases)))
        return [lease.lease_id for lease in leases]

    def collect(self, lease_ids: list[int], deadline_s: float = 180.0) -> dict[int, list[Trajectory]]:
        """The trajectories of these leases, read back from the spool."""
        found: dict[int, list[Trajectory]] = {}
        while not set(lease_ids) <= found.keys():
            message = self.wait_for(ShardReady, LeaseFailed, deadline_s=deadline_s)
            assert isinstance(message, ShardReady), message
            rows = read_rows(self.paths.resolve_inside(message.path))
            groups: dict[int, list[Trajectory]] = {}
            for row in rows:
                groups.setdefault(row.group_id, []).append(row)
            found |= dict(zip(message.lease_ids, groups.values(), strict=True))
        return {lease: found[lease] for lease in lease_ids}

    # -- weights -------------------------------------------------------------------

    def trainer(self, model: torch.nn.Module, tensors_fn: TensorsFn | None = None) -> TrainerWeights:
        """Publishes `model`, connected to all rollouts; `tensors_fn` replaces the true export."""

        def metadata() -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
            return [(name, p.dtype, tuple(p.shape)) for name, p in model.named_parameters()]

        weights = TrainerWeights(
            self.config,
            self._worlds[1],
            self.paths,
            metadata,
            tensors_fn or (lambda: iter([(name, p.data) for name, p in model.named_parameters()])),
            self.telemetry,
        )
        weights.connect(self._worlds[1].rollout_ranks)
        return weights


@contextmanager
def directing(config: Config, root: Path, num_rollouts: int = 1) -> Iterator[Director]:
    director = Director(config, root, num_rollouts)
    try:
        director.start()
        yield director
    finally:
        director.stop()


def reference_logprobs(
    model: Qwen2ForCausalLM, trajectory: Trajectory, temperature: float = 1.0
) -> torch.Tensor:
    """transformers' log-probability of every token given those before it; [num_tokens], first one 0."""
    tokens = torch.tensor(trajectory.tokens, dtype=torch.long)[None]
    with torch.no_grad():
        logits = model(tokens).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits[:-1], dim=-1).gather(1, tokens[0, 1:, None])[:, 0]
    return torch.cat([torch.zeros(1), logprobs])
