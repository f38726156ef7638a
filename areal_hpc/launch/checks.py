"""Checks at the start of every rank, right after MPI_Init. Called by `main`; imports no MPI.

A wrong MPI gives N worlds of one, a wrong host file mixes roles, a local disk loses the
run: all three would otherwise show minutes later as something else. `gather` collects
small byte strings from all ranks without blocking in MPI.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.schema import Config
from areal_hpc.launch.plan import JobPlan, plan_job
from areal_hpc.launch.step import NODE_PLAN_VARIABLE, parse_node_plan
from areal_hpc.paths import RunPaths

Gather = Callable[[bytes, str], list[bytes]]
"""(my bytes, what for) -> everybody's, by world rank; TimeoutError after its deadline."""

VISIBILITY_DEADLINE_S = 60.0
SLOW_VISIBILITY_S = 5.0


def check_world(config: Config, size: int, rank: int, environ: Mapping[str, str]) -> None:
    """Size of the world and this rank's node against plan and launcher.

    Raises ConfigError: starting again in the same way cannot help.
    """
    plan = plan_job(config)
    launched = int(environ.get("SLURM_NTASKS", 0)) if "SLURM_STEP_ID" in environ else 0
    if size != plan.num_ranks or launched not in (0, size):
        raise ConfigError(_size_message(config, plan, size, launched, environ))
    _check_node(plan, rank, environ)


def _size_message(config: Config, plan: JobPlan, size: int, launched: int, environ: Mapping[str, str]) -> str:
    ranks = ", ".join(f"{group.role} {group.ranks}" for group in plan.groups)
    text = f"the MPI world has {size} ranks but the configuration plans {plan.num_ranks} ({ranks})"
    if launched:
        text += f" and Slurm launched {launched} tasks"
    if size == 1 or launched not in (0, size):
        library = environ.get("MPI4PY_LIBMPI", "the default one")
        text += (
            f": srun --mpi={config.launch.mpi or 'default'} and the MPI library ({library}) do not match; "
            "change launch.mpi (srun --mpi=list shows the choice) or MPI4PY_LIBMPI in the site profile"
        )
    else:
        text += f": start {plan.num_ranks} ranks"
    return text


def _check_node(plan: JobPlan, rank: int, environ: Mapping[str, str]) -> None:
    if NODE_PLAN_VARIABLE not in environ or "SLURMD_NODENAME" not in environ:
        return
    place = plan.places(parse_node_plan(environ[NODE_PLAN_VARIABLE]))[rank]
    if environ["SLURMD_NODENAME"] != place.node:
        raise ConfigError(
            f"{place.role} {place.role_rank} (world rank {rank}) runs on {environ['SLURMD_NODENAME']} but was "
            f"planned for {place.node}: the site's srun distributes ranks in another order than by block"
        )


def check_links(paths: RunPaths) -> None:
    """Raises ConfigError for a symbolic link by which the run would write outside its folder."""
    for link in paths.outward_links():
        raise ConfigError(
            f"{link} is a symbolic link to {link.resolve()}, outside the run folder: the run would write there; "
            "remove it, or choose another run.folder"
        )


def check_shared_folder(
    paths: RunPaths, rank: int, gather: Gather, deadline_s: float = VISIBILITY_DEADLINE_S
) -> float:
    """Seconds until every node saw the controller's file and the controller saw theirs.

    Raises ConfigError naming the hosts that do not share the run folder.
    """
    mine = paths.root / f".visible-{uuid.uuid4().hex}"
    report = {"host": socket.gethostname()[:100], "name": mine.name, "error": ""}
    try:
        _write(mine)
    except OSError as error:
        report["error"] = (error.strerror or str(error))[:100]
    everyone = [json.loads(data) for data in gather(json.dumps(report).encode(), "the run folder's check")]
    try:
        failed = [entry for entry in everyone if entry["error"]]
        if failed:
            raise ConfigError(
                f"run.folder={paths.root} cannot be written on {_hosts(failed)}: {failed[0]['error']}; "
                "it must lie on a filesystem that every node sees"
            )
        # All files exist by now. The controller looks for everybody's, the others for its.
        wanted = everyone if rank == 0 else everyone[:1]
        delay, missing = _await_files(paths.root, {entry["name"]: entry for entry in wanted}, deadline_s)
        answer = {"delay": delay, "missing": [entry["host"] for entry in missing][:3], "host": report["host"]}
        answers = [json.loads(data) for data in gather(json.dumps(answer).encode(), "the run folder's files")]
    finally:
        mine.unlink(missing_ok=True)
    blind = [entry for entry in answers if entry["missing"]]
    if blind:
        raise ConfigError(
            f"run.folder={paths.root} is not shared: {_hosts(blind)} did not see the file of "
            f"{blind[0]['missing'][0]} within {deadline_s:.0f} s; choose a filesystem that every node sees"
        )
    return max(entry["delay"] for entry in answers)


def _write(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, b"visible\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _await_files(folder: Path, wanted: dict[str, dict], deadline_s: float) -> tuple[float, list[dict]]:
    """(seconds until all could be read, those that could not be within the deadline)."""
    begin = time.monotonic()
    missing = dict(wanted)
    while True:
        for name in list(missing):
            try:
                if (folder / name).read_bytes() == b"visible\n":
                    del missing[name]
            except OSError:
                pass
        waited = time.monotonic() - begin
        if not missing or waited > deadline_s:
            return waited, list(missing.values())
        time.sleep(0.05)


def _hosts(entries: list[dict]) -> str:
    names = sorted({entry["host"] for entry in entries})
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def take_gpus(config: Config, role: str, environ: Mapping[str, str]) -> str | None:
    """CUDA_VISIBLE_DEVICES of this rank, its share of its node's GPUs; None to leave it alone.

    Every rank of a node is shown all GPUs of the job there; it takes `gpus_per_rank` of
    them by its number on the node. Must be applied before CUDA is initialised.
    """
    count = getattr(config.groups, role).gpus_per_rank
    local = environ.get("SLURM_LOCALID")
    if not count or local is None or "SLURM_STEP_ID" not in environ:
        return None
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    per_node = count * getattr(config.groups, role).ranks_per_node
    devices = visible.split(",") if visible else [str(index) for index in range(per_node)]
    mine = devices[int(local) * count : (int(local) + 1) * count]
    if len(mine) != count:
        raise ConfigError(
            f"{role} rank {local} of {environ.get('SLURMD_NODENAME', 'its node')} needs {count} GPUs but the node "
            f"shows {len(devices)} for {getattr(config.groups, role).ranks_per_node} ranks: change "
            f"groups.{role}.gpus_per_rank"
        )
    return ",".join(mine)
