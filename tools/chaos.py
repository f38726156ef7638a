"""Breaks a real run at random and counts what it cost: nothing may be lost or trained twice.

    python tools/chaos.py --kills N [--quick] [--max-minutes M] [--seed S] [--model FOLDER] [--folder FOLDER]
                          [--json FILE]

The run is the quickstart's task under mpiexec with Megatron and vLLM, on a tiny model. A
fault is SIGKILL of the controller, a trainer, a rollout, an engine's process, a reward
worker or everything; SIGSTOP of a rank or an engine; or a full disk (the run folder is a
small tmpfs; this needs root or user namespaces). What ends the job is answered by starting
it again; the last life runs to its end. After each recovery the audit must pass, and
`chaos_count` reads journal and spool on its own. Recovery is from the fault to the end of
the next training step. Prints the seed, a table, and exits with 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from chaos_count import count

ROOT = Path(__file__).resolve().parents[1]
ETA, GROUP_SIZE, BATCH_SIZE = 2, 8, 64
SILENCE_S, HANG_S = 60.0, 45.0
LIMIT_S = 900.0
"""Longest wait for anything: a start on a busy machine takes minutes."""
POLL_S = 0.5
TMPFS_BYTES = 512 * 1024**2
INSIDE = "AREAL_CHAOS_MOUNTS"
"""Set in the process that has a mount namespace of its own."""

WEIGHTS = {
    "kill controller": 1, "kill trainer": 1, "kill rollout": 1, "kill all": 1, "stop rank": 1, "disk full": 1,
    "kill engine": 4, "stop engine": 2, "kill reward worker": 12,
}  # fmt: skip
FATAL = frozenset({"kill controller", "kill trainer", "kill rollout", "kill all", "stop rank", "disk full"})
"""Faults that end the job. The others are survived, and cost less time: they are more frequent."""
FREQUENT = max(WEIGHTS, key=WEIGHTS.__getitem__)
TRAIN_OPTIONS = [
    f"algorithm.max_staleness={ETA}", f"rollout.group_size={GROUP_SIZE}", f"trainer.batch_size={BATCH_SIZE}",
    "rollout.max_num_seqs=32", "rollout.max_num_batched_tokens=2048", "rollout.enforce_eager=true",
    f"rollout.hang_deadline_s={HANG_S}", "rollout.max_engine_failures=1000", "rollout.shard_latency_s=0.2",
    f"run.silence_deadline_s={SILENCE_S}", f"run.start_deadline_s={LIMIT_S}", "weights.timeout_s=60",
    "data.heldout.task=", "data.train.size=1000", "checkpoint.every=2", "checkpoint.export_hf=false", "trainer.optimizer.schedule=constant",
    "trainer.optimizer.warmup_steps=0", "trainer.weight_history=1", "rewards.fn=format",
    "rewards.options={pattern: '.*[aeiou].*'}",
]  # fmt: skip


class Trouble(Exception):
    """The run did not come back as it should have."""


@dataclass(frozen=True)
class Outcome:
    """One fault and what followed; seconds from the fault on."""

    fault: str
    victim: str
    step: int
    noticed_s: float
    recovered_s: float
    lost: int
    trained_twice: int
    answered_again: int
    problems: tuple[str, ...]


def plan_faults(num: int, chance: random.Random, *, disk: bool) -> list[str]:
    """`num` faults in proportion to their weights, in random order; the last one ends the job.

    Each kind comes once before the others, with kills of reward workers in between, so
    that a run that is cut short by its time has seen all.
    """
    weights = {fault: weight for fault, weight in WEIGHTS.items() if disk or fault != "disk full"}
    kinds = chance.sample(sorted(weights), min(num - 1, len(weights)))
    rest = chance.choices(list(weights), list(weights.values()), k=num - 1 - len(kinds))
    plan = []
    for fault in kinds:
        plan.append(fault)
        while FREQUENT in rest and len(plan) % 3:
            rest.remove(FREQUENT)
            plan.append(FREQUENT)
    return [*plan, *rest, chance.choice(sorted(FATAL & weights.keys()))]


# ---- the job ---------------------------------------------------------------------------


class Job:
    """One life of the run: `areal-hpc run` and all processes below it."""

    def __init__(self, folder: Path, model: Path, total_steps: int, num_trainers: int, number: int) -> None:
        self.folder, self.run = folder, folder / "run"
        self.output = folder / f"life-{number:03d}.txt"
        self.began = time.time()
        command = [
            sys.executable, "-m", "areal_hpc.cli", "run", "configs/quickstart.yaml", "run.name=chaos",
            f"model.path={model}", f"run.folder={self.run}", f"run.total_steps={total_steps}",
            f"trainer.tp={num_trainers}", f"groups.trainer.ranks_per_node={num_trainers}",
            "run.on_existing=resume", *TRAIN_OPTIONS,
        ]  # fmt: skip
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def ranks(self) -> dict[str, psutil.Process]:
        """"trainer 1" -> process."""
        found = {}
        for process in self._below(psutil.Process(self.process.pid)):
            try:
                if "areal_hpc.main" in process.cmdline():
                    rank = int(process.environ()["PMI_RANK"])
                    found[self._name(rank)] = process
            except (psutil.Error, KeyError):
                continue
        return found

    def engine_processes(self) -> list[psutil.Process]:
        """vLLM's processes, the outermost first."""
        return [process for process in self._below(self.ranks()["rollout 0"]) if "VLLM" in _title(process)]

    def reward_workers(self) -> list[psutil.Process]:
        below = self._below(self.ranks()["rollout 0"])
        return [process for process in below if "areal_hpc.rewards.worker" in _title(process)]

    def records(self) -> list[dict]:
        """metrics.jsonl of this life."""
        path = self.run / "metrics.jsonl"
        if not path.exists():
            return []
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [record for line in lines if (record := json.loads(line))["time"] >= self.began]

    def step(self) -> int:
        """The newest training step of this life, -1 before the first."""
        return max((record["train_step"] for record in self.records() if record["kind"] == "step"), default=-1)

    def wait_for(self, what: str, seen: Callable[[], float | None]) -> float:
        """The time that `seen` returns once it returns one. Trouble if the job ends before, or it takes too long."""
        end = time.monotonic() + LIMIT_S
        while (when := seen()) is None:
            if self.process.poll() is not None and (when := seen()) is None:
                raise Trouble(f"the job ended with {self.process.returncode} before {what}:\n{self.text[-2000:]}")
            if when is None and time.monotonic() > end:
                raise Trouble(f"waited {LIMIT_S:.0f} s for {what}")
            time.sleep(POLL_S)
        return when

    def wait_for_step(self, since: float) -> float:
        """When the first step was done that was done after `since`."""
        return self.wait_for(
            "a training step",
            lambda: next((r["time"] for r in self.records() if r["kind"] == "step" and r["time"] > since), None),
        )

    def wait_for_end(self) -> float:
        try:
            self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Trouble(f"the job did not end within {LIMIT_S:.0f} s") from None
        return time.time()

    def kill(self) -> None:
        """Everything at once, the outermost process first."""
        if self.process.poll() is None:
            for process in [psutil.Process(self.process.pid), *self._below(psutil.Process(self.process.pid))]:
                _signal(process, signal.SIGKILL)
            self.process.wait()

    def _name(self, rank: int) -> str:
        last = max(1, self._num_trainers())
        return "controller 0" if rank == 0 else f"trainer {rank - 1}" if rank <= last else f"rollout {rank - 1 - last}"

    def _num_trainers(self) -> int:
        return next(int(part.split("=")[1]) for part in self.process.args if str(part).startswith("trainer.tp="))

    @staticmethod
    def _below(process: psutil.Process) -> list[psutil.Process]:
        try:
            return process.children(recursive=True)
        except psutil.Error:
            return []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        pass


