"""Two runs never share a folder: who is kept out, what is explained, what is taken over."""

from __future__ import annotations

import json
import os
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
    with runlock.acquire(path) as lock:
        holder = runlock.read_holder(path)
        assert (holder.pid, holder.host) == (os.getpid(), os.uname().nodename)
        assert path.stat().st_mode & 0o777 == 0o600
        lock.refresh()
        with pytest.raises(ConfigError, match=rf"in use by .*pid {os.getpid()}.* its process is running"):
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


def test_a_requeued_job_takes_its_own_lock(path, monkeypatch):
    write_lock(path, job_id="77")
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    with pytest.raises(ConfigError):
        runlock.acquire(path)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    runlock.acquire(path).release()


def test_the_old_holder_notices_that_it_lost_the_lock(path, monkeypatch):
    lock = runlock.acquire(path)
    monkeypatch.setattr(lock, "_next_refresh", 0.0)
    before = path.stat().st_mtime_ns
    os.utime(path, (0, 0))
    lock.refresh()
    assert path.stat().st_mtime_ns >= before
    write_lock(path)
    lock.refresh()  # not due
    monkeypatch.setattr(lock, "_next_refresh", 0.0)
    with pytest.raises(RuntimeError, match="taken over by ada on elsewhere"):
        lock.refresh()
    lock.release()
    assert runlock.read_holder(path).owner == "ada"  # not ours to remove


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
