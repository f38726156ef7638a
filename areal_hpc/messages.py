"""Every message that crosses MPI, in one place.

A message is a frozen msgspec struct with its class name as tag; `encode` and `decode`
turn it to and from msgpack bytes (no pickle: a rank never executes what it receives).
`mpi.channel` moves the bytes. Direction is in each docstring: C controller, T trainer
rank, L trainer lead (role_rank 0), R rollout rank, W reward rank.
"""

from __future__ import annotations

from typing import Union

import msgspec

from areal_hpc.types import BatchManifest, EvalSample, Lease, Prompt, RewardResult, SamplingSpec, ShardRow


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


# ---- start-up and shutdown -------------------------------------------------------


class TrainerReady(Message, frozen=True):
    """L -> C: the model is loaded (from a checkpoint of `train_step` if that is > 0)."""

    train_step: int
    version: int


class RolloutReady(Message, frozen=True):
    """R -> C: the engine answers. `capacity` is the number of sequences it holds at once."""

    role_rank: int
    host: str
    capacity: int
    version: int


class RewardReady(Message, frozen=True):
    """W -> C: the reward rank's workers have imported the rewards."""

    role_rank: int


class Rendezvous(Message, frozen=True):
    """L -> T: ranks that build a process group for `purpose` meet at host:port."""

    purpose: str
    host: str
    port: int


class ConnectWeights(Message, frozen=True):
    """C -> T and R: all are ready; build the weight transfer group now."""

    rollout_ranks: tuple[int, ...]


class WeightsConnected(Message, frozen=True):
    """L -> C: the transfer group stands."""


class Drain(Message, frozen=True):
    """C -> R: no more leases will come; finish (or, if `abandon`, abort) and commit what is done.

    `keep`: save unfinished answers before they are abandoned, to go on with in a later run.
    """

    abandon: bool
    reason: str
    keep: bool = False


class Drained(Message, frozen=True):
    """R -> C: every finished trajectory is committed and announced; leases not finished."""

    unfinished_leases: tuple[int, ...]


class Stop(Message, frozen=True):
    """C -> all: leave `run()` with success."""

    reason: str


class Alive(Message, frozen=True):
    """C -> all and all -> C, by `mpi.pulse`: a sign of life, which the channel keeps to itself."""


# ---- rollouts --------------------------------------------------------------------


class GrantLeases(Message, frozen=True):
    """C -> R: answer these prompts."""

    leases: tuple[Lease, ...]


class ShardReady(Message, frozen=True):
    """R -> C: a shard with its final name lies in the spool; whole groups only.

    `path` is relative to the run folder; `lease_ids[k]` is the lease of the k-th group
    in order of first appearance in `rows`.
    """

    path: str
    digest: str
    lease_ids: tuple[int, ...]
    rows: tuple[ShardRow, ...]


class UnfinishedSaved(Message, frozen=True):
    """R -> C: a shard of unfinished answers is whole (`path` relative to the run folder)."""

    path: str
    digest: str
    rows: tuple[ShardRow, ...]


class LeaseFailed(Message, frozen=True):
    """R -> C: the group cannot be answered.

    `retry` is False when another rank would fail as well (unparseable gold, prompt too
    long): the place goes back and the prompt counts as dropped for `reason`.
    """

    lease_id: int
    group_id: int
    retry: bool
    reason: str


class RolloutStatus(Message, frozen=True):
    """R -> C about once a second: gauges and counters of one rollout rank."""

    role_rank: int
    version: int
    num_running: int
    num_waiting: int
    generated_tokens: int
    counters: dict[str, float]


class EngineRestarted(Message, frozen=True):
    """R -> C: the engine died and serves again with the weights of `version`."""

    role_rank: int
    version: int
    cause: str
    lost_leases: tuple[int, ...]


class EvalRequest(Message, frozen=True):
    """C -> R: answer each prompt `num_samples` times for evaluation, never for training."""

    eval_id: int
    version: int
    num_samples: int
    prompts: tuple[Prompt, ...]
    sampling: SamplingSpec


