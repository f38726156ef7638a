"""The values that roles exchange and the spool stores.

Owns no behaviour beyond derived properties. Imported by every role; imports no
torch, mpi4py, h5py or vllm, so that a login node can read it too. What travels
over MPI is a frozen msgspec struct; what holds per-token arrays is a frozen
dataclass of numpy arrays and travels through HDF5 only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
from isal import isal_zlib

PROMPT_VERSION = -1
"""Version stamped on tokens that no policy produced (prompt, observation, tool output)."""


CHECKED_KINDS = tuple(np.dtype(kind) for kind in (np.int32, np.uint8, np.float32, np.int32))
"""Types that `token_checksum` sees its arrays in."""


ALL_VERSIONS = 2**31 - 1
"""Newest version that is comparable, where all are."""


def distinct_version(version: int, newest: int) -> int:
    """The stamp under which a token is trained; `newest`: last version that its weights' history
    shares with that of the weights in training.

    A later version was lost and its number given again to other weights. Mirrored at
    `newest` it equals no number that is in use, and the version in training minus it is
    the number of updates between the two weights: back to `newest`, and on from there.
    """
    return version if version <= newest else 2 * newest - version


class SamplingSpec(msgspec.Struct, frozen=True):
    """How one answer is sampled; lengths in tokens.

    `seed` is None for "derive from run seed, group and sample" (the rollout's rule).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


class Prompt(msgspec.Struct, frozen=True):
    """One question: `text` before the chat template; `gold` is what the reward needs.

    `tests` holds unit tests as a JSON string for code rewards, "" elsewhere; `meta`
    is a JSON string of whatever the task wants to hand to its reward.
    """

    prompt_id: int
    text: str
    gold: str = ""
    tests: str = ""
    meta: str = ""


class RewardResult(msgspec.Struct, frozen=True):
    """Score of one answer: the weighted sum, each reward before weighting, and what went wrong.

    `note` is "" or names limits that the answer broke, e.g. "math: timeout".
    """

    reward: float
    parts: dict[str, float]
    note: str = ""


class Begun(msgspec.Struct, frozen=True):
    """What an earlier stop left of a group's answers: rows of a shard of unfinished answers."""

    path: str
    rows: tuple[int, ...]


def unfinished_run_id(run_name: str) -> str:
    """Run id of the shards of unfinished answers: no spool shard has it."""
    return f"{run_name}/unfinished"


class Lease(msgspec.Struct, frozen=True):
    """Permission to answer one prompt `group_size` times.

    `lease_id` is new at each grant, `group_id` is the admission ordinal and stays the
    same over attempts: the controller accepts the first result of a group and refuses
    every later one.
    """

    lease_id: int
    group_id: int
    epoch: int
    attempt: int
    group_size: int
    prompt: Prompt
    sampling: SamplingSpec
    begun: Begun | None = None
    """Answers to go on with, where an earlier stop left some."""


def token_checksum(
    tokens: np.ndarray, loss_mask: np.ndarray, rollout_logprobs: np.ndarray, versions: np.ndarray
) -> int:
    """Crc32 over the bytes of one trajectory's per-token arrays, as int32, uint8, float32 and int32."""
    state = 0
    for array, kind in zip((tokens, loss_mask, rollout_logprobs, versions), CHECKED_KINDS, strict=True):
        # Nearly always so already: asking costs less than a conversion that does nothing.
        if array.dtype != kind or not array.flags.c_contiguous:
            array = np.ascontiguousarray(array, kind)
        state = isal_zlib.crc32(array, state)
    return state


@dataclass(frozen=True, init=False)
class Trajectory:
    """One answer with its prompt; all per-token arrays have the shape [num_tokens].

    tokens int32; loss_mask uint8 (1 where the policy chose the token and it is
    trained); rollout_logprobs float32 (log-probability under the distribution that
    was sampled from; 0 where loss_mask is 0); versions int32 (policy_version that
    produced the token, PROMPT_VERSION elsewhere).
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    versions: np.ndarray
    reward: float
    prompt_id: int
    group_id: int
    sample_index: int
    finish_reason: str
    reward_parts: dict[str, float] = field(default_factory=dict)

    def __init__(
        self,
        tokens: np.ndarray,
        loss_mask: np.ndarray,
        rollout_logprobs: np.ndarray,
        versions: np.ndarray,
        reward: float,
        prompt_id: int,
        group_id: int,
        sample_index: int,
        finish_reason: str,
        reward_parts: dict[str, float] | None = None,
    ) -> None:
        """ValueError unless the arrays have one shape [T]."""
        shape = tokens.shape
        if len(shape) != 1 or not loss_mask.shape == rollout_logprobs.shape == versions.shape == shape:
            found = (shape, loss_mask.shape, rollout_logprobs.shape, versions.shape)
            raise ValueError(f"per-token arrays of a trajectory must have one shape [T], got {found}")
        # At once, where a frozen dataclass' own __init__ goes through object.__setattr__ for each
        # field: reading a shard makes a thousand of these while the disk waits.
        self.__dict__.update(
            tokens=tokens,
            loss_mask=loss_mask,
            rollout_logprobs=rollout_logprobs,
            versions=versions,
            reward=reward,
            prompt_id=prompt_id,
            group_id=group_id,
            sample_index=sample_index,
            finish_reason=finish_reason,
            reward_parts={} if reward_parts is None else reward_parts,
        )

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def checksum(self) -> int:
        """Crc32 over the per-token arrays."""
        return token_checksum(self.tokens, self.loss_mask, self.rollout_logprobs, self.versions)

    @property
    def min_version(self) -> int:
        """Version of the oldest trained token; PROMPT_VERSION if none is trained."""
        trained = self.versions[self.loss_mask.astype(bool)]
        return int(trained.min()) if trained.size else PROMPT_VERSION


class ShardRow(msgspec.Struct, frozen=True):
    """What the controller needs to know of one trajectory of a shard."""

    row: int
    group_id: int
    prompt_id: int
    sample_index: int
    num_tokens: int
    num_loss_tokens: int
    min_version: int
    max_version: int
    reward: float
    finish_reason: str
    checksum: int

    def oldest(self, newest: int = ALL_VERSIONS) -> int:
        """`distinct_version` of the token that is the farthest from the weights in training."""
        return min(self.min_version, distinct_version(self.max_version, newest))


class ManifestRow(msgspec.Struct, frozen=True):
    """One trajectory of a training batch: row `row` of shard `shards[shard]`.

    `checksum` is that of the arrays the rollout had in memory: what is trained is compared
    with it, byte for byte.
    """

    shard: int
    row: int
    group_id: int
    sample_index: int
    num_tokens: int
    checksum: int


class BatchManifest(msgspec.Struct, frozen=True):
    """One training batch.

    `train_step` counts from 1; `version` is the version being trained from (staleness
    of a sample = version - its min_version). `dp_rows[d]` lists indices into `rows`
    for data-parallel rank d, balanced by token count; every row appears once.
    `newest_versions[s]` is the newest version in shard s that is still what it was
    (`distinct_version`); empty where that holds for all.
    """

    train_step: int
    version: int
    epoch: int
    shards: tuple[str, ...]
    rows: tuple[ManifestRow, ...]
    dp_rows: tuple[tuple[int, ...], ...]
    newest_versions: tuple[int, ...] = ()


class EvalSample(msgspec.Struct, frozen=True):
    """Score of one evaluation answer."""

    prompt_id: int
    sample_index: int
    reward: float
    num_tokens: int
    finish_reason: str
    version: int
    text: str = ""
    parts: dict[str, float] = {}
    """Each reward by its name, before weighting."""
