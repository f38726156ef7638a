"""What a restarted run finds: the last whole checkpoint plus the journal plus the spool.

    checkpoint ---- train_step ----+
    ledger ---- replay_ledger -----+--> Recovered --> verify_shards --> adopt_orphans
    spool (shards) ----------------------------------------^----------------^

The weights decide which history survives: what was consumed at later steps than the
checkpoint's is available again, because the weights that learnt from it are lost. A group
is consumed at most once in the history that survives, and nothing committed is lost.
Called by `startup` before the first lease; `replay_ledger` also by the audit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from areal_hpc.controller.batcher import ReadyGroup, split_groups
from areal_hpc.controller.ledger import Ledger
from areal_hpc.controller.surviving import SurvivingVersions
from areal_hpc.paths import RunPaths
from areal_hpc.types import ALL_VERSIONS, ShardRow

log = logging.getLogger(__name__)

OTHER_DATA = "the prompts changed"
"""Reason why groups of earlier prompts are left out."""
TOO_OLD = "too old"
"""Reason of a discard that going back to an earlier checkpoint undoes."""

OTHER_DIGEST = "its digest is not the one that was announced"


@dataclass
class Recovered:
    """State of a run at a checkpoint, with everything committed since.

    position: of the prompt cursor. first_group: of the present prompts; groups before it
    belong to earlier ones. settings: of the last attempt. counters: what all attempts before
    the last one had counted. ready: groups that the surviving history has not
    consumed. in_flight: ids of groups that were admitted and have no result, to be asked
    again. consumed: group id -> training step. digests: of every shard in the journal; gone: those
    that were found damaged or missing. num_returned: groups consumed after the checkpoint, available
    again. evaluated: steps. newest_version: the newest one that the attempt before shares with this one.
    """

    attempt: int = 0
    data: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    first_group: int = 0
    position: int = 0
    ready: dict[int, ReadyGroup] = field(default_factory=dict)
    unfinished: dict[int, ReadyGroup] = field(default_factory=dict)
    """What a stop saved of the answers to groups in flight (`path`: a shard of unfinished answers)."""
    in_flight: list[int] = field(default_factory=list)
    consumed: dict[int, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    num_returned: int = 0
    newest_version: int = ALL_VERSIONS
    evaluated: set[int] = field(default_factory=set)
    num_dropped: int = 0


def replay_ledger(
    records: Iterable[dict[str, Any]], train_step: int, settings: dict[str, Any] | None = None
) -> Recovered:
    """What a run that goes on from the checkpoint of `train_step` with `settings` finds in its journal. Pure."""
    state, surviving = Recovered(), SurvivingVersions()
    admitted: set[int] = set()
    committed: dict[int, tuple[str, dict[str, Any]]] = {}
    refused: set[int] = set()
    discarded: dict[int, int] = {}
    evaluated: dict[int, int] = {}

    def go_back(step: int) -> None:
        nonlocal discarded, evaluated
        state.consumed = {group: at for group, at in state.consumed.items() if at <= step}
        discarded = {group: at for group, at in discarded.items() if at < step}
        evaluated = {at: at for at in evaluated if at <= step}
        # Tokens of versions that come again with other weights are nobody's.
        state.unfinished = {
            group: entry for group, entry in state.unfinished.items()
            if max(row.max_version for row in entry.rows) <= step
        }  # fmt: skip

    for record in records:
        surviving.take(record)
        match record["k"]:
            case "run":
                state.attempt, state.data = record["attempt"], record["data"]
                state.settings = record.get("settings", {})
                state.counters = record.get("counters", {})
                state.first_group = record.get("first_group", 0)
                state.position = max(state.position, state.first_group)
                go_back(record["train_step"])
            case "admitted":
                admitted.add(record["group"])
                state.position = max(state.position, record["group"] + 1)
            case "committed":
                state.digests[record["path"]] = record["digest"]
                state.gone.discard(record["path"])
                committed |= {group["group"]: (record["path"], group) for group in record["groups"]}
            case "unfinished":
                state.unfinished |= {group["group"]: _ready(record["path"], group) for group in record["groups"]}
            case "dropped":
                refused.update(record["groups"])
                state.num_dropped += len(record["groups"])
            case "discarded":
                if record["reason"] == TOO_OLD:
                    discarded |= dict.fromkeys(record["groups"], record["train_step"])
                else:
                    refused.update(record["groups"])
            case "damaged":
                state.gone.add(record["path"])
                for group in record["groups"]:
                    committed.pop(group, None)
                    state.consumed.pop(group, None)
                    discarded.pop(group, None)
            case "consumed":
                state.consumed |= dict.fromkeys(record["groups"], record["train_step"])
            case "unconsumed":
                step = record["train_step"]
                state.consumed = {group: at for group, at in state.consumed.items() if at != step}
            case "eval":
                evaluated[record["train_step"]] = record["train_step"]
    num_consumed = len(state.consumed)
    go_back(train_step)
    surviving.take({"k": "run", "train_step": train_step, "settings": settings or {}})
    state.newest_version = surviving.unannounced
    state.num_returned = num_consumed - len(state.consumed)
    state.evaluated = set(evaluated)
    gone = refused | discarded.keys() | state.consumed.keys()
    state.ready = {
        group_id: replace(_ready(path, group), newest_version=surviving.newest(path))
        for group_id, (path, group) in committed.items() if group_id not in gone
    }  # fmt: skip
    state.in_flight = sorted(admitted - committed.keys() - gone)
    state.unfinished = {group: state.unfinished[group] for group in state.in_flight if group in state.unfinished}
    return state


def _ready(path: str, group: dict[str, Any]) -> ReadyGroup:
    rows = tuple(msgspec.convert(row, ShardRow) for row in group["rows"])
    return ReadyGroup(group["group"], group["epoch"], path, rows)


def committed_record(path: str, digest: str, groups: list[ReadyGroup]) -> dict[str, Any]:
    """Fields of the journal's `committed`."""
    listed = [
        {"group": group.group_id, "epoch": group.epoch, "rows": msgspec.to_builtins(group.rows)}
        for group in groups
    ]
    return {"path": path, "digest": digest, "groups": listed}


