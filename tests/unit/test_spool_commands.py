"""`areal-hpc spool`: what is listed, shown and exported is what was written, and damage is named."""

from __future__ import annotations

import errno
import json
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from areal_hpc.analysis import spool_export, spool_show
from areal_hpc.analysis.spool_filter import Filter, Interval, parse_interval
from areal_hpc.analysis.spool_text import pieces, printable
from areal_hpc.cli import main

from areal_hpc.data.byte_tokenizer import save_byte_tokenizer
from areal_hpc.paths import RunPaths
from areal_hpc.spool.shard import ShardWriter, quarantine
from areal_hpc.types import Trajectory
from test_spool import damage, make_groups, make_trajectory

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from make_spool import make_spool  # noqa: E402


@pytest.fixture
def spool(tmp_path):
    """Two writers, three shards of 8 groups of 4; returns (run folder, trajectories by group.sample, shard paths)."""
    paths = RunPaths(tmp_path / "run")
    paths.create()
    every: dict[str, Trajectory] = {}
    shards = []
    writers = [ShardWriter(paths.rollout_spool(rank), "run-a", rank) for rank in (0, 1)]
    for index, rank in enumerate((0, 0, 1)):
        generator = np.random.default_rng(index)
        found = [make_trajectory(generator, 8 * index + g, k) for g in range(8) for k in range(4)]
        every |= {f"{one.group_id}.{one.sample_index}": one for one in found}
        shards.append(writers[rank].commit(found).path)
    return paths.root, every, shards


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["spool", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


# ---- filters ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("5", [5], [4, 6]),
        ("3..7", [3, 7], [2, 8]),
        ("3..", [3, 100], [2]),
        ("..7", [-5, 7], [8]),
        (">=3", [3, 4], [2]),
        (">3", [4], [3]),
        ("<=3", [3], [4]),
        ("<3", [2], [3]),
    ],
)
def test_bounds_hold_what_they_say(text, inside, outside):
    for whole in (True, False):
        interval = parse_interval("--x", text, whole=whole)
        kind = np.int32 if whole else np.float32
        assert interval.holds(np.array(inside, kind)).all()
        assert not interval.holds(np.array(outside, kind)).any()


def test_a_bound_is_compared_in_the_stored_type():
    assert parse_interval("--reward", "0.9", whole=False).holds(np.array([0.9], np.float32)).all()
    assert parse_interval("--reward", "0.5..0.9", whole=False).holds(np.array([0.9, 0.5], np.float32)).all()


@pytest.mark.parametrize("text", ["", "x", "1.5", ">", "7..3", "1..2..3", "=>3", "3-5"])
def test_a_bound_that_cannot_be_read_is_one_line(spool, capsys, text):
    code, out, err = call(capsys, "ls", spool[0], f"--version={text}")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "--version" in err and repr(text) in err


@pytest.mark.parametrize(
    ("filters", "holds"),
    [
        (["--reward", ">=0.5"], lambda one: one.reward >= 0.5),
        (["--prompt", "103"], lambda one: one.prompt_id == 103),
        (["--group", "3..9"], lambda one: 3 <= one.group_id <= 9),
        (["--length", "..20"], lambda one: one.num_loss_tokens <= 20),
        (["--version", "3"], lambda one: one.min_version <= 3),
        (["--version", ">6"], lambda one: one.versions.max() > 6),
        (["--version", "4..5", "--length", "10..", "--reward", "<0.7"],
         lambda one: one.min_version <= 5 and one.versions.max() >= 4 and one.num_loss_tokens >= 10
         and one.reward < 0.7),
    ],
)  # fmt: skip
def test_filters_keep_exactly_what_they_describe(spool, capsys, filters, holds):
    root, every, _ = spool
    code, out, _ = call(capsys, "ls", root, "--rows", "--json", "--limit", 0, *filters)
    assert code == 0
    wanted = {name for name, one in every.items() if holds(one)}
    assert {row["trajectory"] for row in json.loads(out)["trajectories"]} == wanted
    assert json.loads(out)["total"]["trajectories"] == len(wanted)


def test_rows_without_a_trained_token_have_no_version():
    table = np.zeros(1, [("min_version", "i4"), ("max_version", "i4"), ("num_loss_tokens", "i4")])
    assert not Filter(version=Interval(high=9)).mask(table).any()


