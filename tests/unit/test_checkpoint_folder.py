"""Whole checkpoints are found, damaged ones passed over by name, old ones removed by rule."""

import logging
import shutil
from pathlib import Path

import pytest

from areal_hpc.paths import RunPaths
from areal_hpc.trainer.checkpoint_folder import (
    DamagedCheckpoint,
    Manifest,
    describe_file,
    find_checkpoint,
    list_checkpoints,
    prune,
    publish,
    read_manifest,
    remove_leftovers,
    verify,
    write_manifest,
)
from kills import killed


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    paths.create()
    return paths


def make(paths: RunPaths, step: int) -> Path:
    folder = paths.checkpoint(step)
    (folder / "policy").mkdir(parents=True)
    names = ["policy/__0_0.distcp", "policy/common.pt"]
    for name in names:
        (folder / name).write_bytes(f"{name} of {step}".encode() * 100)
    write_manifest(folder, Manifest(step, step, "d", "l", {name: describe_file(folder / name) for name in names}))
    return folder


def test_the_newest_is_found(paths):
    assert find_checkpoint(paths) is None
    for step in (5, 10, 200):
        make(paths, step)
    folder, manifest = find_checkpoint(paths)
    assert folder == paths.checkpoint(200) and manifest.train_step == manifest.version == 200
    assert find_checkpoint(paths, 10)[1].train_step == 10
    assert find_checkpoint(paths, 11) is None


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest", "outside"])
def test_a_damaged_one_is_passed_over_with_a_warning_that_names_it(paths, damage, caplog):
    make(paths, 1)
    folder = make(paths, 2)
    file = folder / "policy/__0_0.distcp"
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[50] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "remove":
        file.unlink()
    elif damage == "manifest":
        (folder / "manifest.json").write_text("{")
    else:
        text = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(text.replace("policy/common.pt", "../../secret"))
    with caplog.at_level(logging.WARNING):
        found, manifest = find_checkpoint(paths)
    assert manifest.train_step == 1
    assert str(folder) in caplog.text
    with pytest.raises(DamagedCheckpoint, match="step-00000002"):
        verify(folder)
    with pytest.raises(DamagedCheckpoint):
        find_checkpoint(paths, 2)


def test_a_damaged_one_is_set_aside_before_the_run_goes_on(paths, capfd):
    """It would count as one of the last two, and as a step that was reached."""
    for step in (5, 10, 15):
        make(paths, step)
    (paths.checkpoint(15) / "policy/common.pt").write_bytes(b"")
    assert find_checkpoint(paths)[1].train_step == 10  # who only looks moves nothing
    assert len(list_checkpoints(paths)) == 3
    assert find_checkpoint(paths, set_aside=True)[1].train_step == 10
    assert "step-00000015: policy/common.pt has another size" in capfd.readouterr().out
    assert [folder.name for folder in list_checkpoints(paths)] == ["step-00000005", "step-00000010"]
    assert (paths.quarantine / "step-00000015" / "policy/__0_0.distcp").is_file()
    make(paths, 12)
    assert [folder.name for folder in prune(paths, keep_last=2, keep_every=0)] == ["step-00000005"]


def test_retention(paths):
    for step in (10, 20, 30, 40, 50, 60):
        make(paths, step)
    removed = prune(paths, keep_last=2, keep_every=30)
    assert [folder.name for folder in removed] == ["step-00000010", "step-00000020", "step-00000040"]
    assert [int(folder.name[5:]) for folder in list_checkpoints(paths)] == [30, 50, 60]
    assert prune(paths, keep_last=2, keep_every=30) == []


def test_leftovers_of_a_crash_are_no_checkpoints(paths):
    make(paths, 3)
    paths.checkpoint(4).with_name(".step-00000004.tmp").mkdir()
    assert [folder.name for folder in list_checkpoints(paths)] == ["step-00000003"]
    remove_leftovers(paths)
    assert sorted(path.name for path in paths.checkpoints.iterdir()) == ["step-00000003"]


def test_a_kill_while_a_step_is_saved_again_costs_neither_checkpoint(paths, monkeypatch):
    """After a crash in the last export the last step is saved a second time, over the good one."""
    other = RunPaths(paths.root / "other")
    point = 0
    while True:
        shutil.rmtree(paths.checkpoints)
        paths.checkpoints.mkdir()
        for step in (4, 5):
            make(paths, step)
        temporary = paths.checkpoint(5).with_name(".step-00000005.tmp")
        make(other, 5).rename(temporary)
        manifest = read_manifest(temporary)
        (temporary / "manifest.json").unlink()
        again = killed(monkeypatch, point, lambda: publish(temporary, paths.checkpoint(5), manifest))
        # So may the next start be, at its every point: the one after it finds the checkpoint.
        second = 0
        while killed(monkeypatch, second, lambda: remove_leftovers(paths)):
            second += 1
        assert find_checkpoint(paths)[1].train_step == 5, f"killed at {point}, then at {second}"
        assert sorted(path.name for path in paths.checkpoints.iterdir()) == ["step-00000004", "step-00000005"]
        if not again:
            break
        point += 1
    assert point > 10
