"""Node plan, site profiles and the batch script, without Slurm."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import load_config
from areal_hpc.launch.plan import check_launch, plan_job
from areal_hpc.launch.script import check_log_folder, render_script
from areal_hpc.launch.site import FOLDER, Site, apply_site, load_site
from areal_hpc.launch.step import is_fault, node_plan, parse_node_plan, srun_command
from areal_hpc.mpi.world import role_of

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def configure(*overrides):
    return apply_site(load_config(QUICKSTART, overrides), Site())


LARGE = ("run.device=cuda", "trainer.tp=4", "trainer.dp=2", "groups.trainer.nodes=2", "groups.trainer.ranks_per_node=4",
         "groups.trainer.gpus_per_rank=1", "groups.rollout.nodes=3", "groups.rollout.ranks_per_node=2",
         "groups.rollout.gpus_per_rank=2", "rollout.tensor_parallel=2", "groups.trainer.partition=gpu",
         "groups.rollout.constraint=a100&ib", "groups.rollout.mem_gib_per_node=200",
         "groups.trainer.cpus_per_rank=8", "launch.spare_nodes=1")  # fmt: skip


def test_ranks_fill_groups_node_by_node_in_world_order():
    plan = plan_job(configure(*LARGE))
    places = plan.places([["c1"], ["t1", "t2"], ["r1", "r2", "r3"]])
    assert [place.node for place in places] == ["c1", *["t1"] * 4, *["t2"] * 4, *["r1"] * 2, *["r2"] * 2, *["r3"] * 2]
    for place in places:
        assert (place.role, place.role_rank) == role_of(place.world_rank, 8, 6)
    assert [group.allocated_nodes for group in plan.groups] == [2, 3, 4]


REWARD = ("groups.reward.nodes=2", "groups.reward.ranks_per_node=2", "groups.reward.cpus_per_rank=60",
          "groups.reward.partition=cpu")  # fmt: skip


def test_reward_ranks_come_last_on_nodes_of_their_own_and_need_no_gpus():
    plan = plan_job(configure(*LARGE, *REWARD))
    nodes = [["c1"], ["t1", "t2"], ["r1", "r2", "r3"], ["w1", "w2"]]
    places = plan.places(nodes)
    assert [place.node for place in places[15:]] == ["w1", "w1", "w2", "w2"] and plan.num_ranks == 19
    for place in places:
        assert (place.role, place.role_rank) == role_of(place.world_rank, 8, 6)
    plan.check_disjoint(nodes)
    with pytest.raises(ValueError, match="r3 is in the groups rollout and reward"):
        plan.check_disjoint([*nodes[:3], ["w1", "r3"]])
    # Without nodes there is no group, whatever else is set.
    assert plan_job(configure(*LARGE, REWARD[2])) == plan_job(configure(*LARGE))


def test_shared_and_missing_nodes_are_refused():
    plan = plan_job(configure(*LARGE))
    with pytest.raises(ValueError, match="t1 is in the groups trainer and rollout"):
        plan.check_disjoint([["c1"], ["t1", "t2"], ["t1", "r2", "r3"]])
    with pytest.raises(ValueError, match="trainer needs 2 nodes, got 1"):
        plan.places([["c1"], ["t1"], ["r1", "r2", "r3"]])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["groups.trainer.gpus_per_rank=1"], "groups.trainer.gpus_per_rank=1 but run.device=cpu"),
        (["run.device=cuda"], "groups.trainer.gpus_per_rank=0 but run.device=cuda"),
        (["run.device=cuda", "groups.trainer.gpus_per_rank=1", "groups.rollout.gpus_per_rank=2"],
         "groups.rollout.gpus_per_rank=2 does not equal rollout.tensor_parallel=1"),
        (["groups.rollout.cpus_per_rank=0"], "groups.rollout.cpus_per_rank=0 must be at least 1"),
    ],
)  # fmt: skip
def test_groups_that_cannot_work_are_refused(overrides, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan_job(configure(*overrides))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["launch.time_min=3", "launch.signal_lead_s=180"], "launch.signal_lead_s=180 must lie between"),
        (["launch.time_min=0"], "launch.time_min=0"),
        (["launch.max_requeues=-1"], "launch.max_requeues=-1"),
        (["launch.spare_nodes=-1"], "launch.spare_nodes=-1"),
    ],
)
def test_launch_keys_that_cannot_work_are_refused(overrides, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_launch(configure(*overrides))


def test_a_drain_that_may_outlast_the_lead_time_is_told_beforehand():
    assert check_launch(configure()) == []
    (warning,) = check_launch(configure("launch.signal_lead_s=100"))
    assert "run.drain_deadline_s=120" in warning and "launch.signal_lead_s=100" in warning


# ---- script ----------------------------------------------------------------------


def script(*overrides, site=None):
    config = load_config(QUICKSTART, overrides)
    site = site or Site()
    config = apply_site(config, site)
    return render_script(config, plan_job(config), site, log="/runs/x/slurm/%j_0_log.out",
                         command=["/py thon", "-m", "submitit.core._submit", "/runs/x/slurm"])  # fmt: skip


def components(text):
    """Options of each component as sbatch reads them: an independent, simpler parser."""
    parts = [{}]
    for line in text.splitlines():
        if not line.startswith("#SBATCH"):
            continue
        for word in shlex.split(line.removeprefix("#SBATCH")):
            if word == "hetjob":
                parts.append({})
            else:
                name, _, value = word.removeprefix("--").partition("=")
                assert name not in parts[-1], f"{name} twice"
                parts[-1][name] = value
    return parts


def test_three_components_with_their_own_options():
    controller, trainer, rollout = components(script(*LARGE, "launch.time_min=90"))
    assert controller["nodes"] == "2" and trainer["nodes"] == "3" and rollout["nodes"] == "4"
    assert trainer["ntasks-per-node"] == "4" and trainer["gpus-per-node"] == "4" and trainer["cpus-per-task"] == "8"
    assert rollout["gpus-per-node"] == "4" and rollout["mem"] == "200G" and rollout["constraint"] == "a100&ib"
    assert trainer["partition"] == "gpu" and "partition" not in controller and "gpus-per-node" not in controller
    assert controller["signal"] == "B:USR2@180" and "signal" not in trainer
    for part in (controller, trainer, rollout):
        assert part["time"] == "90" and "requeue" in part and "no-kill" in part


def test_rewards_are_a_fourth_component():
    *three, reward = components(script(*LARGE, *REWARD))
    assert three == components(script(*LARGE)) and len(three) == 3
    assert reward["nodes"] == "3" and reward["ntasks-per-node"] == "2" and reward["cpus-per-task"] == "60"
    assert reward["partition"] == "cpu" and "gpus-per-node" not in reward and "requeue" in reward


def test_without_spare_nodes_a_lost_node_ends_the_job():
    assert all("no-kill" not in part for part in components(script()))


def test_everything_from_the_configuration_is_quoted():
    text = script("run.name=x; touch /tmp/owned $(id)", "groups.trainer.partition='a b;c'",
                  "groups.trainer.sbatch_options={comment: 'it is $HOME; \"quoted\"', exclusive: ''}")  # fmt: skip
    _, trainer, _ = components(text)
    assert trainer["comment"] == "it is $HOME; \"quoted\"" and trainer["partition"] == "a b;c"
    assert trainer["exclusive"] == ""
    assert components(text)[0]["job-name"] == "x-touch-tmp-owned-id-"
    commands = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert commands == ["export SUBMITIT_EXECUTOR=slurm SUBMITIT_PREEMPT_SIGNAL=USR2",
                        "exec '/py thon' -m submitit.core._submit /runs/x/slurm"]  # fmt: skip
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('{comment: "a\\nb"}', "control characters"),
        ("{nodes: '3'}", "sbatch_options.nodes is set by a key of its own"),
        ("{'x y': z}", "is not the name of an sbatch option"),
        ("{'--x': z}", "is not the name of an sbatch option"),
    ],
)
def test_options_that_would_break_the_script_are_refused(options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        script(f"groups.trainer.sbatch_options={options}")


def test_a_newline_in_a_name_stays_in_its_comment():
    text = script('run.name="a\\n#SBATCH --uid=0\\nrm x"')
    assert "\nrm x" not in text and not any("uid" in part for part in components(text))


@pytest.mark.parametrize("name", ["a%jb", "a\\b", "a\nb"])
def test_folders_that_slurm_would_expand_are_refused(name):
    with pytest.raises(ConfigError, match="Slurm would replace"):
        check_log_folder(Path("/runs") / name)


# ---- sites -----------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_profiles_give_a_script(path):
    site = load_site(path.stem)
    text = script(site=site)
    assert len(components(text)) == 3
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    for name, value in site.environment.items():
        assert f"export {name}={shlex.quote(value)}" in text


def test_a_profile_fills_what_is_open_and_replaces_nothing():
    site = Site(mpi="cray_shasta", groups={"trainer": {"partition": "gpu", "sbatch_options": {"licenses": "x", "exclusive": None}}},
                sbatch_options={"exclusive": "user", "mail-type": "END"})  # fmt: skip
    config = load_config(QUICKSTART, ["groups.trainer.sbatch_options={licenses: mine}"])
    filled = apply_site(config, site)
    assert filled.launch.mpi == "cray_shasta" and filled.groups.trainer.partition == "gpu"
    assert filled.groups.trainer.sbatch_options == {"exclusive": "", "mail-type": "END", "licenses": "mine"}
    assert filled.groups.rollout.sbatch_options == {"exclusive": "user", "mail-type": "END"}
    mine = load_config(QUICKSTART, ["launch.mpi=pmix", "groups.trainer.partition=big"])
    assert apply_site(mine, site).launch.mpi == "pmix" and apply_site(mine, site).groups.trainer.partition == "big"
    assert apply_site(config, Site()).launch.mpi == "pmi2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modules: ['a; rm -rf x']", "module name 'a; rm -rf x'"),
        ("environment: {'A B': x}", "environment.A B"),
        ('environment: {A: "x\\ny"}', "environment.A"),
        ("modles: [x]", "unknown key modles"),
        ("groups: {worker: {}}", "groups.worker"),
        ("groups: {trainer: {nodes: 3}}", "groups.trainer.nodes"),
        ("[", "not readable YAML"),
    ],
)
def test_bad_profiles_are_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        load_site(str(path))
    assert "\n" not in str(caught.value)


def test_an_unknown_profile_names_the_known_ones():
    with pytest.raises(ConfigError, match="rehearsal"):
        load_site("nowhere")


# ---- srun ------------------------------------------------------------------------


def test_one_srun_places_every_group_on_its_nodes():
    config = configure(*LARGE)
    nodes = [("c1",), ("t1", "t3"), ("r1", "r2", "r3")]
    command = srun_command(config, plan_job(config), nodes, ["-m", "areal_hpc.main", "--run", "/r u n"], python="py")
    parts = " ".join(command).split(" : ")
    assert command[0] == "srun" and len(parts) == 3 and "/r u n" in command
    assert "--het-group=1 " in parts[1] and "--nodelist=t1,t3" in parts[1] and "--ntasks=8" in parts[1]
    assert "--gpus-per-node=4 --gpu-bind=none" in parts[1] and "gpus" not in parts[0]
    assert all("--mpi=pmi2" in part and "--wait=300" in part for part in parts)
    assert parse_node_plan(node_plan(nodes)) == [list(names) for names in nodes]
    with_rewards = configure(*LARGE, *REWARD)
    command = srun_command(with_rewards, plan_job(with_rewards), [*nodes, ("w1", "w2")], ["-m", "areal_hpc.main"])
    *others, reward = " ".join(command).split(" : ")
    assert len(others) == 3 and "--het-group=3 " in reward and "--nodelist=w1,w2" in reward and "--ntasks=4" in reward


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("srun: error: n2: task 0: Killed\n", True),
        ("srun: error: n2: tasks 0-1: Killed\n", True),
        ("srun: error: n[3-4]: tasks 0,2: Exited with exit code 4\n", True),
        ("srun: error: Node failure on n6\n", True),
        ("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n", False),
        ("srun: error: Unable to create step for job 5: Job/step already completing\n", False),
        ("areal-hpc: trainer 1 on n2 failed\n", False),
    ],
)
def test_what_srun_says_when_a_rank_is_lost(line, fault):
    assert is_fault(line) is fault


# ---- submit --dry-run ------------------------------------------------------------


def test_dry_run_needs_no_slurm_and_writes_nothing(tmp_path):
    folder = tmp_path / "run"
    result = subprocess.run(
        [sys.executable, "-m", "areal_hpc.cli", "submit", str(QUICKSTART), "--dry-run", f"run.folder={folder}",
         "launch.site=cray-slingshot"],
        capture_output=True, text=True, env={"PATH": "/nonexistent"}, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("#SBATCH hetjob") == 2 and "world ranks" in result.stdout
    assert "reward" not in result.stdout
    assert not folder.exists()


def test_submit_without_slurm_is_a_one_line_refusal(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "areal_hpc.cli", "submit", str(QUICKSTART), f"run.folder={tmp_path / 'run'}"],
        capture_output=True, text=True, env={"PATH": "/nonexistent"}, cwd=ROOT,
    )
    assert result.returncode == 2 and "no Slurm here" in result.stderr and result.stderr.count("\n") == 1


def test_the_plain_batch_file_agrees_with_the_quickstart():
    text = (ROOT / "slurm" / "train.sbatch").read_text()
    plain, ours = components(text), components(script())
    with_rewards = components(text.replace("##SBATCH", "#SBATCH"))
    assert plain == with_rewards[:3]
    for mine, theirs in zip(components(script("groups.reward.nodes=1")), with_rewards, strict=True):
        assert mine["nodes"] == theirs["nodes"] and mine["ntasks-per-node"] == theirs["ntasks-per-node"]
    for mine, theirs in zip(ours, plain, strict=True):
        for name in ("nodes", "ntasks-per-node", "cpus-per-task", "time"):
            assert mine[name] == theirs[name], name
    assert plain[0]["signal"] == ours[0]["signal"]