# ---- ls --------------------------------------------------------------------------------


def test_ls_counts_shards(spool, capsys):
    root, every, shards = spool
    code, out, _ = call(capsys, "ls", root, "--json")
    found = json.loads(out)
    assert code == 0 and [root / shard["shard"] for shard in found["shards"]] == shards
    assert [shard["writer_rank"] for shard in found["shards"]] == [0, 0, 1]
    assert all((shard["trajectories"], shard["groups"]) == (32, 8) for shard in found["shards"])
    total = found["total"]
    assert total["tokens"] == sum(one.num_tokens for one in every.values())
    assert total["trained_tokens"] == sum(one.num_loss_tokens for one in every.values())
    assert total["bytes"] == sum(path.stat().st_size for path in shards)
    assert total["reward_mean"] == pytest.approx(np.mean([one.reward for one in every.values()]))
    assert (total["min_version"], total["max_version"]) == (
        min(one.min_version for one in every.values()),
        max(int(one.versions.max()) for one in every.values()),
    )
    code, out, _ = call(capsys, "ls", root)
    assert code == 0 and "96 trajectories" in out and all(path.name in out for path in shards)


def test_ls_of_rows_stops_at_the_limit(spool, capsys):
    code, out, _ = call(capsys, "ls", spool[0], "--rows", "--limit", 40)
    lines = out.splitlines()
    assert code == 0 and len(lines) == 1 + 40 + 2
    assert "56 more" in lines[-2] and "96 trajectories" in lines[-1]


def test_a_running_runs_files_are_read_as_they_are(spool, capsys):
    """Unfinished files are passed over; what goes to quarantine between listing and reading is left out."""
    root, _, shards = spool
    (shards[0].parent / ".unfinished.h5.tmp").write_bytes(b"half")
    quarantine(shards[1], RunPaths(root).quarantine, "damaged")
    code, out, err = call(capsys, "ls", root)
    assert (code, err) == (0, "") and "64 trajectories" in out and "1 shards in quarantine" in out


def test_a_shard_quarantined_during_the_walk_is_no_damage(spool, capsys, monkeypatch):
    root, _, shards = spool
    listed = sorted(shards)
    quarantine(shards[1], RunPaths(root).quarantine, "damaged")
    monkeypatch.setattr("areal_hpc.analysis.spool_read.Spool.shards", lambda self: listed)
    assert call(capsys, "ls", root)[0] == 0
    shards[2].unlink()
    code, _, err = call(capsys, "ls", root)
    assert code == 1 and shards[2].name in err


# ---- verify ----------------------------------------------------------------------------


def test_verify_names_every_damaged_shard(spool, capsys):
    root, _, shards = spool
    assert call(capsys, "verify", root)[0] == 0
    damage(shards[0], "bit")
    damage(shards[2], "truncated")
    code, out, err = call(capsys, "verify", root)
    assert code == 1 and "2 damaged" in out and "1 shards verified" in out
    assert err.count("\n") == 2 and shards[0].name in err and shards[2].name in err


def test_verify_compares_with_the_journal(tmp_path, capsys):
    paths = make_spool(tmp_path / "run", 64, 20)
    assert call(capsys, "verify", paths.root)[0] == 0
    assert call(capsys, "audit", paths.root)[0] == 0
    [shard] = paths.spool.glob("*/*.h5")
    kept = shard.read_bytes()
    # A whole shard, but another one than was committed.
    other = ShardWriter(tmp_path / "other", "made", 0).commit(make_groups(2)).path
    shard.write_bytes(other.read_bytes())
    code, _, err = call(capsys, "verify", paths.root)
    assert code == 1 and "journal" in err
    shard.write_bytes(kept)
    shard.unlink()
    code, _, err = call(capsys, "verify", paths.root)
    assert code == 1 and "is gone" in err


# ---- show ------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path):
    return make_spool(tmp_path / "run", 64, 20)


