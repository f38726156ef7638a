"""Full disks behind the errors of libraries, and files that a failed write leaves alone."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from areal_hpc import durable, telemetry
from areal_hpc.durable import DiskFullError, find_disk_full, write_durably


def wrapped(code: int, *, explicit: bool) -> RuntimeError:
    """What a library raises over the system's answer, with or without `from`."""
    try:
        try:
            raise OSError(code, os.strerror(code))
        except OSError as error:
            raise RuntimeError("write failed") from (error if explicit else None)
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize(("code", "words"), [(errno.ENOSPC, "disk full"), (errno.EDQUOT, "quota exhausted")])
def test_a_wrapped_answer_is_found(tmp_path, code, words, explicit):
    found = find_disk_full(wrapped(code, explicit=explicit), tmp_path / "file", 2**60)
    assert isinstance(found, DiskFullError)
    assert f"{words}: writing {2**60} bytes to {tmp_path}/file lacks at least" in str(found)


def test_a_swallowed_answer_is_told_by_the_space_that_is_left(tmp_path, monkeypatch):
    error = RuntimeError("unexpected pos 64 vs 0")
    assert find_disk_full(error, tmp_path / "file", 1000) is None
    monkeypatch.setattr(durable.os, "statvfs", lambda path: SimpleNamespace(f_bavail=2, f_frsize=100))
    assert "lacks at least 800 bytes (200 are free)" in str(find_disk_full(error, tmp_path / "file", 1000))
    assert find_disk_full(error, tmp_path / "file", 150) is None


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path):
    assert find_disk_full(wrapped(errno.EIO, explicit=True), tmp_path / "file", 10) is None
    assert find_disk_full(ValueError("no"), tmp_path / "gone" / "file", 10) is None


@pytest.mark.parametrize("write", [lambda path: write_durably(path, b"new"), lambda path: telemetry.replace_json(path, {"new": 1})])
def test_a_file_that_cannot_be_replaced_stays_and_nothing_lies_beside_it(tmp_path, monkeypatch, write):
    path = tmp_path / "status.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DiskFullError, match=r"disk full: writing \d+ bytes to .*status.json lacks at least \d+ bytes"):
        write(path)
    assert path.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["status.json"]
