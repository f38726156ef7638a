"""Frames between the reward service and its worker processes: length-prefixed msgpack.

Owns the message types of the two pipes (no pickle: neither side executes what it
receives). Used by `service` (the rollout's process) and `worker` (the pool's).
"""

from __future__ import annotations

import msgspec

from areal_hpc.types import Prompt

HEADER_BYTES = 4


class RewardCall(msgspec.Struct, frozen=True):
    """One reward as a worker loads it: built-in name or `package.module:function`, and options."""

    name: str
    target: str
    options: dict[str, object]


class Limits(msgspec.Struct, frozen=True):
    """What one check may use, and how programs are shut in (`rewards.sandbox`, `rewards.sandbox_paths`).

    Given as keyword `limits` to rewards that are marked `uses_sandbox`.
    """

    timeout_s: float
    memory_bytes: int
    require_sandbox: bool = True
    sandbox_paths: tuple[str, ...] = ()


class Setup(msgspec.Struct, frozen=True):
    """First frame to a worker: what it imports and its limits."""

    rewards: tuple[RewardCall, ...]
    limits: Limits


class Check(msgspec.Struct, frozen=True):
    """Score `responses` of one prompt with reward number `reward` of the Setup."""

    check_id: int
    reward: int
    prompt: Prompt
    responses: tuple[str, ...]


class Batch(msgspec.Struct, frozen=True):
    """Checks to be done in order; each is answered by its own Verdict as soon as it is done."""

    checks: tuple[Check, ...]


class Verdict(msgspec.Struct, frozen=True):
    """Answer to one Check.

    `problem` is "" (values hold one number per response), "memory" (over the limit),
    "unscorable" (the gold answer cannot be parsed) or "error"; `message` says more.
    """

    check_id: int
    values: tuple[float, ...]
    seconds: float
    problem: str = ""
    message: str = ""


class Started(msgspec.Struct, frozen=True):
    """First frame from a worker: its rewards are imported, or `error` says why not.

    traits: (per_sample, sees_truncated, uses_sandbox) of each reward. warnings: protections that the
    sandbox lacks on this machine.
    """

    traits: tuple[tuple[bool, bool, bool], ...] = ()
    warnings: tuple[str, ...] = ()
    error: str = ""


def pack(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def split_frames(buffer: bytearray) -> list[bytes]:
    """The whole frames at the start of `buffer`, which keeps the rest."""
    frames, start = [], 0
    while len(buffer) - start >= HEADER_BYTES:
        end = start + HEADER_BYTES + int.from_bytes(buffer[start : start + HEADER_BYTES], "big")
        if end > len(buffer):
            break
        frames.append(bytes(buffer[start + HEADER_BYTES : end]))
        start = end
    del buffer[:start]
    return frames
