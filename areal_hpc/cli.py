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
  areal-hpc eval configs/quickstart.yaml --model runs/quickstart
  areal-hpc spool ls runs/quickstart
  areal-hpc plan configs/quickstart.yaml --from runs/quickstart
  areal-hpc status runs/quickstart --watch
  areal-hpc report runs/quickstart -o report.html
"""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    own_parser = OWN_PARSERS.get(argv[0]) if argv else None
    from areal_hpc.config.errors import ConfigError
    from areal_hpc.durable import DiskFullError

    try:
        return own_parser(argv[1:]) if own_parser else _dispatch(argv)
    except ConfigError as error:
        print(f"areal-hpc: {error}", file=sys.stderr)
        return 2
    except DiskFullError as error:
        print(f"areal-hpc: {error.strerror}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (head, less) closed the pipe: nothing is wrong.
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130


def _dispatch(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    return arguments.command(arguments)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """As argparse, but key=value overrides may also follow the options."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        stray = any(item.startswith("-") or "=" not in item for item in rest)
        if stray or not hasattr(arguments, "overrides"):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        arguments.overrides += rest
    return arguments


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
    submit = _configured(commands, "submit", _submit, "queue the run on a Slurm cluster as one heterogeneous job",
                         "areal-hpc submit configs/quickstart.yaml launch.site=rehearsal --dry-run")
    submit.add_argument("--dry-run", action="store_true", help="print batch script and node plan; needs no Slurm")
    job = commands.add_parser("job", help="see, stop, requeue or cancel a submitted run",
                              description="See, stop, requeue or cancel a submitted run.")
    job.add_argument("action", choices=("status", "stop", "requeue", "cancel", "logs"),
                     help="stop and requeue let the run save; cancel ends it")
    job.add_argument("target", metavar="RUN", help="run folder or job id")
    job.set_defaults(command=_job)
    doctor = commands.add_parser("doctor", help="check a cluster: Slurm, MPI, packages, GPUs, filesystem",
                                 description="Check a cluster, on this node or on the nodes of a short job.")
    doctor.add_argument("config", nargs="?", help="YAML file whose paths, groups and site are checked too")
    doctor.add_argument("overrides", nargs="*", metavar="key=value")
    doctor.add_argument("--job", action="store_true", help="also check on the nodes of a short job (needs CONFIG)")
    doctor.set_defaults(command=_doctor)
    _configured(commands, "check", _check, "find mistakes in a configuration before a job is queued",
                "areal-hpc check configs/quickstart.yaml trainer.tp=2")
    _configured(commands, "sft", _sft, "train a starting model on prompt/response examples",
                "areal-hpc sft configs/quickstart_sft.yaml output=models/mine")
    plan = _configured(commands, "plan", _plan, "memory per rank, and the speed of every split of the nodes",
                       "areal-hpc plan big.yaml groups.rollout.nodes=3 --from runs/quickstart\n"
                       "  areal-hpc plan big.yaml run.device=cuda --model-size 7B --gpu-memory-gib 64")
    plan.add_argument("--from", dest="from_run", metavar="RUN", help="take rates and lengths from this run")
    plan.add_argument("--model-size", metavar="SIZE", help="1.5B, 7B, ... where model.path is elsewhere")
    plan.add_argument("--gpu-memory-gib", type=float, metavar="GIB", help="memory of one GPU (default 80)")
    plan.add_argument("--answer-tokens", type=float, metavar="N", help="mean answer (a fifth of the limit)")
    plan.add_argument("--json", action="store_true", help="print JSON")
    evaluate = _configured(commands, "eval", _eval, "accuracy of a model or of a run's last weights on data.heldout",
                           "areal-hpc eval configs/quickstart.yaml --model runs/quickstart")
    evaluate.add_argument("--model", metavar="RUN|MODEL", help="run or Hugging Face folder (default: model.path)")
    evaluate.add_argument("-o", "--output", metavar="FILE", help="write one scored answer a line")
    # Parsed by the functions in OWN_PARSERS, so that --help of the others stays fast.
    commands.add_parser("score", help="score the answers of a JSONL file with a reward", add_help=False)
    export = commands.add_parser("export", help="write a checkpoint of a run as a Hugging Face folder",
                                 description="Write a checkpoint of a run as a Hugging Face folder.",
                                 epilog="example:\n  areal-hpc export runs/quickstart --step 20 -o models/step20",
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    export.add_argument("run", help="run folder")
    export.add_argument("--step", type=int, help="training step (default: the newest checkpoint)")
    export.add_argument("-o", "--output", metavar="FOLDER", help="default: exports/ in the run folder")
    export.set_defaults(command=_export)
    replay = commands.add_parser("replay", help="train again on what a run recorded, with the same or other options",
                                 description="Train again on the batches of a run, without engines: with the same "
                                             "options to reproduce its weights, with others to see what these would "
                                             "have changed.",
                                 epilog="examples:\n  areal-hpc replay runs/quickstart\n"
                                        "  areal-hpc replay runs/quickstart algorithm.behaviour_weight=full -o runs/full\n"
                                        "  areal-hpc replay runs/quickstart algorithm.max_staleness=1 "
                                        "algorithm.clip_eps=0.1",
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    replay.add_argument("run", metavar="RUN", help="run folder")
    replay.add_argument("overrides", nargs="*", metavar="key=value", help="other options of algorithm or trainer")
    replay.add_argument("-o", "--output", metavar="FOLDER", help="default: RUN-replay, beside the run folder")
    replay.set_defaults(command=_replay)
    commands.add_parser("status", help="how a run is: progress, speed, staleness, signs of life", add_help=False)
    commands.add_parser("report", help="write an HTML file about one run or several", add_help=False)
    commands.add_parser("trace", help="write a run as trace events for Perfetto", add_help=False)
    commands.add_parser("spool", help="list, show, verify, export and audit a run's trajectories", add_help=False)
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


def _submit(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.submit import run_submit

    return run_submit(arguments.config, arguments.overrides, dry_run=arguments.dry_run)


def _job(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.status import run_job_command

    return run_job_command(arguments.action, arguments.target)


def _doctor(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.doctor import run_doctor

    return run_doctor(arguments.config, arguments.overrides, job=arguments.job)


def _check(arguments: argparse.Namespace) -> int:
    from areal_hpc.config.load import load_config, training_warnings
    from areal_hpc.launch.preflight import check_files

    config = load_config(arguments.config, arguments.overrides)
    found = check_files(config)
    for warning in training_warnings(config):
        print(f"warning: {warning}", file=sys.stderr)
    print(
        f"ok: {found.model_type} with {found.num_parameters / 1e6:.1f}M parameters, "
        f"{len(found.prompts.train)} training and {len(found.prompts.heldout)} held-out prompts, "
        f"longest prompt {found.longest_prompt} tokens"
    )
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from areal_hpc.plan.cli import plan_main

    return plan_main(
        arguments.config,
        arguments.overrides,
        from_run=arguments.from_run,
        model_size=arguments.model_size,
        gpu_memory_gib=arguments.gpu_memory_gib,
        answer_tokens=arguments.answer_tokens,
        as_json=arguments.json,
    )


def _eval(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from areal_hpc.config.load import ConfigError, load_config
    from areal_hpc.paths import RunPaths

    config = load_config(arguments.config, arguments.overrides)
    model = Path(arguments.model or config.model.path)
    if RunPaths(model).config.exists():
        exports = sorted(RunPaths(model).exports.glob("step-*"))
        if not exports:
            raise ConfigError(f"--model={model} is a run without exported weights; call areal-hpc export {model} first")
        model = exports[-1]
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model={model} is neither a run nor a Hugging Face folder")
    from areal_hpc.analysis.evaluate import evaluate_and_print

    return evaluate_and_print(config, model, arguments.output)


def _score(argv: list[str]) -> int:
    from areal_hpc.rewards.score import main as score_main

    return score_main(argv)


def _export(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from areal_hpc.paths import RunPaths
    from areal_hpc.trainer.export import export_run

    output = Path(arguments.output) if arguments.output else None
    print(f"wrote {export_run(RunPaths(Path(arguments.run).resolve()), arguments.step, output)}")
    return 0


def _spool(argv: list[str]) -> int:
    from areal_hpc.analysis.spool_cli import main as spool_main

    return spool_main(argv)


def _replay(arguments: argparse.Namespace) -> int:
    from areal_hpc.replay.command import run_replay

    return run_replay(arguments.run, arguments.overrides, arguments.output)


def _status(argv: list[str]) -> int:
    from areal_hpc.analysis.status_view import main as status_main

    return status_main(argv)


def _report(argv: list[str]) -> int:
    from areal_hpc.analysis.report import main as report_main

    return report_main(argv)


def _trace(argv: list[str]) -> int:
    from areal_hpc.analysis.trace import main as trace_main

    return trace_main(argv)


def _sft(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.sft import run_sft

    return run_sft(arguments.config, arguments.overrides)


OWN_PARSERS: dict[str, Callable[[list[str]], int]] = {
    "score": _score,
    "spool": _spool,
    "status": _status,
    "report": _report,
    "trace": _trace,
}
"""Commands that parse what follows their name themselves."""


if __name__ == "__main__":
    sys.exit(main())
