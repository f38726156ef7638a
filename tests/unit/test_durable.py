"""Full disks behind the errors of libraries, and files that a failed write leaves alone."""

from __future__ import annotations

import errno
import json
import os
import shutil
from types import SimpleNamespace

import pytest

from areal_hpc import cli, durable, telemetry
from areal_hpc.config.load import save_config
from areal_hpc.config.schema import Config
from areal_hpc.controller.evaluation import Evaluation
from areal_hpc.durable import (
    DiskFullError,
    find_disk_full,
    full_disk_of,
    replace_folder,
    restore_folder,
    write_durably,
)
from areal_hpc.types import EvalSample, Prompt
from kills import killed


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


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_durably(path, b"new"),
        lambda path: telemetry.replace_json(path, {"new": 1}),
        lambda path: save_config(Config(), path),
    ],
)
def test_a_file_that_cannot_be_replaced_stays_and_nothing_lies_beside_it(tmp_path, monkeypatch, write):
    path = tmp_path / "status.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DiskFullError, match=r"disk full: writing \d+ bytes to .*status.json lacks at least \d+ bytes"):
        write(path)
    assert path.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("before", [True, False])
def test_a_folder_is_the_old_one_or_the_new_one_wherever_a_kill_comes(tmp_path, monkeypatch, before):
    final, temporary = tmp_path / "final", tmp_path / ".final.tmp"
    point = 0
    while True:
        shutil.rmtree(final, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)
        for folder, text in ((final, "old"), (temporary, "new")) if before else ((temporary, "new"),):
            folder.mkdir()
            for name in "abc":
                (folder / name).write_text(text)
        again = killed(monkeypatch, point, lambda: replace_folder(temporary, final))
        restore_folder(final)
        if not again:
            break
        if before or final.exists():
            assert len({(final / name).read_text() for name in "abc"}) == 1, f"killed at {point}"
        assert not list(tmp_path.glob("*replaced"))
        point += 1
    assert (final / "a").read_text() == "new" and [path.name for path in tmp_path.iterdir()] == ["final"]
    assert point == (7 if before else 2)


def test_the_answers_of_an_evaluation_are_whole_or_the_old_ones(tmp_path, monkeypatch):
    prompt = Prompt(4, "2+2", "4")
    evaluation = Evaluation(Config(), [prompt], train_step=1, version=1, first_id=0)
    evaluation.samples = [EvalSample(4, 0, 1.0, 5, "stop", 1)]
    path = evaluation.write(tmp_path)
    before = path.read_bytes()
    assert json.loads(before)["gold"] == "4" and path.stat().st_mode & 0o777 == 0o600

    def full(descriptor: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskFullError, match=rf"disk full: writing {len(before)} bytes to .*step-00000001.jsonl lacks"):
        evaluation.write(tmp_path)
    monkeypatch.undo()
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_line_of_the_command(monkeypatch, capsys):
    def full(arguments: list[str]) -> int:
        raise DiskFullError(errno.ENOSPC, "disk full: writing 5 bytes to x lacks at least 5 bytes (0 are free)")

    monkeypatch.setattr(cli, "_dispatch", full)
    assert cli.main(["run", "x.yaml"]) == 1
    line = "areal-hpc: disk full: writing 5 bytes to x lacks at least 5 bytes (0 are free)\n"
    assert capsys.readouterr() == ("", line)


def test_what_an_error_says_of_a_full_disk(tmp_path):
    named = DiskFullError(errno.ENOSPC, "disk full: writing 5 bytes")
    assert full_disk_of(named) == "disk full: writing 5 bytes"
    try:
        raise RuntimeError("the checkpoint could not be written") from named
    except RuntimeError as error:
        assert full_disk_of(error) == "disk full: writing 5 bytes"
    assert full_disk_of(OSError(errno.EDQUOT, "Quota exceeded", "lock")).endswith("Quota exceeded: 'lock'")
    assert full_disk_of(OSError(errno.EIO, "")) == full_disk_of(ValueError("no")) == ""
