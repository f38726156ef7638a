"""Text of the batch script: one heterogeneous job, one component per node group. Pure.

Everything that comes from the configuration is an option value or a quoted word; the
shell only loads modules, exports variables and becomes Python. Called by `hetjob`.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.schema import Config, GroupConfig
from areal_hpc.launch.plan import GroupPlan, JobPlan
from areal_hpc.launch.site import Site

RESERVED = {
    "job-name", "output", "error", "open-mode", "time", "signal", "requeue", "no-requeue", "no-kill", "nodes",
    "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "mem", "partition", "account", "qos",
    "constraint", "array", "wrap", "het-group", "parsable", "test-only", "wait",
}  # fmt: skip
_OPTION = re.compile(r"[a-z][a-z0-9-]*")


def render_script(config: Config, plan: JobPlan, site: Site, *, log: str, command: list[str]) -> str:
    """The script; `command` becomes the batch step's process, `log` takes its output."""
    lines = ["#!/bin/bash -l", f"# Run {_comment(config.run.name)}, written by areal-hpc submit."]
    common = {
        # Slurm prints names unquoted among other fields.
        "job-name": re.sub(r"[^\w.+-]+", "-", config.run.name, flags=re.ASCII),
        "output": log,
        # A requeued job goes on in the same log.
        "open-mode": "append",
    }
    for index, group in enumerate(plan.groups):
        settings: GroupConfig = getattr(config.groups, group.role)
        if index:
            lines += ["#SBATCH hetjob"]
        lines += [f"# {group.role}"]
        options = {**(common if index == 0 else {}), **_component_options(config, group, settings, leader=index == 0)}
        lines += [_option(group.role, name, value) for name, value in options.items()]
    lines += ["", *_environment(site), ""]
    lines += ["exec " + shlex.join(command), ""]
    return "\n".join(lines)


def _component_options(config: Config, group: GroupPlan, settings: GroupConfig, *, leader: bool) -> dict[str, str]:
    launch = config.launch
    options: dict[str, str] = {
        "nodes": str(group.allocated_nodes),
        "ntasks-per-node": str(group.ranks_per_node),
        "cpus-per-task": str(group.cpus_per_rank),
        "time": str(launch.time_min),
        # To the batch process alone (B:), which is the supervisor; it tells the step once.
        **({"signal": f"B:USR2@{launch.signal_lead_s}"} if leader else {}),
        "requeue": "",
    }
    if launch.spare_nodes:
        options["no-kill"] = ""
    if group.gpus_per_node:
        options["gpus-per-node"] = str(group.gpus_per_node)
    if settings.mem_gib_per_node:
        options["mem"] = f"{settings.mem_gib_per_node}G"
    for name in ("partition", "account", "qos", "constraint"):
        if getattr(settings, name):
            options[name] = getattr(settings, name)
    for name, value in settings.sbatch_options.items():
        if not _OPTION.fullmatch(name):
            raise ConfigError(f"groups.{group.role}.sbatch_options: {name!r} is not the name of an sbatch option")
        if name in RESERVED:
            raise ConfigError(f"groups.{group.role}.sbatch_options.{name} is set by a key of its own: remove it")
        options[name] = value
    return options


def _option(role: str, name: str, value: str) -> str:
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise ConfigError(f"sbatch option {name} of {role} is {value!r}: control characters are not allowed")
    return f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "")


def _environment(site: Site) -> list[str]:
    lines = [f"# site profile {_comment(site.name)}"] if site.name else []
    lines += [f"module load {shlex.quote(module)}" for module in site.modules]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in site.environment.items()]
    return [*lines, "export SUBMITIT_EXECUTOR=slurm SUBMITIT_PREEMPT_SIGNAL=USR2"]


def _comment(text: str) -> str:
    return " ".join(text.split())


def check_log_folder(folder: Path) -> None:
    """Slurm replaces %-patterns in the names of its logs, so the run folder may hold none."""
    if "%" in str(folder) or "\\" in str(folder) or "\n" in str(folder):
        raise ConfigError(f"run.folder={folder} contains a character that Slurm would replace: choose another")
