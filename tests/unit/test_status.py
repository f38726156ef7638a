"""`areal-hpc status`: what a run folder says of its run."""

from __future__ import annotations

import json
import os
import time

import pytest

from areal_hpc.analysis.history import load_history
from areal_hpc.analysis.run_status import inspect
from areal_hpc.analysis.status_view import _picture, duration, main, render
from areal_hpc.cli import main as cli
from areal_hpc.config.load import save_config
from areal_hpc.controller.ledger import Ledger
from areal_hpc.paths import RunPaths
from areal_hpc.telemetry import append_jsonl, replace_json
from controller_world import Disk, make_config
from run_folders import T0, make_run, quicken, set_times, write_ranks


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quicken(monkeypatch)


def configuration(folder):
    return make_config(folder, model__path="model", model__tokenizer="model")


def change_status(paths: RunPaths, **values: object) -> None:
    """Change status.json; no rank has told the controller anything for long."""
    status = json.loads(paths.status.read_text())
    ranks = {name: {**sign, "time": 0.0} for name, sign in status["ranks"].items()}
    replace_json(paths.status, {**status, "ranks": ranks, **values})


def keep_steps(paths: RunPaths, last: int, **values: object) -> None:
    """Cut metrics.jsonl after a step, and in the middle of the next line."""
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    lines = [line | values for line in lines if line.get("train_step", 0) <= last]
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind":"step","train_st')


def sign(paths: RunPaths, role: str, rank: int, age_s: float) -> None:
    append_jsonl(paths.spans(role, rank), {"t": time.time() - age_s, "c": "alive", "v": 1.0})


