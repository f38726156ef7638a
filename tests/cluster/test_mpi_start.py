"""MPI_Init under Slurm's pmi2, whatever lies in the ranks' memory."""

from __future__ import annotations

import sys

import pytest

PROGRAM = """
import faulthandler, sys
faulthandler.dump_traceback_later(25, exit=True)
for module in sys.argv[1:]:
    __import__(module)
from areal_hpc.mpi.world import load_mpi
world = load_mpi()
print(f"rank {world.Get_rank()} of {world.Get_size()}", flush=True)
"""


@pytest.mark.parametrize("modules", [("areal_hpc.main",), (), ("areal_hpc.main", "numpy", "torch", "h5py")])
def test_a_world_over_nodes_starts(cluster, modules):
    output = cluster.slurm(
        "srun", "--nodes=3", "--ntasks=4", "--mpi=pmi2", sys.executable, "-c", PROGRAM, *modules
    )  # fmt: skip
    assert sorted(output.splitlines()) == [f"rank {rank} of 4" for rank in range(4)]
