"""The Megatron engine in every layout against plain transformers and autograd, under mpiexec."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_hpc.launch.local import find_mpiexec

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Tiny models with their oracles, made in a process of its own."""
    root = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, HERE / "trainer_models.py", root], check=True, timeout=400, cwd=HERE)
    return root


def run_peers(
    scene: str, layout: tuple[int, int, int, int], models: Path, run: Path, *, prefix: list[str] = [], timeout: float = 400.0
) -> None:
    """`prefix`: a command that the whole world is started under."""
    tp, pp, dp, _ = layout
    ranks = tp * pp * dp
    # This tree's package, wherever another one may be installed.
    paths = os.pathsep.join(map(str, (HERE, HERE.parents[1])))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": paths}
    result = subprocess.run(
        [*prefix, find_mpiexec(), "-n", str(ranks), sys.executable, HERE / "trainer_peers.py", scene, *map(str, layout),
         models, run],
        capture_output=True, text=True, timeout=timeout, env=environment,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-8000:]
    assert all(f"rank {rank} passed" in result.stdout for rank in range(ranks)), result.stdout


@pytest.mark.parametrize(
    "layout", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (2, 2, 1, 1), (2, 1, 2, 1)],
    ids=["tp1pp1dp1", "tp2", "pp2", "dp2", "tp2pp2", "tp2dp2"],
)
def test_logprobs_gradients_and_export_equal_transformers(layout, models, tmp_path):
    run_peers("dense", layout, models, tmp_path)


@pytest.mark.parametrize("layout", [(1, 1, 2, 2), (2, 1, 1, 2)], ids=["dp2ep2", "tp2ep2"])
def test_experts_equal_transformers(layout, models, tmp_path):
    run_peers("experts", layout, models, tmp_path)


def test_what_cannot_work_is_refused_by_name(models, tmp_path):
    run_peers("refuse", (1, 1, 1, 1), models, tmp_path)


def test_learning_rates_follow_their_formulas_over_a_resume(models, tmp_path):
    run_peers("schedules", (1, 1, 1, 1), models, tmp_path)


def test_training_steps_equal_plain_torch_and_resume_in_any_layout(models, tmp_path):
    subprocess.run([sys.executable, HERE / "step_oracle.py", models, tmp_path], check=True, timeout=400, cwd=HERE)
    # One rank first: the others load its checkpoint.
    for layout in ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 2, 1)):
        run_peers("steps", layout, models, tmp_path)


def test_a_shard_that_one_rank_cannot_read_refuses_the_batch_on_all(models, tmp_path):
    run_peers("damaged", (2, 1, 1, 1), models, tmp_path)


def test_a_checkpoint_on_a_full_disk_says_so_and_succeeds_with_space(models, tmp_path):
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("no unprivileged mount namespace for a small tmpfs")
    small = tmp_path / "full" / "checkpoints"
    small.mkdir(parents=True)
    mount = [*namespace, "sh", "-c", 'mount -t tmpfs -o size=8m none "$0" && exec "$@"', str(small)]
    run_peers("full", (1, 1, 1, 1), models, tmp_path, prefix=mount)