def test_a_finished_run(tmp_path, capsys):
    world = make_run(tmp_path)
    assert cli(["status", str(world.paths.root)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("state      finished (the run is finished)")
    assert "6 of 6; version 6 trained, 6 serves" in text
    evals = [r for r in map(json.loads, world.paths.metrics.read_text().splitlines()) if r["kind"] == "eval"]
    assert f"accuracy {evals[0]['accuracy']:.3f} -> {evals[-1]['accuracy']:.3f}" in text


def test_a_running_run_and_its_silent_rank(tmp_path, capsys):
    paths = make_run(tmp_path).paths
    keep_steps(paths, 4)
    change_status(paths, state="running", time=time.time() - 2.0, train_step=4, waiting_for="trainer 0 on node1")
    for role, rank, age_s in (("controller", 0, 1), ("trainer", 0, 3), ("rollout", 0, 2), ("rollout", 1, 47)):
        sign(paths, role, rank, age_s)
    append_jsonl(paths.slurm_events if paths.slurm.mkdir() is None else paths.slurm_events, {
        "time": time.time() - 100.0, "event": "allocation", "job_id": "77", "seconds": 400.0})  # fmt: skip
    found = inspect(paths.root)
    assert (found.state, found.train_step, found.total_steps, found.exit_code) == ("running", 4, 6, 1)
    assert [(rank.name, round(rank.age_s)) for rank in found.silent_ranks] == [("rollout 1", 47)]
    assert found.allocation_left_s == pytest.approx(300.0, abs=2.0) and found.job == "77"
    text = render(found)
    assert "rollout 1     node3     silent for 47 s" in text and "silent: rollout 1" in text
    assert "waits for  trainer 0 on node1" in text
    main([str(paths.root), "--json"])
    assert json.loads(capsys.readouterr().out)["staleness_bound"] == 2


def test_a_full_telemetry_file_is_no_silence(tmp_path):
    paths = make_run(tmp_path).paths
    change_status(paths, state="running", time=time.time())
    sign(paths, "controller", 0, 1)
    sign(paths, "rollout", 0, 99)
    append_jsonl(paths.spans("rollout", 0), {"t": time.time() - 98, "c": "telemetry.full", "v": 1})
    sign(paths, "trainer", 0, 97)
    assert [rank.name for rank in inspect(paths.root).silent_ranks] == ["trainer 0"]
    ranks = json.loads(paths.status.read_text())["ranks"]
    ranks["1"]["time"] = time.time() - 1
    change_status(paths, ranks=ranks)
    assert inspect(paths.root).silent_ranks == []


def test_rates_and_the_estimate_of_the_end(tmp_path):
    paths = make_run(tmp_path).paths
    set_times(paths, [(T0, 0)])
    change_status(paths, state="running", time=time.time(), train_step=4)
    keep_steps(paths, 4, **{"trainer/num_tokens": 50.0, "wait_s": 3.0})
    found = inspect(paths.root)
    # Ten seconds a step, fifty tokens each; two steps are left; three seconds of ten were waited.
    assert (found.step_s, found.trained_tokens_s, found.left_s) == (10.0, 5.0, 20.0)
    assert "waited 30%" in found.bottleneck


def test_a_killed_run_has_failed_and_says_why(tmp_path):
    paths = make_run(tmp_path, crash_at=40).paths
    set_times(paths, [(T0, 0)])
    change_status(paths, state="running", time=time.time() - 500.0)
    paths.log("trainer", 0).write_text("x\nTraceback (most recent call last):\n  File\nRuntimeError: out of memory\n")
    found = inspect(paths.root)
    assert (found.state, found.exit_code) == ("failed", 1)
    assert "no sign of life for" in found.reason
    assert found.errors == ["trainer-00000: RuntimeError: out of memory"]
    append_jsonl(paths.slurm_events if paths.slurm.mkdir() is None else paths.slurm_events, {
        "time": time.time(), "event": "decision", "action": "fail", "text": "given up"})  # fmt: skip
    assert inspect(paths.root).reason == "given up"


def test_a_resumed_run_counts_its_restarts(tmp_path):
    disk = Disk()
    make_run(tmp_path, crash_at=40, disk=disk)
    paths = make_run(tmp_path, seed=1, disk=disk).paths
    found = inspect(paths.root)
    assert (found.state, found.restarts) == ("finished", 1) and "restarted 1 time" in render(found)


def test_folders_without_a_run(tmp_path, capsys):
    assert cli(["status", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"areal-hpc: RUN={tmp_path} holds no config.yaml: give the folder of a run\n"
    paths = RunPaths(tmp_path / "run")
    paths.create()
    save_config(configuration(tmp_path), paths.config)
    found = inspect(paths.root)
    assert (found.state, found.reason, found.exit_code) == ("starting", "no rank has reported yet", 0)


def test_steps_that_did_not_survive_do_not_count(tmp_path):
    paths = RunPaths(tmp_path / "run")
    paths.create()
    save_config(configuration(tmp_path), paths.config)
    ledger = Ledger(paths.ledger)
    for attempt, first, steps in ((1, 0, (1, 2, 3, 4, 5)), (2, 2, (3, 4)), (3, 3, ())):
        ledger.add("run", attempt=attempt, train_step=first, time=T0, max_staleness=2)
        for step in steps:
            append_jsonl(paths.metrics, {"kind": "step", "attempt": attempt, "train_step": step})
    ledger.close()
    history = load_history(paths.root)
    assert {step: record["attempt"] for step, record in history.steps.items()} == {1: 1, 2: 1, 3: 2}
    replaced = [(record["attempt"], record["train_step"]) for record in history.replaced]
    assert replaced == [(1, 3), (1, 4), (1, 5), (2, 4)]


def test_time_in_the_queue_is_no_run_time(tmp_path):
    disk = Disk()
    make_run(tmp_path, crash_at=40, disk=disk)
    resumed_at = disk.newest
    paths = make_run(tmp_path, seed=1, disk=disk).paths
    set_times(paths, [(T0, 0), (T0 + 5000.0, resumed_at)])
    write_ranks(paths, T0 + 5000.0, range(resumed_at + 1, 7))
    clock = load_history(paths.root).clock
    last_of_first = max(r["time"] for r in map(json.loads, paths.metrics.read_text().splitlines()) if r["attempt"] == 1)
    first_s = last_of_first - T0
    assert [life.first_step for life in clock.lives][0] == 0
    assert clock.run_s(T0 + 5010.0) == first_s + 10.0
    assert clock.gaps_s == 5000.0 - first_s


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (125, "2 min 5 s"), (3600, "1 h"),
                                               (7900, "2 h 11 min"), (190000, "2 d 4 h")])  # fmt: skip
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_watching_ends_with_the_run(tmp_path, capsys):
    paths = make_run(tmp_path).paths
    assert cli(["status", str(paths.root), "--watch"]) == 0
    assert capsys.readouterr().out.startswith("state      finished")


def test_the_picture_on_a_terminal(tmp_path):
    from rich.console import Console

    paths = make_run(tmp_path).paths
    change_status(paths, state="running", time=time.time())
    sign(paths, "controller", 0, 1)
    sign(paths, "rollout", 1, 60)
    console = Console(width=90, record=True, force_terminal=True, file=open(os.devnull, "w"))
    console.print(_picture(inspect(paths.root)))
    lines = console.export_text().splitlines()
    assert "run: running" in lines[0]
    assert "━" * 60 in lines[1] and "state" not in lines[1]
    assert any("rollout 1" in line and "silent for" in line for line in lines)
