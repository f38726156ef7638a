"""`areal-hpc score`: order, errors by line, exit codes, output files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_hpc.config.errors import ConfigError
from areal_hpc.rewards import score

LINES = [
    '{"response": "so \\\\boxed{4}", "gold": "4"}',
    '{"response": "5", "gold": 4}',
    "nonsense",
    '{"response": "5", "gold": "???"}',
    "",
    '{"responses": ["4", "5"], "gold": "4", "truncated": [true, false]}',
    '{"gold": "4"}',
    '{"response": "a", "responses": ["b"]}',
    '{"response": 4, "gold": "4"}',
    '{"response": "4", "gold": "4", "truncated": "no"}',
    "[1]",
]


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(LINES) + "\n")
    return path


def verdicts(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_one_verdict_a_line_in_order(file, capfd):
    assert score.main(["math", str(file), "--workers", "2"]) == 2
    out, err = capfd.readouterr()
    rows = verdicts(out)
    assert [row["line"] for row in rows] == [1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert rows[0] == {"line": 1, "reward": 1.0, "parts": {"math": 1.0}}
    assert rows[1]["reward"] == 0.0
    assert [row["reward"] for row in rows[4]["results"]] == [0.0, 0.0]
    assert [row["line"] for row in rows if "error" in row] == [3, 4, 7, 8, 9, 10, 11]
    assert f"{file}:3: not JSON" in err and f"{file}:4: reward math cannot score" in err
    assert "3 scored, 1 unscorable, 6 bad lines" in err


def test_exit_codes(tmp_path, capfd):
    path = tmp_path / "a.jsonl"
    path.write_text(LINES[0] + "\n" + LINES[3] + "\n")
    assert score.main(["math", str(path)]) == 0
    assert score.main(["reward_functions:one_value", str(path)]) == 0  # one response, one value
    path.write_text('{"responses": ["a", "b"]}\n')
    assert score.main(["reward_functions:one_value", str(path)]) == 1
    assert (
        f"{path}:1: reward reward_functions:one_value on prompt 1 returned 1 values" in capfd.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["maths", "FILE"], "did you mean math"),
        (["no_module:f", "FILE"], "cannot be imported"),
        (["math", "missing.jsonl"], "missing.jsonl cannot be read"),
        (["math", "FILE", "--workers", "0"], "--workers=0"),
        (["math", "FILE", "--timeout", "0"], "--timeout=0.0"),
        (["math", "FILE", "--memory-gib", "-1"], "--memory-gib=-1.0"),
        (["math=x", "FILE"], "weight 'x' of reward 'math'"),
        (["math", "FILE", "--option", "boxed_only"], "key=value"),
        (["math", "FILE", "--option", "colour=1"], "does not take rewards.options"),
        (["math=1,length=1", "FILE", "--option", "target=1"], "REWARD.target"),
        (["math", "FILE", "-o", "/no/such/folder/x"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(file, arguments, said):
    with pytest.raises(ConfigError, match=said) as error:
        score.main([str(file) if part == "FILE" else part for part in arguments])
    assert "\n" not in str(error.value)


def test_weights_options_and_output_file(file, tmp_path, capfd):
    output = tmp_path / "verdicts.jsonl"
    file.write_text(LINES[0] + "\n")
    arguments = ["math=1,length=0.5", str(file), "-o", str(output), "--option", "length.target=0"]
    assert score.main([*arguments, "--option", "length.limit=2"]) == 0
    assert verdicts(output.read_text()) == [
        {"line": 1, "reward": 0.5, "parts": {"math": 1.0, "length": -1.0}}
    ]
    assert output.stat().st_mode & 0o777 == 0o600
    assert capfd.readouterr().out == ""
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_large_files_are_read_in_a_window(tmp_path):
    """Peak memory of 40 MB of answers stays far below their size read at once with their objects."""
    path = tmp_path / "large.jsonl"
    line = json.dumps({"response": "x" * 20_000 + r"\boxed{4}", "gold": "4"}) + "\n"
    path.write_text(line * 4000)
    code = (
        "import resource, sys\nfrom areal_hpc.rewards.score import main\n"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "code = main(['math', sys.argv[1], '-o', sys.argv[2]])\n"
        "print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env=os.environ.copy(),
        timeout=120,
    )
    status, grown_kib = run.stdout.split()
    assert status == "0", run.stderr
    assert int(grown_kib) < 40 * 1024
    assert len((tmp_path / "out").read_text().splitlines()) == 4000
