"""Which versions in a shard are those of the history that goes on.

A run that goes back to the checkpoint of step s counts versions s + 1, s + 2, ... again,
for other weights. Finished answers of the lost ones are still trained, so their stamps
must not be taken for those of the new ones: `types.distinct_version` moves them away.
Used by whoever replays the journal.
"""

from __future__ import annotations

from typing import Any

from areal_hpc.types import ALL_VERSIONS


class SurvivingVersions:
    """For each shard the newest version that the weights of its time share with those of today."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._deterministic = False
        self.unannounced = ALL_VERSIONS
        """For shards that the attempt before the last `run` record wrote and did not journal."""

    def take(self, record: dict[str, Any]) -> None:
        """Follow one record of the journal."""
        match record["k"]:
            case "run":
                before, self._deterministic = self._deterministic, is_deterministic(record)
                # Two deterministic attempts make the same weights of the same number.
                same = before and self._deterministic
                self.unannounced = ALL_VERSIONS if same else record["train_step"]
                # All shards so far were written before the run went back to this checkpoint.
                self._newest = {path: min(newest, self.unannounced) for path, newest in self._newest.items()}
            case "committed":
                self._newest[record["path"]] = record.get("newest_version", ALL_VERSIONS)

    def newest(self, path: str) -> int:
        return self._newest.get(path, ALL_VERSIONS)


def is_deterministic(record: dict[str, Any]) -> bool:
    """Whether the attempt of a `run` record makes the same weights again that were lost."""
    return bool(record.get("settings", {}).get("run.deterministic"))