def test_show_lays_tokens_side_by_side(made, capsys):
    code, out, _ = call(capsys, "show", made.root, "3.2", "--tokenizer", made.root / "tokenizer", "--json")
    found = json.loads(out)
    assert code == 0 and (found["group_id"], found["sample_index"]) == (3, 2)
    lengths = {len(found[name]) for name in ("tokens", "texts", "loss_mask", "versions", "rollout_logprobs")}
    assert len(lengths) == 1 and found["fate"] == "trained at step 1 from version 0"
    code, out, _ = call(capsys, "show", made.root, "3.2", "--tokenizer", made.root / "tokenizer", "--tokens", "60..61")
    assert code == 0 and "policy |" in out and " given |" in out
    table = out[out.index("  position  ") :].splitlines()
    assert len(table) == 3 and table[1].split()[0] == "60"
    assert table[1].split()[-1] == f"{found['rollout_logprobs'][60]:.5f}"


def test_show_finds_by_filter_and_by_row(made, capsys):
    code, out, _ = call(capsys, "show", made.root, "--group", "5", "--tokenizer", made.root / "tokenizer")
    assert code == 0 and out.startswith("trajectory 5.0 ")
    [shard] = made.spool.glob("*/*.h5")
    code, out, _ = call(capsys, "show", made.root, f"{shard.name}:17", "--tokenizer", made.root / "tokenizer")
    assert code == 0 and "row 17 of" in out


@pytest.mark.parametrize("wanted", ["1", "a.b", "99.0", "0.99", "none:0"])
def test_a_trajectory_that_is_not_there_is_one_line(made, capsys, wanted):
    code, out, err = call(capsys, "show", made.root, wanted)
    assert code == 2 and out == "" and err.count("\n") == 1 and wanted in err


def test_show_without_a_tokenizer_says_so_and_shows_ids(made, capsys):
    code, out, err = call(capsys, "show", made.root, "0.0")
    assert code == 0 and "no text" in err and "log-prob" in out
    code, _, err = call(capsys, "show", made.root, "0.0", "--tokenizer", made.root / "nowhere")
    assert code == 2 and err.count("\n") == 1


def test_show_refuses_damaged_tokens(made, capsys):
    [shard] = made.spool.glob("*/*.h5")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    codes = {call(capsys, "show", made.root, f"{group}.{sample}")[0] for group in range(8) for sample in range(8)}
    assert 1 in codes, "the damaged row was shown"


def test_what_a_policy_wrote_cannot_act_on_the_terminal(tmp_path, capsys):
    text = "a\x1b[2Jb\x07\r\u202ec\n"
    ids = list(text.encode())
    save_byte_tokenizer(tmp_path)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    one = make_trajectory(np.random.default_rng(0), 0, 0)
    size = len(ids)
    evil = Trajectory(
        np.array(ids, np.int32), np.ones(size, np.uint8), np.zeros(size, np.float32), np.zeros(size, np.int32),
        1.0, 0, 0, 0, "st\x1b[2Jop", one.reward_parts,
    )  # fmt: skip
    paths = RunPaths(tmp_path / "run")
    ShardWriter(paths.rollout_spool(0), "r", 0).commit([evil])
    for action in (["show", paths.root, "0.0", "--tokenizer", tmp_path], ["ls", paths.root, "--rows"]):
        code, out, _ = call(capsys, *action)
        assert code == 0
        assert not [character for character in out if not character.isprintable() and character != "\n"]
    assert printable("\x1b[31m") == "\\x1b[31m" and printable("é文 ") == "é文 "


def test_pieces_join_to_the_text():
    text = "héllo 文字 \U0001f600!"
    data = text.encode()

    def decode(ids):
        return bytes(ids).decode(errors="replace")

    found = pieces(decode, list(data))
    assert "".join(found) == text and len(found) == len(data)
    assert found[0] == "h" and found[1] == "" and found[2] == "é"


def test_the_fate_follows_the_journal(tmp_path):
    from areal_hpc.controller.ledger import Ledger

    paths = RunPaths(tmp_path)
    ledger = Ledger(paths.ledger)
    ledger.add("committed", path="x", digest="", groups=[{"group": 1}])
    ledger.add("consumed", train_step=3, version=2, groups=[1])
    ledger.sync()
    assert spool_show._fate(paths, 1) == "trained at step 3 from version 2"
    assert spool_show._fate(paths, 2) == "not in the journal"
    ledger.add("run", train_step=2)
    ledger.sync()
    assert spool_show._fate(paths, 1) == "committed, waits"
    ledger.add("discarded", groups=[1], train_step=4, reason="too old")
    ledger.close()
    assert spool_show._fate(paths, 1) == "discarded: too old"