# ---- faults ----------------------------------------------------------------------------


class Chaos:
    """The sequence of lives and faults of one run."""

    def __init__(self, folder: Path, model: Path, num_trainers: int, chance: random.Random) -> None:
        self.folder, self.model, self.num_trainers, self.chance = folder, model, num_trainers, chance
        self.outcomes: list[Outcome] = []
        self.problems: list[str] = []
        self.lives = 0
        self.job = self._start(10**6)

    def go(self, plan: list[str], max_s: float) -> None:
        """The faults of the plan; `max_s` seconds after the first training step only its last one."""
        self.job.wait_for_step(0.0)
        begun = time.monotonic()
        for index, fault in enumerate(plan):
            if time.monotonic() - begun > max_s and index < len(plan) - 1:
                continue
            time.sleep(self.chance.uniform(0.0, 4.0))
            outcome = self._fatal(fault, last=index == len(plan) - 1) if fault in FATAL else self._survived(fault)
            self.outcomes.append(outcome)
            self.problems += [f"{fault} of {outcome.victim}: {text}" for text in outcome.problems]
            print(row(len(self.outcomes), outcome), *outcome.problems, sep="\n      ", flush=True)
        self.job.wait_for_end()
        if self.job.process.returncode:
            self.problems.append(f"the last life ended with {self.job.process.returncode}: {self.job.text[-2000:]}")

    def _start(self, total_steps: int) -> Job:
        self.lives += 1
        return Job(self.folder, self.model, total_steps, self.num_trainers, self.lives)

    def _survived(self, fault: str) -> Outcome:
        """A fault below a rank: the rank replaces what was lost, the job goes on."""
        job, step = self.job, self.job.step()
        begun = time.time()
        if fault == "kill reward worker":
            before = {worker.pid for worker in job.reward_workers()}
            victim = self.chance.choice(job.reward_workers())
            begun = time.time()
            _signal(victim, signal.SIGKILL)
            replaced = job.wait_for(
                "a new reward worker",
                lambda: time.time() if {worker.pid for worker in job.reward_workers()} - before else None,
            )
        else:
            processes = job.engine_processes()
            victim = self.chance.choice(processes)
            begun = time.time()
            _signal(victim, signal.SIGKILL if fault == "kill engine" else signal.SIGSTOP)
            replaced = job.wait_for(
                "the engine's restart",
                lambda: next(
                    (r["time"] for r in job.records()
                     if r["kind"] == "event" and "was restarted" in r["text"] and r["time"] > begun),
                    None,
                ),
            )  # fmt: skip
        return self._outcome(fault, f"pid {victim.pid}", step, begun, replaced, job.wait_for_step(replaced), [])

    def _fatal(self, fault: str, *, last: bool) -> Outcome:
        """A fault that ends the job: it has to end by itself, say why, and go on when started again."""
        job, step = self.job, self.job.step()
        ranks, filler, victim = job.ranks(), job.run / "filler", ""
        begun = time.time()
        if fault == "kill all":
            victim = "every process"
            job.kill()
        elif fault == "disk full":
            victim = "the run folder"
            fill(filler, leave_bytes=self.chance.choice([0, 4096, 65536, 1 << 20]))
        else:
            role = fault.removeprefix("kill ").removesuffix("stop rank")
            victim = self.chance.choice(sorted(name for name in ranks if name.startswith(role)))
            _signal(ranks[victim], signal.SIGSTOP if fault == "stop rank" else signal.SIGKILL)
        ended = job.wait_for_end()
        text = job.text
        problems = []
        expected = {"stop rank": [f"no sign of life from {victim} on"], "disk full": ["disk full", str(job.run), "bytes"]}
        for words in expected.get(fault, []):
            if words not in text:
                problems.append(f"the job ended without saying {words!r}: {text[-1500:]}")
        if "Traceback (most recent call last)" in text:
            problems.append(f"the job ended with a traceback on the terminal: {text[-1500:]}")
        filler.unlink(missing_ok=True)
        self.job = self._start(step + ETA + 8 if last else 10**6)
        return self._outcome(fault, victim, step, begun, ended, self.job.wait_for_step(ended), problems)

    def _outcome(
        self, fault: str, victim: str, step: int, begun: float, noticed: float, recovered: float, problems: list[str]
    ) -> Outcome:
        found = count(self.job.run, GROUP_SIZE, finished=False)
        return Outcome(
            fault, victim, step, noticed - begun, recovered - begun, found.lost, found.trained_twice,
            found.answered_again, (*problems, *audit_problems(self.job.run)),
        )  # fmt: skip


