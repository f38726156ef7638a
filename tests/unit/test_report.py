"""`areal-hpc report`: the figures of the page are the sums worked out here from journal and telemetry."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from areal_hpc.analysis.figures import parts, timeline
from areal_hpc.analysis.history import load_history
from areal_hpc.analysis.page import _faults, _samples, _tiles
from areal_hpc.analysis.report import write_png
from areal_hpc.analysis.run_data import load_run, unique_labels
from areal_hpc.analysis.samples import show, spread
from areal_hpc.analysis.spool_text import printable
from areal_hpc.analysis.timeline import (
    AFTER,
    BEFORE,
    BETWEEN,
    BOUND,
    GENERATE,
    IDLE,
    LOGPROBS,
    OPTIMIZER,
    START,
    TAIL,
    UPDATE,
    WEIGHTS,
    load_timeline,
)
from areal_hpc.analysis.trained import bucket, load_trained, quantile
from areal_hpc.cli import main as cli
from areal_hpc.config.load import save_config
from areal_hpc.controller.ledger import Ledger, read_ledger
from areal_hpc.paths import RunPaths
from areal_hpc.spool.shard import ShardWriter
from areal_hpc.types import Trajectory
from controller_world import Disk, make_config
from run_folders import T0, make_run, quicken, set_times, write_ranks


@pytest.fixture(autouse=True, scope="module")
def quick():
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A whole run with its report and its table; tests only read it."""
    folder = tmp_path_factory.mktemp("report")
    found = make_run(folder).paths
    set_times(found, [(T0, 0)])
    write_ranks(found)
    page_of(found, folder, "--csv", str(folder / "t.csv"))
    return folder


@pytest.fixture
def paths(folder) -> RunPaths:
    return RunPaths(folder / "run")


