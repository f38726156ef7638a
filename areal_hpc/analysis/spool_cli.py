"""`areal-hpc spool ls | show | verify | export | audit RUN`: its arguments and what they call.

Called by `cli`, which hands over all that follows `spool`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from areal_hpc.analysis import spool_filter
from areal_hpc.config.errors import ConfigError
from areal_hpc.paths import RunPaths

EXAMPLES = """examples:
  areal-hpc spool ls runs/quickstart
  areal-hpc spool ls runs/quickstart --rows --reward "<0.5" --version 3..7 --limit 20
  areal-hpc spool show runs/quickstart 12.3
  areal-hpc spool show runs/quickstart --prompt 12 --reward ">=1"
  areal-hpc spool verify runs/quickstart
  areal-hpc spool export runs/quickstart -o answers.parquet --length ..200
  areal-hpc spool audit runs/quickstart

RUN is the folder of a run, finished or running. Exit code: 0 all is well, 1 a shard is damaged
or the audit failed (standard error says which), 2 a mistake in the arguments.
"""


def main(argv: list[str]) -> int:
    """Parse what follows `spool` and run it; ConfigError for what the user can mend."""
    arguments = build_parser().parse_args(argv)
    return arguments.command(arguments)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-hpc spool",
        description="Look at the trajectories of a run, and prove that it kept its promises.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def add(name: str, command: object, text: str, example: str) -> argparse.ArgumentParser:
        action = actions.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example:\n  areal-hpc spool {name} {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        action.add_argument("run", metavar="RUN", help="run folder")
        action.set_defaults(command=command)
        return action

    listing = add("ls", _list, "list shards, or trajectories, with counts, versions and rewards",
                  'runs/quickstart --rows --reward ">=0.5" --version 3..7')
    listing.add_argument("--rows", action="store_true", help="list trajectories instead of shards")
    listing.add_argument("--limit", type=int, default=50, metavar="N", help="rows to list, 0 for all (default 50)")
    listing.add_argument("--json", action="store_true", help="print JSON")
    spool_filter.add_arguments(listing)

    show = add("show", _show, "show one trajectory: text, rewards, versions and log-probabilities by token",
               "runs/quickstart 12.3 --tokens 100..200")
    show.add_argument("trajectory", metavar="TRAJECTORY", nargs="?",
                      help="GROUP.SAMPLE or SHARD:ROW (default: the first that passes the filters)")
    show.add_argument("--tokens", metavar="BOUND", help="positions to show token by token (default: the first 400)")
    show.add_argument("--tokenizer", metavar="FOLDER", help="Hugging Face folder (default: the run's)")
    show.add_argument("--json", action="store_true", help="print JSON")
    spool_filter.add_arguments(show)

    add("verify", _verify, "recompute the digest of every shard and name each that is damaged", "runs/quickstart")

    export = add("export", _export, "write trajectories as Parquet or JSON lines",
                 "runs/quickstart -o answers.parquet --version 3.. --text")
    export.add_argument("-o", "--output", required=True, metavar="FILE", help="file to write; - is standard output")
    export.add_argument("--format", choices=("parquet", "jsonl"), help="default: by the ending of FILE")
    export.add_argument("--no-tokens", action="store_true", help="leave ids, log-probabilities and versions out")
    export.add_argument("--text", action="store_true", help="add the decoded text and the policy's part of it")
    export.add_argument("--tokenizer", metavar="FOLDER", help="Hugging Face folder (default: the run's)")
    spool_filter.add_arguments(export)

    add("audit", _audit, "prove from journal and spool that the staleness bound held for every sample and that each "
        "was trained at most once", "runs/quickstart")
    return parser


def _list(arguments: argparse.Namespace) -> int:
    from areal_hpc.analysis.spool_list import list_rows, list_shards
    from areal_hpc.analysis.spool_read import Spool

    kept = spool_filter.make_filter(arguments)
    if arguments.limit < 0:
        raise ConfigError(f"--limit={arguments.limit} must be at least 0")
    spool = Spool(Path(arguments.run))
    if arguments.rows:
        return list_rows(spool, kept, limit=arguments.limit, as_json=arguments.json)
    return list_shards(spool, kept, as_json=arguments.json)


def _show(arguments: argparse.Namespace) -> int:
    from areal_hpc.analysis.spool_read import Spool
    from areal_hpc.analysis.spool_show import find_trajectory, show_trajectory
    from areal_hpc.analysis.spool_text import load_decoder

    kept = spool_filter.make_filter(arguments)
    tokens = arguments.tokens and spool_filter.parse_interval("--tokens", arguments.tokens, whole=True)
    spool = Spool(Path(arguments.run))
    choice = find_trajectory(spool, arguments.trajectory, kept)
    try:
        decode = load_decoder(spool.paths, arguments.tokenizer)
    except ConfigError as error:
        if arguments.tokenizer:
            raise
        # A run folder may be read far from its model: ids say something too.
        print(f"areal-hpc: no text: {error}", file=sys.stderr)
        decode = None
    return show_trajectory(spool, choice, decode, tokens=tokens or None, as_json=arguments.json)


def _verify(arguments: argparse.Namespace) -> int:
    from areal_hpc.analysis.spool_read import Spool
    from areal_hpc.analysis.spool_verify import verify_spool

    return verify_spool(Spool(Path(arguments.run)))


def _export(arguments: argparse.Namespace) -> int:
    from areal_hpc.analysis.spool_export import export_spool, format_of
    from areal_hpc.analysis.spool_read import Spool
    from areal_hpc.analysis.spool_text import load_decoder

    kept = spool_filter.make_filter(arguments)
    form = format_of(arguments.output, arguments.format)
    spool = Spool(Path(arguments.run))
    decode = load_decoder(spool.paths, arguments.tokenizer) if arguments.text or arguments.tokenizer else None
    return export_spool(spool, kept, arguments.output, form, with_tokens=not arguments.no_tokens, decode=decode)


def _audit(arguments: argparse.Namespace) -> int:
    from areal_hpc.analysis.audit import audit_run

    root = Path(arguments.run)
    if not RunPaths(root).ledger.exists():
        raise ConfigError(f"RUN={str(root)!r} has no journal: give the folder of a run")
    return audit_run(root)
