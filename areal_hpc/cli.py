"""The `areal-hpc` command: one subcommand per thing a user does, each imported when called.

Exit codes: 0 success, 1 failure at run time, 2 a user's mistake (one line says which).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

EXAMPLES = """examples:
  areal-hpc check configs/quickstart.yaml
  areal-hpc run configs/quickstart.yaml run.seed=1 run.folder=runs/seed1
  areal-hpc run configs/quickstart.yaml run.on_existing=resume
  areal-hpc sft configs/quickstart_sft.yaml
"""


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    from areal_hpc.config.load import ConfigError

    try:
        return arguments.command(arguments)
    except ConfigError as error:
        print(f"areal-hpc: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) closed the pipe: nothing is wrong.
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    from areal_hpc import __version__

    parser = argparse.ArgumentParser(
        prog="areal-hpc",
        description="Asynchronous reinforcement learning of reasoning models on supercomputers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"areal-hpc {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _configured(commands, "run", _run, "train on this machine (starts mpiexec itself)",
                "areal-hpc run configs/quickstart.yaml run.total_steps=20")
    _configured(commands, "check", _check, "find mistakes in a configuration before a job is queued",
                "areal-hpc check configs/quickstart.yaml trainer.tp=2")
    _configured(commands, "sft", _sft, "train a starting model on prompt/response examples",
                "areal-hpc sft configs/quickstart_sft.yaml output=models/mine")
    return parser


def _configured(
    commands: argparse._SubParsersAction,
    name: str,
    command: Callable[[argparse.Namespace], int],
    text: str,
    example: str,
) -> argparse.ArgumentParser:
    """A subcommand that takes a configuration file and overrides."""
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the file's")
    parser.set_defaults(command=command)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.local import run_local

    return run_local(arguments.config, arguments.overrides)


def _check(arguments: argparse.Namespace) -> int:
    from areal_hpc.config.load import load_config
    from areal_hpc.launch.preflight import check_files

    config = load_config(arguments.config, arguments.overrides)
    found = check_files(config)
    print(
        f"ok: {found.model_type} with {found.num_parameters / 1e6:.1f}M parameters, "
        f"{len(found.prompts.train)} training and {len(found.prompts.heldout)} held-out prompts, "
        f"longest prompt {found.longest_prompt} tokens"
    )
    return 0


def _sft(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.sft import run_sft

    return run_sft(arguments.config, arguments.overrides)


if __name__ == "__main__":
    sys.exit(main())
