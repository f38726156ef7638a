"""The trainer in bf16 and fp16, on one GPU where there is one, against the fp32 oracles of tests/mpi."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MPI_TESTS = Path(__file__).parents[1] / "mpi"


def num_gpus() -> int:
    """Asked in a process of its own: CUDA, once initialised, stays in a process."""
    program = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, MPI_TESTS / "trainer_models.py", root], check=True, timeout=400, cwd=MPI_TESTS)
    return root


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_logprobs_gradients_and_export_in_half_precision(device, models):
    if device == "cuda" and not num_gpus():
        pytest.skip("needs a GPU: torch.cuda sees none")
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name("bf16_peer.py"), models, device],
        capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr[-8000:]
    assert result.stdout.count(" passed") == 6, result.stdout