class Page(HTMLParser):
    """Text, tags and table rows of a page."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.rows: list[list[str]] = []
        self._cell = False
        self.text = ""
        self.open: list[str] = []
        self.feed(markup)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self.attributes += attributes
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data):
        self.text += data
        if self._cell:
            self.rows[-1][-1] += data

    def row(self, name: str) -> list[str]:
        return next(row for row in self.rows if row and row[0] == name)


def page_of(paths: RunPaths, tmp_path, *more: str) -> Page:
    output = tmp_path / "report.html"
    assert cli(["report", str(paths.root), *more, "-o", str(output)]) == 0
    return Page(output.read_text())


def trained_rows(paths: RunPaths) -> dict[int, list[tuple[dict, int]]]:
    """Training step -> (row, version), worked out from the journal of a run without a fault."""
    records = list(read_ledger(paths.ledger))
    rows = {group["group"]: group["rows"] for r in records if r["k"] == "committed" for group in r["groups"]}
    return {
        r["train_step"]: [(row, r["version"]) for group in r["groups"] for row in rows[group]]
        for r in records if r["k"] == "consumed"
    }  # fmt: skip


# ---- figures ---------------------------------------------------------------------------


def test_sums_over_samples_are_those_of_the_journal(paths):
    expected = trained_rows(paths)
    found = load_trained(paths.ledger, 6)
    assert found.steps.keys() == expected.keys()
    for step, rows in expected.items():
        sums = found.steps[step]
        assert sums.num_samples == len(rows) == 8
        assert sums.num_answer_tokens == sum(row["num_loss_tokens"] for row, _ in rows)
        assert sums.reward == sum(row["reward"] for row, _ in rows)
        assert sums.staleness == Counter(version - row["min_version"] for row, version in rows)
    everything = [row["num_loss_tokens"] for rows in expected.values() for row, _ in rows]
    total = found.total
    assert (total.num_samples, total.num_answer_tokens, total.longest) == (48, sum(everything), max(everything))
    for share in (0.1, 0.5, 0.9):
        assert quantile(total.lengths, share) == sorted(everything)[int(np.ceil(share * 48)) - 1]


def test_activities_add_up_to_the_time_of_the_ranks(paths):
    times = load_timeline(load_history(paths.root))
    trainer, = times.of("trainer")
    assert trainer.run_s == times.clock.total_s == 65.0
    assert dict(+trainer.seconds) == pytest.approx(
        {START: 5.0, IDLE: 18.0, LOGPROBS: 12.0, UPDATE: 18.0, OPTIMIZER: 6.0, WEIGHTS: 6.0}
    )
    assert trainer.waits == pytest.approx({BEFORE: 2.0, BETWEEN: 15.0, AFTER: 1.0})
    first, second = times.of("rollout")
    # Of 60 s it stood still a quarter of a second for each of six versions, and one of them was idle for half.
    assert first.seconds[GENERATE] == pytest.approx(first.run_s - first.seconds[START] - 6 * 0.25)
    assert second.seconds[IDLE] == pytest.approx(30.0)
    assert sum(second.waits.values()) == pytest.approx(30.0) and set(second.waits) <= {BOUND, TAIL}
    for rank in times.ranks:
        assert sum(rank.seconds.values()) == pytest.approx(rank.run_s)
        in_bins = rank.bins.sum(axis=1) * times.clock.total_s / rank.bins.shape[1]
        assert in_bins.sum() == pytest.approx(rank.run_s)


def test_the_page_shows_these_figures(paths, folder):
    expected = trained_rows(paths)
    page = Page((folder / "report.html").read_text())
    tokens = sum(row["num_loss_tokens"] for rows in expected.values() for row, _ in rows)
    largest = max(version - row["min_version"] for rows in expected.values() for row, version in rows)
    assert f"{tokens:,}answer tokens trained, in 48 samples" in page.text
    assert f"{largest} of 2largest staleness, and the bound" in page.text
    assert page.row("log-probs") == ["log-probs", "12.0", f"{12 / 65:.1%}", "", ""]
    assert page.row("idle for samples between steps")[1] == "15.0"
    # Three nodes of the configuration are in use by four hosts, for 65 s; two cores each but the controller's one.
    assert page.row("node-hours")[1] == f"{65 / 3600 * 4:.4g}"
    assert page.row("core-hours")[1:] == [f"{65 / 3600 * 7:.4g}", f"{65 / 3600 * 7 / (tokens / 1e6):.4g}"]


def test_the_page_stands_alone(folder):
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == 0
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href") and value]
    assert all(value.startswith(("#", "data:")) for value in links), "nothing is fetched"
    assert "@import" not in text and "url(http" not in text
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for name in re.findall(r"url\(#([^)]+)\)", text) + [value[1:] for value in links if value.startswith("#")]:
        assert name in ids
    assert page.tags["figure"] == text.count("<svg role=\"img\"") >= 8


def test_csv_and_png(paths, folder, tmp_path):
    rows = list(csv.DictReader((folder / "t.csv").open()))
    assert [int(row["train_step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    expected = trained_rows(paths)
    for row in rows:
        chosen = expected[int(row["train_step"])]
        assert int(row["num_answer_tokens"]) == sum(entry["num_loss_tokens"] for entry, _ in chosen)
        assert float(row["run_hours"]) == pytest.approx((5.0 + 10.0 * int(row["train_step"])) / 3600, abs=1e-5)
    files = write_png([timeline(load_run(paths.root))], tmp_path / "png")
    assert [Path(file).name for file in files] == ["timeline.png"]
    assert Path(files[0]).read_bytes().startswith(b"\x89PNG")


# ---- runs of every kind ----------------------------------------------------------------


def test_of_a_step_that_was_trained_twice_the_later_one_counts(tmp_path):
    disk = Disk()
    make_run(tmp_path, crash_at=40, disk=disk)
    first = disk.newest
    world = make_run(tmp_path, seed=1, disk=disk)
    set_times(world.paths, [(T0, 0), (T0 + 5000.0, first)])
    write_ranks(world.paths, T0 + 5000.0, range(first + 1, 7))
    run = load_run(world.paths.root)
    assert run.steps == [1, 2, 3, 4, 5, 6]
    # What the trainer of the surviving weights saw, sample by sample.
    for step, seen in enumerate(world.history, 1):
        sums = run.trained.steps[step]
        assert sums.num_samples == len(seen.samples)
        assert sums.staleness == Counter(seen.staleness)
    page = Page(_tiles(run) + _faults(run))
    assert "in 48 samples" in page.text and "attempt 2 goes on from step" in page.text
    assert "run time in 2 starts" in page.text and f"started again from step {first}, " in page.text


def test_what_no_later_attempt_trained_again_does_not_count(tmp_path):
    def rows(group: int) -> list[dict]:
        return [{"num_tokens": 9, "num_loss_tokens": group, "finish_reason": "stop", "reward": 1.0,
                 "min_version": 0, "max_version": 0}]

    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.add("run", attempt=1, train_step=0)
    for group in range(1, 7):
        listed = [{"group": group, "rows": rows(group)}]
        ledger.add("committed", path=f"shard {group}", groups=listed)
    ledger.add("consumed", train_step=1, version=0, groups=[1])
    ledger.add("consumed", train_step=2, version=1, groups=[2])
    ledger.add("run", attempt=2, train_step=1)
    ledger.add("consumed", train_step=2, version=1, groups=[3])
    # Of step 3 one group's shard was damaged, and another took its place; step 4 has not come back.
    ledger.add("consumed", train_step=3, version=2, groups=[4])
    ledger.add("damaged", path="shard 4", groups=[4])
    ledger.add("unconsumed", train_step=3)
    ledger.add("consumed", train_step=3, version=2, groups=[5])
    ledger.add("consumed", train_step=4, version=3, groups=[6])
    ledger.close()
    found = load_trained(tmp_path / "ledger.jsonl", 3)
    assert {step: sums.num_answer_tokens for step, sums in found.steps.items()} == {1: 1, 2: 3, 3: 5}
    assert found.num_answer_tokens_committed == 21


def test_a_run_that_was_killed(tmp_path):
    paths = make_run(tmp_path, crash_at=40).paths
    for path in (paths.ledger, paths.metrics):
        path.write_bytes(path.read_bytes()[:-15])
    (next(paths.spool.glob("*/*.h5"))).write_bytes(b"not HDF5")
    page = page_of(paths, tmp_path)
    done = len(load_history(paths.root).steps)
    assert f"{done}training steps of 6" in page.text and done < 6
    assert page.row("unreadable shards of those that were sampled")[1] == "1"


def test_a_damaged_journal_is_read_up_to_the_damage(tmp_path):
    paths = make_run(tmp_path).paths
    steps = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    steps[2]["trainer/grad_norm"] = float("inf")  # which Python writes, although it is no JSON
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in steps))
    assert len(load_history(paths.root).steps) == 6
    lines = paths.ledger.read_bytes().splitlines(keepends=True)
    lines[len(lines) // 2] = b"00000000" + lines[len(lines) // 2][8:]
    paths.ledger.write_bytes(b"".join(lines))
    place = len(b"".join(lines[: len(lines) // 2]))
    assert Page(_faults(load_run(paths.root))).row("journal damaged at byte")[1] == f"{place:,}"


def test_an_empty_run(tmp_path, capsys):
    paths = RunPaths(tmp_path / "run")
    paths.create()
    save_config(make_config(tmp_path, model__path="model", model__tokenizer="model"), paths.config)
    assert "No training step has been finished yet" in page_of(paths, tmp_path).text
    assert cli(["report", str(tmp_path / "nothing"), "-o", str(tmp_path / "r.html")]) == 2
    assert "holds no config.yaml" in capsys.readouterr().err
    assert cli(["report", str(paths.root), "-o", str(tmp_path / "no" / "r.html")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_several_runs_in_one_page(paths, tmp_path):
    (tmp_path / "b").mkdir()
    other = make_run(tmp_path / "b", seed=5).paths
    page = page_of(paths, tmp_path, str(other.root))
    tokens = [sum(row["num_loss_tokens"] for rows in trained_rows(each).values() for row, _ in rows)
              for each in (paths, other)]  # fmt: skip
    assert page.row("trained answer tokens")[1:] == [f"{value:,}" for value in tokens]
    labels = unique_labels([str(paths.root), str(other.root)])
    assert page.rows[0][1:] == labels and len(set(labels)) == 2


# ---- samples ---------------------------------------------------------------------------


def trajectory(reward: float = 1.0, mask=(0, 0, 1, 1, 0, 1), **changes) -> Trajectory:
    length = len(mask)
    values = dict(
        tokens=np.arange(length, dtype=np.int32), loss_mask=np.array(mask, np.uint8),
        rollout_logprobs=np.zeros(length, np.float32), versions=np.where(mask, 3, -1).astype(np.int32), reward=reward,
        prompt_id=0, group_id=0, sample_index=0, finish_reason="stop",
    )  # fmt: skip
    return Trajectory(**{**values, **changes})


def test_a_sample_is_split_by_the_origin_of_its_tokens():
    shown = show(trajectory(), 4, lambda ids: ",".join(map(str, ids)))
    assert [(stretch.origin, stretch.text) for stretch in shown.stretches] == [
        ("prompt", "0,1"), ("answer", "2,3"), ("given", "4"), ("answer", "5"),
    ]  # fmt: skip
    assert (shown.num_tokens, shown.versions) == (3, (3, 3))


def test_what_a_policy_writes_cannot_become_markup(paths, monkeypatch):
    from areal_hpc.analysis import samples

    evil = "</pre><script>alert(1)</script>&lt;\u202e\x00"
    monkeypatch.setattr(samples, "find_decoder", lambda history: lambda ids: evil)
    page = Page(_samples(load_run(paths.root)))
    assert page.tags["script"] == 0 and "<script>alert(1)</script>&lt;" in page.text
    assert "\x00" not in page.text and "\u202e" not in page.text and printable("\u202e") == r"\u202e"


def test_the_spool_is_sampled(tmp_path, monkeypatch):
    from areal_hpc.analysis import samples

    paths = make_run(tmp_path).paths
    shards = len(list(paths.spool.glob("*/*.h5")))
    monkeypatch.setattr(samples, "MAX_SHARDS", 2)
    run = load_run(paths.root)
    assert (run.samples.num_shards_read, run.samples.num_shards) == (2, shards) and shards > 2
    assert 0 < run.samples.num_read < 48 == run.trained.total.num_samples
    assert spread(range(100), 3) == [0, 50, 99]


def test_rewards_by_part_are_means_over_all_samples_of_a_step(paths):
    run = load_run(paths.root)
    drawn = parts([run])
    (line,) = drawn.figure.axes[0].lines
    expected = [[row["reward"] for row, _ in rows] for rows in trained_rows(paths).values()]
    assert drawn.figure.axes[0].get_ylabel() == "mean of math"
    assert line.get_ydata() == pytest.approx([sum(rewards) / len(rewards) for rewards in expected])
    run.history.steps = {step: {} for step in run.steps}
    assert parts([run]) is None


def test_samples_are_of_trained_groups_only(tmp_path):
    paths = RunPaths(tmp_path / "run")
    paths.create()
    config = make_config(tmp_path, model__path="model", model__tokenizer="model")
    save_config(config, paths.config)
    writer = ShardWriter(paths.rollout_spool(0), config.run.name, 3)
    rows = ((1.0, 0, 1.0, -0.5), (0.0, 0, 0.0, -0.25), (9.0, 1, 1.0, 8.0))
    writer.commit([trajectory(reward, group_id=group, reward_parts={"math": math, "length": length})
                   for reward, group, math, length in rows])  # fmt: skip
    from areal_hpc.analysis.samples import load_samples
    from areal_hpc.analysis.trained import Trained

    found = load_samples(load_history(paths.root), Trained(step_of={0: (2, 1)}))
    # Group 1 was never trained.
    assert found.num_read == 2 and found.best[0].parts == {"math": 1.0, "length": -0.5}
    assert [shown.reward for shown in found.best] == [1.0] and not found.decoded


# ---- lengths ---------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 64, 65, 100, 999, 31_000])
def test_long_lengths_are_counted_within_three_percent(length):
    assert abs(bucket(length) - length) <= (0 if length <= 64 else 0.03 * length)
