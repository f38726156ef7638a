"""Reward ranks in a real MPI world: they score for two rollouts, errors cross the wire, hung checks end alone."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

from areal_hpc.launch.local import find_mpiexec

PEERS = Path(__file__).with_name("reward_peers.py")
FN = "reward reward_functions:odd_prompts"


def test_reward_ranks_score_for_two_rollouts(tmp_path):
    paths = [PEERS.parents[2], PEERS.parents[1] / "unit"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    result = subprocess.run(
        [find_mpiexec(), "-n", "6", sys.executable, str(PEERS), str(tmp_path)],
        capture_output=True, text=True, timeout=180, env=environment,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    said = {}
    for line in result.stdout.splitlines():
        if line.startswith("rollout "):
            _, rank, what, text = line.split(" ", 3)
            said[int(rank), what] = text
    plain = [text for rank in (0, 1) for text in ast.literal_eval(said[rank, "plain"])]
    # The cut-off answer gets 0. Few wait behind a hung check, in the worker that does it.
    assert [text.removesuffix(" meanwhile") for text in plain] == [f"{k},0" for k in range(1, 9)] * 2, output
    assert sum(text.endswith(" meanwhile") for text in plain) >= 10, output
    for rank in (0, 1):
        assert said[rank, "gold"].startswith(f"UnscorableGold: {FN} cannot score prompt 1: "), said[rank, "gold"]
        for name, prompt, words in (("nan", 2, "returned nan"), ("raises", 3, "broken on purpose"), ("shape", 4, "1 values")):
            text = said[rank, name]
            assert text.startswith(f"RewardError: {FN}") and f"prompt {prompt}" in text, text
            assert words in text and " (reward " in text, text
        # Without @per_sample the whole group pays for it.
        note = f"{FN.split()[1]}: timeout"
        assert said[rank, "hung"].removesuffix(" meanwhile") == f"0 {note},0 {note}"
    assert "controller saw checks of [4, 5]" in result.stdout
    for rank in (0, 1):
        spans = [json.loads(line) for line in (tmp_path / f"reward-{rank}.jsonl").read_text().splitlines()]
        assert sum(span.get("num", 0) for span in spans if span.get("s") == "reward.score") >= 8
        assert any(span.get("c") == "reward.seconds" for span in spans)
