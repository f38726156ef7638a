"""Groups between their lease and their batch: results and refusals, journalled and counted.

Owned by the controller's loop, which hands over what the rollouts and trainers report.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable

from areal_hpc.config.schema import Config
from areal_hpc.controller.admission import Admission
from areal_hpc.controller.batcher import Batcher, ReadyGroup, split_groups
from areal_hpc.controller.leases import UnderWay
from areal_hpc.controller.ledger import Ledger
from areal_hpc.controller.progress import Progress
from areal_hpc.controller.recovery import OTHER_DIGEST, committed_record
from areal_hpc.controller.selection import keep_group
from areal_hpc.messages import BatchRefused, ShardReady, UnfinishedSaved
from areal_hpc.paths import RunPaths

log = logging.getLogger(__name__)

FRUITLESS_GROUPS = 1000
"""So many groups dropped in a row (or all prompts, if there are fewer) end the run."""


class Groups:
    """`batcher`: finished groups that wait to be trained. `num_refused`: groups refused by dynamic
    sampling since the last batch."""

    def __init__(
        self, config: Config, paths: RunPaths, admission: Admission, ledger: Ledger, progress: Progress,
        ready: Iterable[ReadyGroup],
    ) -> None:  # fmt: skip
        """`ready`: what a resumed run finds finished."""
        self._config, self._paths, self._admission = config, paths, admission
        self._leases, self._ledger, self._progress = admission.leases, ledger, progress
        self.batcher = Batcher()
        for group in ready:
            self.batcher.add(group)
        self.counters: Counter[str] = Counter()
        self.num_refused = 0
        self._num_fruitless = 0

    def take_shard(self, shard: ShardReady, train_step: int) -> None:
        """Accept the first result of each group; refuse what dynamic sampling does not want."""
        accepted: list[ReadyGroup] = []
        for group_id, rows in split_groups(shard.rows).items():
            group = self._leases.complete(group_id)
            if group is not None:
                accepted.append(ReadyGroup(group_id, group.epoch, shard.path, rows))
        if not accepted:
            return
        self._ledger.add("committed", **committed_record(shard.path, shard.digest, accepted))
        self._num_fruitless = 0
        self.counters["trajectories"] += sum(len(group.rows) for group in accepted)
        per_batch = self._config.trainer.batch_size // self._config.rollout.group_size
        for group in accepted:
            if keep_group(
                group.rewards, self._config.algorithm, num_refused=self.num_refused, groups_per_batch=per_batch
            ):
                self.batcher.add(group)
            else:
                self.num_refused += 1
                self.discard([group], "equal rewards", train_step)

    def note_unfinished(self, shard: UnfinishedSaved) -> None:
        """Answers that this stop cut short were saved: a resumed run goes on with them."""
        groups = [
            ReadyGroup(group_id, self._admission.cursor.at(group_id).epoch, shard.path, tuple(rows))
            for group_id, rows in itertools.groupby(shard.rows, key=lambda row: row.group_id)
            if group_id in self._leases
        ]
        self._ledger.add("unfinished", **committed_record(shard.path, shard.digest, groups))
        self.counters["answers_kept"] += sum(len(group.rows) for group in groups)
        self.counters["tokens_kept"] += sum(row.num_loss_tokens for group in groups for row in group.rows)

    def discard(self, groups: list[ReadyGroup], reason: str, train_step: int) -> None:
        """Leave finished groups out; their places go back."""
        if not groups:
            return
        ids = [group.group_id for group in groups]
        self._ledger.add("discarded", groups=ids, train_step=train_step, reason=reason)
        self.give_back(groups)
        self.counters[f"discarded ({reason})"] += len(groups)

    def give_back(self, groups: Iterable[ReadyGroup]) -> None:
        """Places of groups that were trained into a live version, or left out."""
        for group in groups:
            self._admission.budget.release(group.epoch, len(group.rows))

    def end_leases(
        self, ended: Iterable[tuple[UnderWay, bool] | None], reason: str, *, by_chance: bool = True
    ) -> None:
        """Journal and count leases that came to nothing; `by_chance`: another run's might have been answered."""
        for outcome in ended:
            if outcome is None:
                continue
            group, dropped = outcome
            if not dropped:
                self.counters["granted_again"] += 1
                continue
            if self._config.run.deterministic and by_chance:
                raise RuntimeError(
                    f"run.deterministic=true: group {group.group_id} would be left out for a reason that another run "
                    f"need not have: {reason}"
                )
            self._ledger.add("dropped", groups=[group.group_id], reason=reason)
            self._admission.budget.release(group.epoch, self._config.rollout.group_size)
            self.counters["dropped"] += 1
            self._num_fruitless += 1
            log.warning("prompt %d dropped: %s", group.prompt.prompt_id, reason)
            if self.counters["dropped"] <= 5:
                self._progress.event(f"prompt {group.prompt.prompt_id} left out: {reason}")
            if self._num_fruitless >= min(FRUITLESS_GROUPS, self._admission.cursor.num_prompts):
                raise RuntimeError(
                    f"the last {self._num_fruitless} prompts were all dropped and none was answered; the last one "
                    f"because: {reason}"
                )

    def take_back(self, groups: list[ReadyGroup], message: BatchRefused, version: int) -> None:
        """A batch was not trained because a trainer could not read shards that were announced.

        Each is read here once more. The groups of those that are damaged or missing are asked
        again while `version` serves; what the trainer's node could not see or read for a moment
        is ready again, like the groups of the other shards.
        """
        from areal_hpc.spool.shard import quarantine

        lost: dict[str, str] = {}
        for path, seen in message.damaged.items():
            groups += self.batcher.remove_shard(path)
            reason = self._find_damage(path, [group for group in groups if group.path == path])
            if reason is None:
                self._progress.event(f"shard {path} is whole, though a trainer could not read it ({seen})")
                continue
            lost[path] = reason
            ids = sorted(group.group_id for group in groups if group.path == path)
            self._ledger.add("damaged", path=path, groups=ids, reason=reason)
            self._progress.event(f"shard {path} cannot be read ({reason}); its {len(ids)} groups are asked again")
        self._ledger.add("unconsumed", train_step=message.train_step)
        # Before the shards are moved: after a kill in between recovery knows of the damage, and moves them.
        self._ledger.sync()
        for path, reason in lost.items():
            if (shard := self._paths.resolve_inside(path)).exists():
                quarantine(shard, self._paths.quarantine, reason)
        for group in groups:
            if group.path in lost:
                entry = self._admission.cursor.at(group.group_id)
                self._leases.admit(group.group_id, entry.epoch, entry.prompt, version)
            else:
                self.batcher.add(group)

    def _find_damage(self, path: str, groups: list[ReadyGroup]) -> str | None:
        """What is wrong with a shard; None if it holds what was announced of these groups."""
        from areal_hpc.spool.shard import ShardError, read_index

        try:
            rows = read_index(self._paths.resolve_inside(path), run_id=self._config.run.name).rows
        except ShardError as error:
            return str(error)
        except FileNotFoundError:
            return "it is missing"
        if all(row.row < len(rows) and rows[row.row] == row for group in groups for row in group.rows):
            return None
        return OTHER_DIGEST