class EvalResult(Message, frozen=True):
    """R -> C: the answers to an EvalRequest."""

    eval_id: int
    role_rank: int
    samples: tuple[EvalSample, ...]


# ---- rewards on ranks of their own -------------------------------------------------


class ScoreRequest(Message, frozen=True):
    """R -> W: score the answers to one prompt; `truncated[k]`: answer k was cut off at the token limit."""

    request_id: int
    prompt: Prompt
    responses: tuple[str, ...]
    truncated: tuple[bool, ...]


class Scored(Message, frozen=True):
    """W -> R: the answer to a ScoreRequest, one result per response.

    Without results where `problem` is "unscorable" (the gold answer cannot be parsed) or
    "error" (a reward broke its contract); `message` names the reward and the prompt.
    """

    request_id: int
    results: tuple[RewardResult, ...]
    problem: str = ""
    message: str = ""


class RewardStatus(Message, frozen=True):
    """W -> C about once a second: counters of one reward rank."""

    role_rank: int
    counters: dict[str, float]


# ---- training --------------------------------------------------------------------


class TrainBatch(Message, frozen=True):
    """C -> T: train on this batch; the step ends with weights of version manifest.version + 1."""

    manifest: BatchManifest


class StepDone(Message, frozen=True):
    """L -> C: the optimizer stepped; weights are those of `version`, not yet published."""

    train_step: int
    version: int
    metrics: dict[str, float]


class BatchRefused(Message, frozen=True):
    """L -> C: nothing was trained, because these shards (path -> what is wrong) cannot be read."""

    train_step: int
    damaged: dict[str, str]


class Publish(Message, frozen=True):
    """C -> T: send the current weights as `version` to the rollouts."""

    version: int


class VersionLive(Message, frozen=True):
    """L -> C: every engine serves `version`; seconds per phase in `timings`."""

    version: int
    timings: dict[str, float]


class PublishFailed(Message, frozen=True):
    """L -> C: nothing was published, the old version serves; C decides on a retry."""

    version: int
    reason: str


class SaveCheckpoint(Message, frozen=True):
    """C -> T: save a checkpoint after step `train_step`; `export_hf` also writes a Hugging Face folder."""

    train_step: int
    version: int
    export_hf: bool = False


class CheckpointSaved(Message, frozen=True):
    """L -> C: the checkpoint is whole under its final name (`path` relative to the run folder)."""

    train_step: int
    path: str
    seconds: float


# ---- weight control, trainer lead <-> rollout ------------------------------------


class WeightCall(Message, frozen=True):
    """L -> R: one call of vLLM's weight-transfer client (`method` is its name).

    `payload` is JSON, so that backend-specific dictionaries pass unchanged.
    """

    call_id: int
    method: str
    payload: str


class WeightReturn(Message, frozen=True):
    """R -> L: the answer to a WeightCall; `error` is "" on success."""

    call_id: int
    role_rank: int
    result: str
    error: str


AnyMessage = Union[
    TrainerReady,
    RolloutReady,
    RewardReady,
    Rendezvous,
    ConnectWeights,
    WeightsConnected,
    Drain,
    Drained,
    Stop,
    Alive,
    GrantLeases,
    ShardReady,
    UnfinishedSaved,
    LeaseFailed,
    RolloutStatus,
    EngineRestarted,
    EvalRequest,
    EvalResult,
    ScoreRequest,
    Scored,
    RewardStatus,
    TrainBatch,
    StepDone,
    BatchRefused,
    Publish,
    VersionLive,
    PublishFailed,
    SaveCheckpoint,
    CheckpointSaved,
    WeightCall,
    WeightReturn,
]


def encode(message: Message) -> bytes:
    """Msgpack bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Message:
    """The message in `data`; ValueError names the problem if it is not one."""
    try:
        return msgspec.msgpack.decode(data, type=AnyMessage)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not an areal_hpc message ({len(data)} bytes): {error}") from error