# ---- export ----------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_export_is_what_was_written(spool, tmp_path, capsys, ending):
    root, every, _ = spool
    file = tmp_path / f"all.{ending}"
    code, out, err = call(capsys, "export", root, "-o", file)
    assert (code, out) == (0, "") and "96 trajectories of 3 shards" in err
    rows = _rows(file)
    assert len(rows) == len(every)
    for row in rows:
        one = every[f"{row['group_id']}.{row['sample_index']}"]
        for name in ("tokens", "loss_mask", "versions", "rollout_logprobs"):
            np.testing.assert_array_equal(np.array(row[name], getattr(one, name).dtype), getattr(one, name))
        assert np.float32(row["reward"]) == np.float32(one.reward)
        assert dict(row["reward_parts"]) == one.reward_parts
        assert (row["finish_reason"], row["prompt_id"]) == (one.finish_reason, one.prompt_id)
        assert (row["num_tokens"], row["min_version"]) == (one.num_tokens, one.min_version)


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_export_takes_filters_and_leaves_tokens_out(made, tmp_path, capsys, ending):
    file = tmp_path / f"some.{ending}"
    code, _, _ = call(capsys, "export", made.root, "-o", file, "--no-tokens", "--text", "--group", "2..3",
                      "--tokenizer", made.root / "tokenizer")  # fmt: skip
    rows = _rows(file)
    assert code == 0 and {row["group_id"] for row in rows} == {2, 3} and "tokens" not in rows[0]
    assert all(row["text"].endswith(row["response"]) and len(row["response"]) == row["num_loss_tokens"] for row in rows)


def test_export_to_a_pipe(spool, capsys):
    code, out, _ = call(capsys, "export", spool[0], "-o", "-", "--format", "jsonl", "--group", "1")
    assert code == 0 and len([json.loads(line) for line in out.splitlines()]) == 4


def test_export_leaves_damaged_shards_out_and_says_so(spool, tmp_path, capsys):
    root, _, shards = spool
    damage(shards[1], "bit")
    code, _, err = call(capsys, "export", root, "-o", tmp_path / "x.parquet")
    assert code == 1 and shards[1].name in err and len(_rows(tmp_path / "x.parquet")) == 64


@pytest.mark.parametrize(
    "arguments",
    [["-o", "x.csv"], ["-o", "-", "--format", "parquet"], ["-o", "nowhere/x.jsonl"], ["-o", "-"]],
)
def test_export_mistakes_are_one_line_and_leave_nothing(spool, tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    code, out, err = call(capsys, "export", spool[0], *arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "--" in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("ending", "sink"), [("parquet", "_Parquet"), ("jsonl", "_JsonLines")])
def test_export_to_a_full_disk_says_what_is_missing(spool, tmp_path, monkeypatch, capsys, ending, sink):
    root, every, _ = spool

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(getattr(spool_export, sink), "write", full)
    file = tmp_path / f"x.{ending}"
    code, out, err = call(capsys, "export", root, "-o", file)
    assert (code, out) == (1, "") and err.count("\n") == 1 and not list(tmp_path.glob("*x.*"))
    tokens = sum(one.num_tokens for one in every.values() if one.group_id < 8)
    named = int(re.search(rf"disk full: writing (\d+) bytes to {re.escape(str(file))} lacks at least", err)[1])
    assert 13 * tokens < named < 13 * tokens + 32 * 100


def test_a_folder_that_is_no_run_is_one_line(tmp_path, capsys):
    for action in (["ls"], ["verify"], ["audit"], ["show"], ["export", "-o", "x.jsonl"]):
        code, out, err = call(capsys, action[0], tmp_path, *action[1:])
        assert (code, out) == (2, "") and err.count("\n") == 1 and str(tmp_path) in err


def _rows(file: Path) -> list[dict]:
    if file.suffix == ".parquet":
        return pq.read_table(file).to_pylist()
    return [json.loads(line) for line in file.read_text().splitlines()]