def begin_other_prompts(state: Recovered, num_prompts: int) -> None:
    """Put the cursor to the beginning of new prompts.

    Group ids go on: the next multiple of their number, so that a group's id still says
    which prompt in which epoch it is.
    """
    state.first_group = state.position = -(-state.position // num_prompts) * num_prompts


def leave_earlier_prompts(state: Recovered, ledger: Ledger) -> int:
    """Journal groups of earlier prompts as left out, answered or not; returns their number.

    At every start, not only when the prompts change: a step back may bring more of them.
    """
    answered = [group for group in state.ready if group < state.first_group]
    unanswered = [group for group in state.in_flight if group < state.first_group]
    for group in answered:
        del state.ready[group]
    state.in_flight = [group for group in state.in_flight if group >= state.first_group]
    for group in unanswered:
        state.unfinished.pop(group, None)
    if answered:
        ledger.add("discarded", groups=answered, train_step=0, reason=OTHER_DATA)
    if unanswered:
        ledger.add("dropped", groups=unanswered, reason=OTHER_DATA)
    return len(answered) + len(unanswered)


def verify_shards(state: Recovered, ledger: Ledger, paths: RunPaths, run_id: str) -> int:
    """Read every shard that ready groups lie in; groups of a damaged one are asked again.

    The shard goes to quarantine. Returns the number of groups lost that way.
    """
    from areal_hpc.spool.shard import ShardError, quarantine, read_index

    by_path: dict[str, list[int]] = {}
    for group in state.ready.values():
        by_path.setdefault(group.path, []).append(group.group_id)
    num_lost = 0
    # One wait for all: these names were announced in an earlier life.
    end = time.monotonic() + paths.visible_s
    for relative, groups in by_path.items():
        path = paths.resolve_inside(relative)
        try:
            wait_s = end - time.monotonic()
            if read_index(path, run_id=run_id, wait_s=wait_s).digest == state.digests[relative]:
                continue
            reason = OTHER_DIGEST
            quarantine(path, paths.quarantine, reason)
        except ShardError as error:
            reason = str(error)
            quarantine(path, paths.quarantine, reason)
        except FileNotFoundError:
            reason = "it is missing"
            log.warning("shard %s is missing; its %d groups are asked again", path, len(groups))
        ledger.add("damaged", path=relative, groups=groups, reason=reason)
        state.gone.add(relative)
        num_lost += len(groups)
        for group_id in groups:
            del state.ready[group_id]
    lost = {group for groups in by_path.values() for group in groups} - state.ready.keys()
    state.in_flight = sorted({*state.in_flight, *lost})
    return num_lost


def adopt_orphans(
    state: Recovered, ledger: Ledger, paths: RunPaths, run_id: str, *, group_size: int, num_prompts: int
) -> int:
    """Take in shards that were committed but never journalled: the run was killed in between.

    Also those that were missing when they were needed and have appeared since.
    Returns the number of groups that need not be asked again. Whatever is damaged goes to
    quarantine.
    """
    from areal_hpc.spool.shard import SUFFIX, ShardError, quarantine, read_index

    wanted = set(state.in_flight)
    num_adopted = 0
    for path in sorted(paths.spool.glob(f"rollout-*/*{SUFFIX}")):
        relative = paths.relative(path)
        announced = state.digests.get(relative)
        if announced and relative not in state.gone:
            continue
        try:
            info = read_index(path, run_id=run_id)
            if announced and info.digest != announced:
                raise ShardError(OTHER_DIGEST)
        except ShardError as error:
            quarantine(path, paths.quarantine, str(error))
            continue
        groups = [
            ReadyGroup(group_id, group_id // num_prompts, relative, rows, state.newest_version)
            for group_id, rows in split_groups(info.rows).items()
            if group_id in wanted and len(rows) == group_size
        ]
        if not groups:
            continue
        record = committed_record(relative, info.digest, groups)
        ledger.add("committed", **record, newest_version=state.newest_version)
        state.digests[relative] = info.digest
        state.gone.discard(relative)
        state.ready |= {group.group_id: group for group in groups}
        wanted -= {group.group_id for group in groups}
        num_adopted += len(groups)
    state.in_flight = sorted(wanted)
    return num_adopted
