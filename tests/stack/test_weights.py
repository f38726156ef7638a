"""Publications to several engines, to tensor-parallel engines, over gloo and through files."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from rollout_harness import Director, directing, make_config, make_model, reference_logprobs, shake

from areal_hpc.config.schema import WeightBackend
from areal_hpc.messages import EngineRestarted
from areal_hpc.types import SamplingSpec, Trajectory
from areal_hpc.weights import file as file_weights
from areal_hpc.weights.folder import write_weights
from areal_hpc.weights.transfer import PublishError

SPEC = SamplingSpec(max_new_tokens=40, temperature=1.0)


def ask(director: Director, rank: int, group: int) -> list[Trajectory]:
    """Four answers of one rollout, always with the seeds of `group`."""
    [lease] = director.grant(["4+4="], SPEC, group_size=4, first_group=group, rank=rank)
    return director.collect([lease])[lease]


def assert_serves(samples: list[Trajectory], model: torch.nn.Module, version: int) -> None:
    for sample in samples:
        chosen = sample.loss_mask > 0
        assert set(sample.versions[chosen].tolist()) == {version}
        expected = reference_logprobs(model, sample).numpy()
        np.testing.assert_allclose(sample.rollout_logprobs[chosen], expected[chosen], atol=1e-3, rtol=0)


def assert_same(left: list[Trajectory], right: list[Trajectory]) -> None:
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.rollout_logprobs, other.rollout_logprobs)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[tuple[Director, torch.nn.Module]]:
    root = tmp_path_factory.mktemp("pair")
    # Untied: the output layer is a tensor of its own. Models elsewhere are tied.
    model = make_model(root / "model", tied=False)
    assert "lm_head.weight" in dict(model.named_parameters())
    config = make_config(root / "model", weights__bucket_bytes=50_000, weights__timeout_s=240.0)
    with directing(config, root / "run", num_rollouts=2) as director:
        yield director, model


def test_all_engines_or_none(pair):
    """Version 1 goes to both; version 2 fails on one of them, once in its load, once by its death."""
    director, policy = pair
    disturb = {}

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for count, (name, parameter) in enumerate(policy.named_parameters()):
            if count == 5 and "kill" in disturb:
                os.kill(disturb.pop("kill"), signal.SIGKILL)
            yield name, parameter.data

    trainer = director.trainer(policy, export)
    shake(policy, 1, 0.02)
    first = copy.deepcopy(policy)
    trainer.publish(1)
    before = [ask(director, rank, group=77) for rank in (2, 3)]
    for samples in before:
        assert_serves(samples, first, 1)

    shake(policy, 2, 0.02)
    broken = director.engines[1]
    load = broken.load_weights

    async def fail_once() -> None:
        broken.load_weights = load
        raise RuntimeError("no memory to load into")

    broken.load_weights = fail_once
    with pytest.raises(PublishError, match="rollout 1 on localhost: no memory to load into"):
        trainer.publish(2)
    # Engine 0 had loaded version 2 by then, engine 1 is a new process: both serve version 1 again.
    assert director.wait_for(EngineRestarted, deadline_s=240.0).version == 1
    for rank, expected in zip((2, 3), before, strict=True):
        assert_same(ask(director, rank, group=77), expected)

    disturb["kill"] = director.engines[0].pids[-1]
    with pytest.raises(PublishError):
        trainer.publish(2)
    assert not disturb
    assert director.wait_for(EngineRestarted, deadline_s=240.0).role_rank == 0
    for rank, expected in zip((2, 3), before, strict=True):
        assert_same(ask(director, rank, group=77), expected)

    trainer.publish(2)
    for rank in (2, 3):
        assert_serves(ask(director, rank, group=78), policy, 2)


def test_files_reach_a_tensor_parallel_engine(tmp_path, monkeypatch):
    policy = make_model(tmp_path / "model")
    config = make_config(
        tmp_path / "model", weights__backend=WeightBackend.file, rollout__tensor_parallel=2
    )
    with directing(config, tmp_path / "run") as director:
        trainer = director.trainer(policy)
        assert_serves(ask(director, 2, group=1), policy, 0)
        for version in (1, 2):
            shake(policy, version, 0.02)
            trainer.publish(version)
            assert_serves(ask(director, 2, group=1), policy, version)
        # Only the folder that a restarted engine would need is left, private to the user.
        [folder] = director.paths.weight_files.iterdir()
        assert folder.name == "v00000002"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert all(file.stat().st_mode & 0o777 == 0o600 for file in folder.iterdir())
        # A file that is not whole is noticed before the model is touched.
        served = ask(director, 2, group=2)

        def write_half(*arguments):
            folder = write_weights(*arguments)
            [file] = folder.iterdir()
            os.truncate(file, file.stat().st_size // 2)
            return folder

        shake(policy, 3, 0.02)
        with monkeypatch.context() as patched:
            patched.setattr(file_weights, "write_weights", write_half)
            with pytest.raises(PublishError):
                trainer.publish(3)
        assert_same(ask(director, 2, group=2), served)
        trainer.publish(3)
        assert_serves(ask(director, 2, group=3), policy, 3)
