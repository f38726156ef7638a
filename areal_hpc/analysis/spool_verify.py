"""`areal-hpc spool verify RUN`: every digest and checksum, and the journal's word, against the files."""

from __future__ import annotations

import sys
from typing import TextIO

from areal_hpc.analysis.spool_list import report_damage
from areal_hpc.analysis.spool_read import Spool
from areal_hpc.controller.ledger import LedgerError, read_ledger
from areal_hpc.spool.shard import read_index


def verify_spool(spool: Spool, out: TextIO | None = None) -> int:
    """Read every shard whole; 1 if one is damaged, missing or not what the journal recorded, else 0.

    Holds one shard in memory. A running run may add shards meanwhile: those that were
    there at the beginning are verified.
    """
    journal = _journal(spool)
    paths = {spool.paths.relative(path): path for path in spool.shards()}
    num_verified = num_rows = num_tokens = num_bytes = 0
    for name in sorted(journal.keys() | paths.keys()):
        try:
            path = paths.get(name) or spool.paths.resolve_inside(name)
            info = read_index(path)
        except FileNotFoundError:
            spool.missing(path)
            continue
        except (ValueError, OSError) as error:  # ShardError, or a journal that names a path outside
            spool.damaged[name] = str(error)
            continue
        if journal.get(name, info.digest) != info.digest:
            spool.damaged[name] = (
                f"shard {path} has the digest {info.digest[:16]}, the journal says {journal[name][:16]}"
            )
            continue
        num_verified += 1
        num_rows += len(info.rows)
        num_tokens += sum(row.num_tokens for row in info.rows)
        num_bytes += info.num_bytes
    quarantined = spool.quarantined()
    print(
        f"{num_verified:,} shards verified: {num_rows:,} trajectories of {num_tokens:,} tokens, "
        f"{num_bytes / 1e6:,.1f} MB; {len(spool.damaged)} damaged, {len(quarantined)} in quarantine",
        file=out or sys.stdout,
    )
    return report_damage(spool)


def _journal(spool: Spool) -> dict[str, str]:
    """Shard -> digest, as committed. Those that the run found damaged itself are left out."""
    digests: dict[str, str] = {}
    try:
        for record in read_ledger(spool.paths.ledger):
            if record["k"] == "committed":
                digests[record["path"]] = record["digest"]
            elif record["k"] == "damaged":
                digests.pop(record["path"], None)
    except LedgerError as error:
        spool.damaged[spool.paths.ledger.name] = str(error)
    return digests