def fill(path: Path, *, leave_bytes: int) -> None:
    """Take all space of the filesystem but about `leave_bytes`, which the run goes on to use meanwhile."""
    with open(path, "wb") as file:
        for _ in range(100):
            free = os.statvfs(path.parent)
            size = os.fstat(file.fileno()).st_size
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, size + free.f_bavail * free.f_frsize - leave_bytes))
                return
            except OSError as error:  # the run was quicker
                if error.errno != errno.ENOSPC:
                    raise
    raise Trouble("the filesystem could not be filled")


def audit_problems(run: Path) -> list[str]:
    from areal_hpc.analysis.audit import audit
    from areal_hpc.paths import RunPaths

    return [f"audit: {text}" for text in audit(RunPaths(run)).problems]


# ---- report ----------------------------------------------------------------------------

HEADER = f"{'no':>3} {'fault':<19} {'victim':<15} {'at step':>7} {'noticed s':>9} {'recovered s':>11} {'lost':>5} {'twice':>5}"


def row(number: int, outcome: Outcome) -> str:
    return (
        f"{number:>3} {outcome.fault:<19} {outcome.victim:<15} {outcome.step:>7} {outcome.noticed_s:>9.1f} "
        f"{outcome.recovered_s:>11.1f} {outcome.lost + outcome.answered_again:>5} {outcome.trained_twice:>5}"
    )


