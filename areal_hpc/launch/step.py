"""The one srun of a job: all roles as one MPI world, each on its own nodes. Pure but for `start`.

Called by the supervisor, which is the batch step. Every component is written out
(`srun A : B : C`) rather than `--het-group=0-2 COMMAND`: srun does not take CPUs per
task over from sbatch, spare nodes must be left out, and thread counts differ by role.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from areal_hpc.config.schema import Config
from areal_hpc.launch.plan import GroupPlan, JobPlan

NODE_PLAN_VARIABLE = "AREAL_NODE_PLAN"
"""Tells every rank which node each group works on: `n1;n2,n3;n4`."""

REFUSAL_VARIABLE = "AREAL_REFUSAL_FILE"
"""Tells every rank where the supervisor of its own job looks for a refusal."""

LEAVE_DEADLINE_S = 300
"""Between the first rank's end and the last one's."""

_FAULT = re.compile(r"srun: error: (?:Node failure on|[^:]+: tasks? [\d,-]+: )")


def srun_command(
    config: Config, plan: JobPlan, nodes: Sequence[Sequence[str]], rank_arguments: Sequence[str],
    python: str = sys.executable,
) -> list[str]:
    """The command line; `nodes[g]` are the working nodes of group g."""
    command = ["srun"]
    for index, (group, names) in enumerate(zip(plan.groups, nodes, strict=True)):
        command += [":"] if index else []
        command += [f"--het-group={index}", *_options(config, group, names)]
        threads = "1" if group.role == "controller" else str(group.cpus_per_rank)
        command += ["env", f"OMP_NUM_THREADS={threads}", python, *rank_arguments]
    return command


def _options(config: Config, group: GroupPlan, names: Sequence[str]) -> list[str]:
    options = [
        f"--mpi={config.launch.mpi}",
        "--export=ALL",
        # One rank lost is a world lost. srun would give the others KillWait (30 s) to leave,
        # which they cannot; the supervisor ends them at once, and srun itself if that fails.
        "--kill-on-bad-exit=0",
        f"--wait={LEAVE_DEADLINE_S}",
        "--distribution=block",
        f"--nodes={group.nodes}",
        f"--ntasks={group.ranks}",
        f"--ntasks-per-node={group.ranks_per_node}",
        f"--cpus-per-task={group.cpus_per_rank}",
        f"--nodelist={','.join(names)}",
        # All the memory that the job has on the node: the leader's --mem holds for the leader only.
        "--mem=0",
    ]
    if group.gpus_per_node:
        # Every rank sees its node's GPUs and takes its own: peers on a node need to see each other's.
        options += [f"--gpus-per-node={group.gpus_per_node}", "--gpu-bind=none"]
    return options


def node_plan(nodes: Sequence[Sequence[str]]) -> str:
    return ";".join(",".join(names) for names in nodes)


def parse_node_plan(text: str) -> list[list[str]]:
    return [part.split(",") for part in text.split(";")]


def step_environment(nodes: Sequence[Sequence[str]], refusal: Path | None) -> dict[str, str]:
    environment = dict(os.environ)
    environment[NODE_PLAN_VARIABLE] = node_plan(nodes)
    if refusal is not None:
        environment[REFUSAL_VARIABLE] = str(refusal)
    environment.setdefault("HF_HUB_OFFLINE", "1")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment.setdefault("PYTHONUNBUFFERED", "1")
    return environment


def start(
    command: Sequence[str], nodes: Sequence[Sequence[str]], refusal: Path | None = None
) -> subprocess.Popen[str]:
    """Start srun in a session of its own: the supervisor decides which signals reach the ranks.

    refusal: the file in which a rank says why starting again cannot help.
    """
    return subprocess.Popen(
        list(command), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True, env=step_environment(nodes, refusal),
    )


def is_fault(line: str) -> bool:
    """Whether a line of srun's says that a rank or a node was lost."""
    return _FAULT.match(line) is not None
