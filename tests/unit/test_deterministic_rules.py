"""What run.deterministic refuses, and the parts that make a run's result independent of time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.load import check_config
from areal_hpc.config.schema import Config, Mode
from areal_hpc.controller.batcher import split_groups
from areal_hpc.rollout.engine import Generation, engine_arguments
from areal_hpc.rollout.invariance import PROBES, check_invariance
from areal_hpc.types import ShardRow


def deterministic() -> Config:
    config = Config()
    config.model.path = config.model.tokenizer = "models/any"
    config.run.deterministic = True
    config.run.mode = Mode.sync
    return config


def test_a_synchronous_run_may_be_deterministic():
    check_config(deterministic())


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("run.mode", Mode("async"), "set run.mode=sync"),
        ("algorithm.dynamic_sampling", True, "algorithm.dynamic_sampling=true"),
        ("rollout.workflow", "python_tool", "rollout.workflow=python_tool"),
        ("rollout.engine_options", {"enable_prefix_caching": True}, "rollout.engine_options.enable_prefix_caching"),
    ],
)
def test_what_depends_on_time_is_refused_by_name(key, value, named):
    config = deterministic()
    group, name = key.split(".")
    setattr(getattr(config, group), name, value)
    with pytest.raises(ConfigError) as refusal:
        check_config(config)
    assert named in str(refusal.value) and "run.deterministic=true" in str(refusal.value)
    config.run.deterministic = False
    check_config(config)


def test_the_engine_computes_every_prompt_whole_and_anew():
    config = deterministic()
    config.rollout.max_num_batched_tokens = 100
    arguments = engine_arguments(config, 0)
    assert not arguments["enable_prefix_caching"] and not arguments["enable_chunked_prefill"]
    assert arguments["max_num_batched_tokens"] == config.model.max_context
    config.run.deterministic = False
    assert engine_arguments(config, 0)["enable_prefix_caching"]


@pytest.mark.parametrize(
    ("wrong", "refusal"),
    [("", ""), ("token", "computed beside it"), ("logprob", "computed beside it"), ("again", "computed again")],
)
def test_an_engine_whose_answers_depend_on_company_or_interruption_is_refused(wrong, refusal):
    busy = 0

    async def answer(prompt, sampling, request_id, seed) -> Generation:
        nonlocal busy
        busy += 1
        await asyncio.sleep(0.001)
        crowded = busy > 1
        token = seed + (wrong == "token" and crowded and seed == PROBES // 2)
        places = np.arange(len(prompt), len(prompt) + sampling.max_new_tokens)
        logprobs = -0.5 - places / 100 - (1e-7 if wrong == "logprob" and crowded else 0.0)
        if wrong == "again":
            logprobs[0] -= 1e-6  # a prompt's last token takes another way than those that follow
        await asyncio.sleep(0.001)
        busy -= 1
        assert len(prompt) + sampling.max_new_tokens <= 64
        return Generation(
            np.full(len(places), token, np.int32), logprobs.astype(np.float32), np.zeros_like(places, np.int32), "length"
        )

    if wrong:
        with pytest.raises(RuntimeError, match=f"run.deterministic=true: on this hardware.*{refusal}"):
            asyncio.run(check_invariance(answer, 64))
    else:
        asyncio.run(check_invariance(answer, 64))


def test_a_group_is_in_the_order_of_its_samples_whatever_order_they_were_written_in():
    rows = [ShardRow(row, 5, 1, index, 3, 2, 0, 0, 0.0, "stop", 9) for row, index in enumerate([2, 0, 1])]
    assert [row.sample_index for row in split_groups(rows)[5]] == [0, 1, 2]
