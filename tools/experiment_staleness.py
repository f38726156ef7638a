"""Accuracy against staleness: the quickstart task by naive and by decoupled PPO.

    python tools/experiment_staleness.py --quick --json staleness.json
    python tools/experiment_staleness.py --folder runs/staleness --plot staleness.png

One run of configs/quickstart.yaml for every objective, eta and seed, one after another, all
from the same starting model and with the same number of steps. How old data become depends
on which side is faster, hence on the machine: algorithm.backlog=eta holds every step back
until eta batches wait, so that data are as old as the bound allows. The figure of a run is
its last held-out accuracy; the staleness that its trained tokens had (mean over tokens,
largest) is printed beside it, since a bound that is never reached proves nothing. Finished
runs are reused and an interrupted one is resumed: start the command again to go on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OBJECTIVES = ("decoupled", "naive")


@dataclass(frozen=True)
class Case:
    """One run."""

    objective: str
    eta: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.objective}_eta{self.eta}_seed{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What a run came to: accuracies in [0, 1], staleness in versions."""

    before: float
    after: float
    mean_staleness: float
    max_staleness: int


def main() -> int:
    arguments = parse()
    cases = [
        Case(objective, eta, seed)
        for seed in range(arguments.seeds)
        for eta in arguments.etas
        for objective in OBJECTIVES
    ]
    outcomes: dict[Case, Outcome] = {}
    for number, case in enumerate(cases, start=1):
        begun = time.monotonic()
        outcomes[case] = run(case, arguments)
        print(
            f"{number}/{len(cases)} {case.name}: {outcomes[case].before:.3f} -> {outcomes[case].after:.3f}, "
            f"staleness {outcomes[case].mean_staleness:.2f}/{outcomes[case].max_staleness}, "
            f"{time.monotonic() - begun:.0f} s",
            flush=True,
        )
        # After every run: what was measured survives an interruption.
        if arguments.json:
            figures = {done.name: outcome.after for done, outcome in outcomes.items()}
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print_table(outcomes, arguments.etas)
    if arguments.plot:
        plot(outcomes, arguments.etas, arguments.plot)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="eta 0 and 4, one seed, 4 steps: does it run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the final accuracy of each run")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the curve of accuracy against eta")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "staleness", help="run folders (default: %(default)s)")
    parser.add_argument("--model", default="models/quickstart", help="starting model (default: %(default)s)")
    parser.add_argument("--etas", default="0,1,4,16", help="staleness bounds (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N-1 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="training steps of a run (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="answers of a step (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further configuration of every run")
    arguments = parser.parse_args()
    try:
        arguments.etas = [0, 4] if arguments.quick else sorted({int(eta) for eta in arguments.etas.split(",")})
    except ValueError:
        parser.error(f"--etas {arguments.etas} must be whole numbers with commas between them")
    if not (ROOT / arguments.model / "config.json").exists():
        parser.error(f"--model {arguments.model} is no model folder; make it: areal-hpc sft configs/quickstart_sft.yaml")
    if arguments.quick:
        arguments.seeds, arguments.steps = 1, 4
    return arguments


def settings(case: Case, steps: int, batch: int) -> list[str]:
    """What sets a case apart from configs/quickstart.yaml. Weights are not truncated, as in the paper."""
    return [
        f"run.seed={case.seed}", f"run.total_steps={steps}", f"trainer.batch_size={batch}",
        f"algorithm.objective={case.objective}", "algorithm.behaviour_weight=full",
        f"algorithm.max_staleness={case.eta}", f"algorithm.backlog={case.eta}",
        # Long enough a memory to compare the engine's log-probabilities at equal weights.
        f"trainer.weight_history={case.eta + 1}",
    ]  # fmt: skip


def run(case: Case, arguments: argparse.Namespace) -> Outcome:
    """Run or finish one case; raises SystemExit with the last lines of a run that failed."""
    folder = (arguments.folder / f"{case.name}_steps{arguments.steps}").resolve()
    found = read(folder, arguments.steps)
    if found:
        return found
    command = [
        sys.executable, "-m", "areal_hpc.cli", "run", "configs/quickstart.yaml", f"run.folder={folder}",
        f"model.path={arguments.model}", "run.start_deadline_s=600", "run.on_existing=resume",
        *settings(case, arguments.steps, arguments.batch), *arguments.overrides,
    ]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = read(folder, arguments.steps)
    if result.returncode or not found:
        raise SystemExit(f"{case.name} failed with code {result.returncode}:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return found


def read(folder: Path, steps: int) -> Outcome | None:
    """The outcome of a finished run, or None."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return None
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    evaluations = {record["train_step"]: record["accuracy"] for record in records if record["kind"] == "eval"}
    # A resumed run repeats steps: the later record counts.
    trained = {record["train_step"]: record for record in records if record["kind"] == "step"}
    if steps not in evaluations or len(trained) != steps:
        return None
    tokens = {step: record["trainer/num_loss_tokens"] for step, record in trained.items()}
    age = sum(record["trainer/token_staleness_mean"] * tokens[step] for step, record in trained.items())
    return Outcome(
        before=evaluations[0],
        after=evaluations[steps],
        mean_staleness=age / sum(tokens.values()),
        max_staleness=int(max(record["trainer/staleness_max"] for record in trained.values())),
    )


def print_table(outcomes: dict[Case, Outcome], etas: list[int]) -> None:
    print(f"\n{'eta':>4} {'objective':>10}  {'accuracy of each seed':<28} {'mean':>6} {'staleness':>10}")
    for eta in etas:
        for objective in OBJECTIVES:
            mine = select(outcomes, objective, eta)
            each = " ".join(f"{outcome.after:.3f}" for outcome in mine)
            mean = statistics.fmean(outcome.after for outcome in mine)
            age = f"{statistics.fmean(o.mean_staleness for o in mine):.2f}/{max(o.max_staleness for o in mine)}"
            print(f"{eta:>4} {objective:>10}  {each:<28} {mean:>6.3f} {age:>10}")


def select(outcomes: dict[Case, Outcome], objective: str, eta: int) -> list[Outcome]:
    return [outcome for case, outcome in outcomes.items() if (case.objective, case.eta) == (objective, eta)]


def plot(outcomes: dict[Case, Outcome], etas: list[int], file: Path) -> None:
    """Mean over seeds with every seed as a point; eta on an even scale, since it begins at 0."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for objective, colour in zip(OBJECTIVES, ("tab:blue", "tab:orange")):
        runs = [[outcome.after for outcome in select(outcomes, objective, eta)] for eta in etas]
        axes.plot(range(len(etas)), [statistics.fmean(each) for each in runs], color=colour, marker="o", label=objective)
        for place, each in enumerate(runs):
            axes.scatter([place] * len(each), each, color=colour, alpha=0.35, s=16)
    axes.set_xticks(range(len(etas)), [str(eta) for eta in etas])
    axes.set_xlabel("largest staleness eta (versions)")
    axes.set_ylabel("held-out accuracy after training")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
