"""Site profiles, slurm/sites/*.yaml: modules, environment, MPI and defaults of the node groups.

A profile fills what the configuration leaves open and never replaces what it says. Read
on the login node by `submit` and `doctor`; nothing in it is a shell command.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.schema import Config, GroupConfig
from areal_hpc.launch.plan import ROLES

FOLDER = Path(__file__).resolve().parents[2] / "slurm" / "sites"
FILLED_BY_SITE = ("partition", "account", "qos", "constraint")
DEFAULT_MPI = "pmi2"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MPI = re.compile(r"[a-z][a-z0-9_]*")
_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+/@=-]*")


@dataclass(frozen=True)
class Site:
    """A profile as read."""

    name: str = ""
    description: str = ""
    mpi: str = ""
    modules: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    sbatch_options: dict[str, str] = field(default_factory=dict)
    """Options of every component, name -> value; "" for an option without one."""
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """role -> partition, account, qos, constraint, sbatch_options."""


def load_site(name: str) -> Site:
    """The profile `name` of slurm/sites, or the file at that path; "" is an empty profile."""
    if not name:
        return Site()
    path = Path(name).expanduser() if "/" in name or name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(entry.stem for entry in FOLDER.glob("*.yaml"))) or "none"
        raise ConfigError(f"launch.site={name}: no profile {path}; those of slurm/sites are: {known}")
    try:
        values = OmegaConf.to_container(OmegaConf.load(path)) or {}
    except Exception as error:  # OmegaConf passes YAML's own exceptions through
        raise ConfigError(f"site profile {path} is not readable YAML: {' '.join(str(error).split())}") from None
    known_keys = {entry.name for entry in fields(Site)} - {"name"}
    unknown = sorted(set(values) - known_keys)
    if unknown:
        raise ConfigError(f"site profile {path}: unknown key {unknown[0]}; valid are {', '.join(sorted(known_keys))}")
    site = Site(
        name=name,
        description=str(values.get("description", "")),
        mpi=str(values.get("mpi", "")),
        modules=tuple(map(str, values.get("modules") or ())),
        environment=_strings(values.get("environment")),
        sbatch_options=_strings(values.get("sbatch_options")),
        groups={role: dict(group or {}) for role, group in (values.get("groups") or {}).items()},
    )
    _check(site, path)
    return site


def apply_site(config: Config, site: Site) -> Config:
    """The configuration with the profile's defaults filled in; sites cannot override keys that are set."""
    groups = {role: _fill(getattr(config.groups, role), site, site.groups.get(role, {})) for role in ROLES}
    mpi = config.launch.mpi or site.mpi or DEFAULT_MPI
    if not _MPI.fullmatch(mpi):
        raise ConfigError(f"launch.mpi={mpi!r} is no name that `srun --mpi=list` shows, such as pmi2 or cray_shasta")
    return replace(
        config, groups=replace(config.groups, **groups), launch=replace(config.launch, mpi=mpi)
    )


def _fill(group: GroupConfig, site: Site, defaults: dict[str, Any]) -> GroupConfig:
    filled = {name: getattr(group, name) or str(defaults.get(name, "")) for name in FILLED_BY_SITE}
    options = {**site.sbatch_options, **_strings(defaults.get("sbatch_options")), **group.sbatch_options}
    return replace(group, **filled, sbatch_options=options)


def _strings(values: dict[str, Any] | None) -> dict[str, str]:
    return {str(name): "" if value is None else str(value) for name, value in (values or {}).items()}


def _check(site: Site, path: Path) -> None:
    for name, value in site.environment.items():
        if not _VARIABLE.fullmatch(name) or "\n" in value:
            raise ConfigError(f"site profile {path}: environment.{name} is not a variable with a one-line value")
    for module in site.modules:
        if not _MODULE.fullmatch(module):
            raise ConfigError(f"site profile {path}: module name {module!r} has characters that none has")
    for role, group in site.groups.items():
        if role not in ROLES:
            raise ConfigError(f"site profile {path}: groups.{role} is not one of {', '.join(ROLES)}")
        unknown = sorted(set(group) - {*FILLED_BY_SITE, "sbatch_options"})
        if unknown:
            raise ConfigError(f"site profile {path}: groups.{role}.{unknown[0]} is not one of "
                              f"{', '.join((*FILLED_BY_SITE, 'sbatch_options'))}")  # fmt: skip
