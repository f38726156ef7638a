"""Rank entry: `python -m areal_hpc.main --run FOLDER`, started by mpiexec or srun.

Owns the order of a rank's life: configuration -> MPI world -> the run's lock -> log,
telemetry, signals -> role.run() -> end. Any error that leaves `run()` ends the whole world:
the traceback goes to the rank's log, one line to the terminal, MPI_Abort to everybody else.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc import runlock
from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import read_config
from areal_hpc.durable import full_disk_of, open_own
from areal_hpc.heartbeat import introduce, start_heartbeat
from areal_hpc.mpi.clock import compare_clocks
from areal_hpc.mpi.pulse import Pulse
from areal_hpc.paths import REFUSAL_BYTES, RunPaths
from areal_hpc.stop import FLAG, ignore_signals, install_handlers
from areal_hpc.telemetry import Telemetry, setup_logging
from areal_hpc.terminal import echo, keep_terminal

if TYPE_CHECKING:
    from areal_hpc.config.schema import Config
    from areal_hpc.mpi.world import World

MPI_INIT_DEADLINE_S = 300.0
END_DEADLINE_S = 300.0
"""From a rank's own end to the last one's."""
ABORT_DEADLINE_S = 10.0

Role = Callable[["Config", "World", RunPaths, Telemetry], None]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m areal_hpc.main", description=__doc__)
    parser.add_argument("--run", required=True, type=Path, help="run folder with its config.yaml")
    arguments = parser.parse_args(argv)
    paths = RunPaths(arguments.run.resolve())
    os.umask(0o077)
    keep_terminal()
    # From the first moment: Slurm may signal a step that is still loading.
    install_handlers(FLAG)
    world: World | None = None
    lock: runlock.RunLock | None = None

    def fail(error: BaseException) -> None:
        _fail(error, world, paths, lock)

    try:
        config = read_config(paths.config)
        world = _join(config)
        lock = _lock(config, world, paths, fail)
        attempt = _attempt(world, paths)
        visible_s = _check_shared(world, paths)
        paths = paths.seen_after(visible_s)
        paths.create()
        label = f"{world.role}[{world.role_rank}]"
        setup_logging(paths.log(world.role, world.role_rank), label=label, verbose=config.run.verbose)
        # Into the rank's log: a crash in a library's C code says where.
        faulthandler.enable()
        _prepare_process(world)
        telemetry = Telemetry(paths.spans(world.role, world.role_rank))
        logging.getLogger(__name__).info(
            "%s is world rank %d of %d on %s, pid %d",
            label, world.world_rank, len(world.hosts), world.host, os.getpid(),
        )
        introduce(telemetry, world, attempt, compare_clocks())
        telemetry.value("start.visible_s", visible_s)
        start_heartbeat(telemetry)
        pulse = Pulse(world, config.run.silence_deadline_s, fail)
        pulse.start()
        _role(world.role)(config, world, paths, telemetry)
        pulse.stop()
        telemetry.close()
        kill_children()
        world.channel.settle(END_DEADLINE_S)
        if lock is not None:
            lock.release()
        _finish()
    except BaseException as error:
        fail(error)
    return 0


def _join(config: Config) -> World:
    """MPI_Init, the checks that need nothing else, and this rank's place in the world."""
    from areal_hpc.launch.checks import check_world, take_gpus
    from areal_hpc.mpi.world import connect_world, load_mpi

    # A mismatched MPI can also hang in MPI_Init, in C: only this ends it, with a traceback.
    faulthandler.dump_traceback_later(MPI_INIT_DEADLINE_S, exit=True)
    communicator = load_mpi()
    faulthandler.cancel_dump_traceback_later()
    check_world(config, communicator.Get_size(), communicator.Get_rank(), os.environ)
    world = connect_world(config)
    devices = take_gpus(config, world.role, os.environ)
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    return world


