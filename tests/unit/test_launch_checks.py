"""Checks at the start of a rank, doctor's findings and the rehearsal cluster's configuration."""

import importlib.util
import json
import os
import re
import sys
import threading
from pathlib import Path

import pytest

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import load_config
from areal_hpc.launch import doctor, findings
from areal_hpc.launch.checks import check_shared_folder, check_world, take_gpus
from areal_hpc.launch.site import Site, apply_site
from areal_hpc.launch.step import NODE_PLAN_VARIABLE
from areal_hpc.mpi.world import use_bundled_library
from areal_hpc.paths import RunPaths

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config():
    return apply_site(load_config(ROOT / "configs" / "quickstart.yaml"), Site())


def step(launched, **values):
    return {"SLURM_STEP_ID": "0", "SLURM_NTASKS": str(launched), **values}


def test_a_world_as_planned_passes(config):
    check_world(config, 4, 0, {})
    check_world(config, 4, 3, step(4))
    # Inside an allocation but started by mpiexec: the allocation's number of tasks says nothing.
    check_world(config, 4, 0, {"SLURM_NTASKS": "1"})


def test_worlds_of_one_name_both_numbers_and_the_setting(config):
    with pytest.raises(ConfigError) as caught:
        check_world(config, 1, 0, step(4, MPI4PY_LIBMPI="/usr/lib/libmpi.so"))
    for words in ("has 1 ranks", "Slurm launched 4", "srun --mpi=pmi2", "/usr/lib/libmpi.so", "launch.mpi"):
        assert words in str(caught.value)


def test_a_world_that_is_not_the_planned_one_is_refused(config):
    with pytest.raises(ConfigError, match="has 3 ranks but the configuration plans 4 .* start 4 ranks"):
        check_world(config, 3, 0, {})
    with pytest.raises(ConfigError, match="has 4 ranks .* Slurm launched 8"):
        check_world(config, 4, 0, step(8))


@pytest.mark.parametrize(("rank", "node"), [(0, "n1"), (1, "n2"), (2, "n2"), (3, "n3")])
def test_ranks_on_their_planned_nodes_pass_and_others_do_not(config, rank, node):
    environment = step(4, **{NODE_PLAN_VARIABLE: "n1;n2;n3", "SLURMD_NODENAME": node})
    check_world(config, 4, rank, environment)
    with pytest.raises(ConfigError, match=rf"\(world rank {rank}\) runs on n9 but was planned for {node}"):
        check_world(config, 4, rank, {**environment, "SLURMD_NODENAME": "n9"})


# ---- shared folder ---------------------------------------------------------------


class Ranks:
    """`gather` for threads that play ranks; each may see another folder as the run folder."""

    def __init__(self, folders):
        self.folders, self.size = folders, len(folders)
        self.barrier, self.slots = threading.Barrier(self.size), [b""] * self.size
        self.results = [None] * self.size

    def gather(self, rank):
        def call(data, what):
            assert len(data) <= 1024, what
            self.slots[rank] = data
            self.barrier.wait(30)
            copy = list(self.slots)
            self.barrier.wait(30)
            return copy

        return call

    def check(self, deadline_s=1.0):
        def one(rank):
            try:
                self.results[rank] = check_shared_folder(
                    RunPaths(self.folders[rank]), rank, self.gather(rank), deadline_s
                )
            except ConfigError as error:
                self.results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return self.results


def test_a_shared_folder_passes_and_is_left_clean(tmp_path):
    results = Ranks([tmp_path] * 4).check()
    assert all(isinstance(result, float) and result < 1.0 for result in results)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_ones_own_is_refused_by_every_rank(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    results = Ranks([tmp_path / "a", tmp_path / "a", tmp_path / "b"]).check()
    assert all("is not shared" in str(result) for result in results)


def test_a_folder_that_is_missing_on_a_node_is_refused_by_every_rank(tmp_path):
    results = Ranks([tmp_path, tmp_path, tmp_path / "missing"]).check()
    assert all("cannot be written" in str(result) for result in results), results
    assert list(tmp_path.iterdir()) == []


# ---- GPUs ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_config():
    overrides = ["run.device=cuda", "trainer.tp=2", "groups.trainer.ranks_per_node=2", "groups.trainer.gpus_per_rank=1",
                 "groups.rollout.ranks_per_node=2", "groups.rollout.gpus_per_rank=2", "rollout.tensor_parallel=2"]  # fmt: skip
    return load_config(ROOT / "configs" / "quickstart.yaml", overrides)


@pytest.mark.parametrize(
    ("role", "local", "visible", "mine"),
    [("trainer", "1", "", "1"), ("trainer", "0", "4,6", "4"), ("rollout", "1", "0,1,2,3", "2,3"),
     ("rollout", "0", "5,3,1,7", "5,3"), ("controller", "0", "0,1", None)],
)  # fmt: skip
def test_every_rank_takes_its_own_gpus(gpu_config, role, local, visible, mine):
    environment = step(5, SLURM_LOCALID=local, CUDA_VISIBLE_DEVICES=visible)
    assert take_gpus(gpu_config, role, environment) == mine
    assert take_gpus(gpu_config, role, {"CUDA_VISIBLE_DEVICES": visible}) is None, "outside Slurm they are left alone"


def test_too_few_gpus_are_refused(gpu_config):
    with pytest.raises(ConfigError, match="needs 2 GPUs but the node shows 3"):
        take_gpus(gpu_config, "rollout", step(5, SLURM_LOCALID="1", CUDA_VISIBLE_DEVICES="0,1,2"))


# ---- doctor ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "level"), [("22.05.8", "ok"), ("25.05.0", "ok"), ("20.02.1", "warning"), ("17.02.3", "FAILURE")]
)
def test_versions_of_slurm(version, level):
    assert findings.check_version(version).level == level