def report(chaos: Chaos, seed: int, seconds: float) -> dict[str, float]:
    """The table by kind of fault; the figures of the whole run."""
    final = count(chaos.job.run, GROUP_SIZE, finished=chaos.job.process.returncode == 0)
    problems = audit_problems(chaos.job.run)
    chaos.problems += problems
    print(f"\n| fault | times | noticed s, mean | recovered s, mean | largest | lost | trained twice |\n|{' --- |' * 7}")
    for fault in dict.fromkeys(outcome.fault for outcome in chaos.outcomes):
        mine = [outcome for outcome in chaos.outcomes if outcome.fault == fault]
        print(
            f"| {fault} | {len(mine)} | {sum(o.noticed_s for o in mine) / len(mine):.1f} | "
            f"{sum(o.recovered_s for o in mine) / len(mine):.1f} | {max(o.recovered_s for o in mine):.1f} | "
            f"{max(o.lost + o.answered_again for o in mine)} | {max(o.trained_twice for o in mine)} |"
        )
    audits = sum(any(text.startswith("audit") for text in outcome.problems) for outcome in chaos.outcomes)
    values = {
        "kills": len(chaos.outcomes),
        "lost": final.lost + final.answered_again,
        "trained_twice": final.trained_twice,
        "audit_failures": audits + bool(problems),
        "max_recovery_s": round(max((outcome.recovered_s for outcome in chaos.outcomes), default=0.0), 1),
        "lives": chaos.lives,
        "trajectories": final.trained,
        "problems": len(chaos.problems),
        "seed": seed,
        "seconds": round(seconds),
    }
    print("\n" + ", ".join(f"{name} {value}" for name, value in values.items()))
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="one trainer rank instead of two")
    parser.add_argument("--max-minutes", type=float, default=600.0, help="after this time only the last fault")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--model", type=Path, help="Hugging Face folder; a tiny random model without it")
    parser.add_argument("--folder", type=Path, help="work folder, kept; without it a temporary one")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.kills < 1:
        parser.error(f"--kills {arguments.kills}: at least 1")
    if INSIDE not in os.environ and (namespace := mount_namespace()):
        os.execvpe(namespace[0], [*namespace, sys.executable, *sys.argv], {**os.environ, INSIDE: "1"})
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="chaos-")).resolve()
    (folder / "run").mkdir(parents=True, exist_ok=True)
    disk = INSIDE in os.environ
    if disk:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES},mode=700", "none", folder / "run"], check=True)
    chance = random.Random(seed)
    plan = plan_faults(arguments.kills, chance, disk=disk)
    print(f"seed {seed}, folder {folder}" + ("" if disk else "; no small tmpfs here: the disk is not filled"))
    print(HEADER, flush=True)
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chaos = Chaos(folder, arguments.model or make_model(folder / "model"), 1 if arguments.quick else 2, chance)
    try:
        chaos.go(plan, 60.0 * arguments.max_minutes)
    except Trouble as error:
        chaos.problems.append(str(error))
    finally:
        chaos.job.kill()
    values = report(chaos, seed, time.monotonic() - begun)
    for problem in chaos.problems:
        print(f"problem: {problem}")
    if arguments.json:
        arguments.json.write_text(json.dumps(values) + "\n")
    bad = values["lost"] or values["trained_twice"] or values["audit_failures"] or chaos.problems
    if not arguments.folder and not bad:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if bad else 0


def mount_namespace() -> list[str]:
    """Command prefix under which a tmpfs may be mounted that goes with the process; [] if there is none."""
    for prefix in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        if shutil.which("unshare") and not subprocess.run([*prefix, "true"], capture_output=True).returncode:
            return prefix
    return []


def make_model(folder: Path) -> Path:
    """A random model of the quickstart's kind, small enough to start quickly."""
    from areal_hpc.config.sft_schema import ScratchConfig, SftConfig, SftInitConfig
    from areal_hpc.launch.sft import make_scratch_model

    if not folder.exists():
        scratch = ScratchConfig(
            hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=128, max_positions=1024
        )
        make_scratch_model(SftConfig(seed=3, init=SftInitConfig(scratch=scratch)), folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