def _check_shared(world: World, paths: RunPaths) -> float:
    """Seconds until the run folder's files were seen on every node; refuses a folder that is not shared."""
    from areal_hpc.launch.checks import SLOW_VISIBILITY_S, check_shared_folder
    from areal_hpc.mpi.world import gather

    seconds = check_shared_folder(paths, world.world_rank, gather)
    if world.role == "controller" and seconds > SLOW_VISIBILITY_S:
        echo(f"warning: files in {paths.root} take {seconds:.1f} s to be seen on other nodes")
    return seconds


def _lock(
    config: Config, world: World, paths: RunPaths, on_lost: Callable[[BaseException], None]
) -> runlock.RunLock | None:
    """The run's lock, which the controller holds for all; FolderInUseError if another run does."""
    if world.role != "controller":
        return None
    handed_over = os.environ.get(runlock.HANDED_OVER, "")
    return runlock.acquire(paths.lock, take_over=config.run.take_over, handed_over=handed_over, on_lost=on_lost)


def _attempt(world: World, paths: RunPaths) -> int:
    """Which attempt at the run this is: one more than the journal knows.

    Returns when the controller holds the lock and has found the run folder closed: only then
    may a rank write.
    """
    from areal_hpc.mpi.world import gather

    known = b""
    if world.role == "controller":
        from areal_hpc.controller.ledger import num_attempts
        from areal_hpc.launch.checks import check_links

        # Again, though the launcher looked: the job may have waited in the queue for days.
        check_links(paths)
        known = str(num_attempts(paths.ledger)).encode()
    return int(gather(known, "the number of the attempt")[0]) + 1


def _role(name: str) -> Role:
    package = "rewards" if name == "reward" else name
    return importlib.import_module(f"areal_hpc.{package}.loop").run


def _prepare_process(world: World) -> None:
    if world.role != "controller":
        ignore_signals()


def _finish() -> None:
    """Leave MPI in step with the others."""
    from mpi4py import MPI

    MPI.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of libraries (gloo, vLLM) may still wait for peers: nothing is left to lose.
    os._exit(0)


def _fail(
    error: BaseException, world: World | None, paths: RunPaths, lock: runlock.RunLock | None = None
) -> None:
    code = _tell(error, world, paths)
    # Another thread may be inside MPI: an abort that hangs there must not keep the world alive.
    faulthandler.dump_traceback_later(ABORT_DEADLINE_S, exit=True)
    try:
        kill_children()
        if lock is not None:
            lock.release()
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(code)
    finally:
        os._exit(code)


def _tell(error: BaseException, world: World | None, paths: RunPaths) -> int:
    """Say what ended this rank: to its log, the terminal and the supervisor; the exit code."""
    try:
        traceback.print_exception(error)
        sys.stderr.flush()
    except OSError:  # the log may lie on the very disk that is full
        pass
    summary = " ".join(str(error).split()) or "no message"
    if world is None:
        where, log = f"a rank of pid {os.getpid()}", "the launcher's output"
    else:
        where = f"{world.role} {world.role_rank} on {world.host}"
        log = paths.log(world.role, world.role_rank)
    echo(f"areal-hpc: {where} failed: {type(error).__name__}: {summary[:500]} (log: {log})")
    if isinstance(error, ConfigError):
        # Who holds the folder may leave it: another start can help.
        if not isinstance(error, runlock.FolderInUseError):
            _refuse(f"{where}: {summary[:500]}")
        return 2
    if full := full_disk_of(error):
        _refuse(f"{where}: {full[:1000]}; make space, then start it again with run.on_existing=resume")
    return 1


def _refuse(text: str) -> None:
    """Tell the supervisor of this job, if there is one, that starting again cannot help."""
    from areal_hpc.launch.step import REFUSAL_VARIABLE

    file = os.environ.get(REFUSAL_VARIABLE)
    if not file:
        return
    try:
        # In place: the supervisor keeps this space for a disk that is full.
        descriptor = open_own(file, os.O_WRONLY)
        try:
            os.pwrite(descriptor, text.encode()[:REFUSAL_BYTES].ljust(REFUSAL_BYTES), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        echo(f"areal-hpc: the supervisor could not be told: {error}")


def kill_children() -> None:
    """SIGKILL to every process below this one (engines, reward workers, programs under test)."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            child.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            pass


if __name__ == "__main__":
    sys.exit(main())
