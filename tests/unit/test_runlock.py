"""Two runs never share a folder: who is kept out, what is explained, what is taken over."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest

from areal_hpc import runlock
from areal_hpc.config.errors import ConfigError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock.json"


def write_lock(path, *, age_s: float = 0.0, **changes) -> dict:
    holder = {
        "owner": "ada", "host": "elsewhere", "pid": 4242, "started": 17, "job_id": "", "since": 0.0, "token": "abc",
    } | changes  # fmt: skip
    path.write_text(json.dumps(holder))
    stamp = time.time() - age_s
    os.utime(path, (stamp, stamp))
    return holder


def test_a_lock_names_its_holder_and_goes_with_it(path):
    with runlock.acquire(path):
        holder = runlock.read_holder(path)
        assert (holder.pid, holder.host) == (os.getpid(), os.uname().nodename)
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(runlock.FolderInUseError, match=rf"in use by .*pid {os.getpid()}.* its process is running"):
            runlock.acquire(path, take_over=True)
    assert list(path.parent.iterdir()) == []


def test_a_lock_of_a_process_that_is_gone_is_taken_over(path):
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    write_lock(path, host=os.uname().nodename, pid=int(gone.stdout))
    with runlock.acquire(path):
        assert runlock.read_holder(path).pid == os.getpid()


def test_a_process_id_that_was_given_out_again_is_not_the_holder(path):
    write_lock(path, host=os.uname().nodename, pid=os.getppid(), started=1)
    runlock.acquire(path).release()


def test_another_host_with_a_sign_of_life_is_never_disturbed(path):
    write_lock(path, age_s=30.0, job_id="77")
    for take_over in (False, True):
        with pytest.raises(ConfigError, match=r"ada on elsewhere \(pid 4242, job 77\).*sign of life 3\d s ago"):
            runlock.acquire(path, take_over=take_over)
    assert runlock.read_holder(path).owner == "ada"


def test_a_silent_lock_is_explained_and_taken_over_on_request(path):
    write_lock(path, age_s=3600.0)
    with pytest.raises(ConfigError, match=r"no sign of life for 36\d\d s; .*run.take_over=true") as caught:
        runlock.acquire(path)
    assert "\n" not in str(caught.value)
    with runlock.acquire(path, take_over=True):
        assert runlock.read_holder(path).owner != "ada"


def await_true(condition) -> None:
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def fast(monkeypatch):
    for name, seconds in (("REFRESH_S", 0.01), ("POLL_S", 0.01), ("SILENT_S", 0.3)):
        monkeypatch.setattr(runlock, name, seconds)


def test_a_requeued_job_takes_the_lock_of_its_earlier_step_once_that_is_silent(path, fast, monkeypatch):
    write_lock(path, job_id="77")
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    with pytest.raises(ConfigError):
        runlock.acquire(path)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    runlock.acquire(path).release()
    assert not path.exists()


@pytest.mark.parametrize("who", [{"job_id": "77"}, {"host": os.uname().nodename, "boot": "an earlier one"}])
@pytest.mark.parametrize("take_over", [False, True])
def test_another_step_of_the_same_job_that_lives_is_not_disturbed(path, fast, monkeypatch, who, take_over):
    """Two starts in one salloc, on different nodes; or another machine with this one's name."""
    monkeypatch.setattr(runlock, "SILENT_S", 30.0)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    write_lock(path, age_s=1.0, **who)
    ended = threading.Event()

    def live() -> None:
        while not ended.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(runlock.FolderInUseError, match="ada on .*it is alive: stop it first"):
            runlock.acquire(path, take_over=take_over)
    finally:
        ended.set()
        thread.join()
    assert runlock.read_holder(path).owner == "ada"


def test_a_rebooted_machine_takes_its_old_lock_and_process_ids_of_a_container_prove_nothing(path, fast):
    here = {"host": os.uname().nodename, "pid": os.getpid(), "started": runlock._process_start(os.getpid())}
    write_lock(path, age_s=1.0, boot="an earlier one", pids=runlock._pid_namespace(), **here)
    runlock.acquire(path).release()
    write_lock(path, age_s=1.0, boot=runlock._boot(), pids="another", host=here["host"], pid=2**22 + 1)
    with pytest.raises(ConfigError, match="sign of life 1 s ago"):
        runlock.acquire(path)


def test_a_thread_shows_that_the_holder_lives(path, fast):
    with runlock.acquire(path):
        os.utime(path, (0, 0))
        await_true(lambda: path.stat().st_mtime > 0)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("by", ["ada on elsewhere", "nobody: the file is gone", "something else: .*not a lock file"])
def test_the_old_holder_notices_that_it_lost_the_lock(path, fast, by):
    lost: list[RuntimeError] = []
    lock = runlock.acquire(path, on_lost=lost.append)
    if by.startswith("ada"):
        write_lock(path.with_name("new"))
        path.with_name("new").replace(path)
    elif by.startswith("nobody"):
        path.unlink()
    else:
        path.with_name("new").write_text("hello")
        path.with_name("new").replace(path)
    await_true(lambda: lost)
    (error,) = lost
    assert re.search(f"lock.json was taken over by {by}", str(error))
    if by.startswith("ada"):
        lock.release()
        assert runlock.read_holder(path).owner == "ada"  # not ours to remove


def test_a_launcher_hands_its_lock_to_its_controller_only(path, fast):
    with runlock.acquire(path) as mine:
        with pytest.raises(runlock.FolderInUseError, match="its process is running"):
            runlock.acquire(path, handed_over="another")
        theirs = runlock.acquire(path, handed_over=mine.token)
        assert runlock.read_holder(path).token == theirs.token != mine.token
    assert runlock.read_holder(path).token == theirs.token
    theirs.release()
    assert not path.exists()


def test_a_claim_that_a_killed_process_left_is_dropped_and_a_new_one_respected(path):
    write_lock(path, age_s=3600.0)
    claim = path.with_name(".lock.json.abc.claim")
    claim.touch()
    with pytest.raises(runlock.FolderInUseError, match="it was taken a moment ago"):
        runlock.acquire(path, take_over=True)
    assert claim.exists()
    os.utime(claim, (0, 0))
    runlock.acquire(path, take_over=True).release()
    assert list(path.parent.iterdir()) == []


def test_of_many_at_once_one_gets_it(path):
    write_lock(path, age_s=3600.0)
    won, lost = [], []
    start = threading.Barrier(8)

    def take() -> None:
        start.wait()
        try:
            won.append(runlock.acquire(path, take_over=True))
        except ConfigError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(lost) == 7
    assert [file.name for file in path.parent.iterdir()] == ["lock.json"]


def test_something_else_under_that_name_is_explained(path):
    path.write_text("hello")
    with pytest.raises(ConfigError, match="not a lock file"):
        runlock.acquire(path)