def test_a_folder_is_tried_and_left_clean(tmp_path):
    found = findings.check_folder(tmp_path / "not" / "yet")
    assert {finding.level for finding in found} <= {"ok", "warning"} and not list(tmp_path.iterdir())
    assert any(finding.name == "HDF5" and finding.level == "ok" for finding in found)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_fails(tmp_path):
    tmp_path.chmod(0o500)
    assert findings.worst(findings.check_folder(tmp_path)) == 1


def test_inputs_that_are_missing_fail_with_their_key(config):
    (finding,) = [item for item in findings.check_inputs(load_config(ROOT / "configs" / "quickstart.yaml",
                  ["model.path=/nowhere", "model.tokenizer=/"])) if item.level != "ok"]  # fmt: skip
    assert finding.name == "model.path" and "/nowhere/config.json" in finding.text and finding.fix


def test_missing_packages_and_gpus_fail(monkeypatch):
    monkeypatch.setattr(findings, "_version", lambda name: None if name == "h5py" else "1.0")
    failed = [finding for finding in findings.check_packages() if finding.level == "FAILURE"]
    assert len(failed) == 1 and "h5py" in failed[0].text
    monkeypatch.setenv("PATH", "/nonexistent")
    assert findings.check_gpus(4).level == "FAILURE" and findings.check_gpus(0).level == "ok"


def test_the_jobs_log_becomes_findings():
    log = 'noise\nareal-doctor {"level":"ok","name":"MPI world","text":"4 ranks"}\nsrun: error: n1: task 0: Killed\n'
    assert [finding.level for finding in doctor.read_job_log(log, "COMPLETED", 4)] == ["ok"]
    bad = doctor.read_job_log(log + "areal-hpc: the MPI world has 1 ranks\n", "FAILED", 4)
    assert findings.worst(bad) and "it says: areal-hpc: the MPI world has 1 ranks" in bad[-1].text
    assert findings.worst(doctor.read_job_log("", "COMPLETED", 4)), "a job that says nothing is no success"


def test_the_filesystem_of_a_path():
    assert findings.filesystem_type(Path("/proc/self")) == "proc"


# ---- the one-machine cluster -----------------------------------------------------


@pytest.fixture(scope="module")
def minislurm():
    spec = importlib.util.spec_from_file_location("minislurm", ROOT / "tools" / "minislurm.py")
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["minislurm"] = module
    spec.loader.exec_module(module)
    return module


def test_the_clusters_configuration(minislurm, tmp_path):
    layout = minislurm.Layout(tmp_path)
    ports = minislurm.free_ports(4)
    assert len(set(ports)) == 4 and min(ports) >= 1024
    text = minislurm.slurm_conf(layout, minislurm.Settings(nodes=3, cpus=5, requeue_wait_s=7), ports)
    nodes = re.findall(r"^NodeName=(\S+) .*Port=(\d+) CPUs=5", text, re.MULTILINE)
    assert [name for name, _ in nodes] == ["n1", "n2", "n3"] and [int(port) for _, port in nodes] == ports[1:]
    assert f"AuthInfo=socket={tmp_path}/munge/socket,cred_expire=7" in text
    paths = re.findall(r"=(/\S+)", text)
    assert all(path.startswith((str(tmp_path), "/bin/true")) for path in paths), "nothing outside its folder"


def test_only_its_own_processes_count_as_alive(minislurm):
    ticks = minislurm.start_ticks(os.getpid())
    assert minislurm.alive(minislurm.Daemon("me", os.getpid(), ticks))
    assert not minislurm.alive(minislurm.Daemon("another of my id", os.getpid(), ticks + 1))


def test_down_and_status_without_a_cluster(minislurm, tmp_path, capsys):
    assert minislurm.main(["down", "--folder", str(tmp_path)]) == 0
    assert minislurm.main(["status", "--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("no cluster in") == 2


def test_missing_programs_are_named(minislurm, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(minislurm.shutil, "which", lambda name: None if name == "slurmctld" else f"/x/{name}")
    assert minislurm.main(["up", "--folder", str(tmp_path)]) == 2
    assert "slurmctld not found" in capsys.readouterr().err


def test_a_record_is_plain_json(minislurm, tmp_path):
    layout = minislurm.Layout(tmp_path)
    minislurm.write_private(layout.record, json.dumps([{"name": "slurmd-n1", "pid": 1, "started": 2}]))
    assert minislurm.read_record(layout) == [minislurm.Daemon("slurmd-n1", 1, 2)]
    assert layout.record.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("given", "short_addresses"),
    [({}, True), ({"MPI4PY_LIBMPI": "bundled"}, True), ({"MPI4PY_LIBMPI": "/opt/cray/lib/libmpi.so"}, False)],
)
def test_the_bundled_library_talks_through_libfabric_under_slurm_whoever_chose_it(
    monkeypatch, tmp_path, given, short_addresses
):
    """The variable may come from the process that submitted the job, which is no rank itself."""
    library = tmp_path / "lib" / "libmpi.so.12"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    environment = {name: str(library) if value == "bundled" else value for name, value in given.items()}
    monkeypatch.setattr(os, "environ", environment)
    use_bundled_library()
    assert not {"MPIR_CVAR_CH4_NETMOD", "MPIR_CVAR_NOLOCAL"} & environment.keys(), "no rank"
    environment["SLURM_PROCID"] = "0"
    use_bundled_library()
    assert ({"MPIR_CVAR_CH4_NETMOD", "MPIR_CVAR_NOLOCAL"} <= environment.keys()) == short_addresses
    assert environment["MPI4PY_LIBMPI"] == (given.get("MPI4PY_LIBMPI", "bundled").replace("bundled", str(library)))
