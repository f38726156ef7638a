"""Evaluation answers: between training requests in a rollout rank, or alone for `areal-hpc eval`.

The same workflow, engine and rewards as in training, with sampling and seeds of their
own; nothing goes to the spool.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from areal_hpc.config.schema import Config
from areal_hpc.data.datasets import load_prompts
from areal_hpc.rewards.registry import UnscorableGold
from areal_hpc.rewards.service import RewardService
from areal_hpc.rollout.engine import EngineDied, PromptTooLong, RolloutEngine
from areal_hpc.rollout.environment import engine_cores_of_process
from areal_hpc.rollout.episode import EpisodeEngine, Services, gather_all
from areal_hpc.rollout.tokens import PromptEncoder, load_tokenizer
from areal_hpc.rollout.workflow import Workflow, load_workflow
from areal_hpc.types import EvalSample, Prompt, SamplingSpec, Trajectory

logger = logging.getLogger(__name__)


def eval_sampling(config: Config) -> SamplingSpec:
    """Sampling of evaluation answers: `eval` over `rollout`."""
    return SamplingSpec(
        max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        top_k=config.eval.top_k,
        stop=tuple(config.rollout.stop),
        stop_token_ids=tuple(config.rollout.stop_token_ids),
    )


async def evaluate_prompts(
    services: Services,
    workflow: Workflow,
    prompts: Sequence[Prompt],
    num_samples: int,
    sampling: SamplingSpec,
    ready: asyncio.Event,
) -> list[EvalSample]:
    """`num_samples` scored answers for each prompt, in order.

    A prompt whose gold answer cannot be parsed is left out; one that does not fit the
    context counts as not answered (reward 0). Engine failures are waited for.
    """
    groups = await gather_all(
        [_evaluate_prompt(services, workflow, prompt, num_samples, sampling, ready) for prompt in prompts]
    )
    return [sample for group in groups for sample in group]


async def _evaluate_prompt(
    services: Services,
    workflow: Workflow,
    prompt: Prompt,
    num_samples: int,
    sampling: SamplingSpec,
    ready: asyncio.Event,
) -> list[EvalSample]:
    engine = EpisodeEngine(
        services,
        group_id=-1,
        group_size=num_samples,
        sampling=sampling,
        # The same seeds at every version: differences come from the weights alone.
        seed_parts=(services.config.run.seed, "eval", prompt.prompt_id),
        request_prefix=f"eval-{prompt.prompt_id}",
    )
    while True:
        await ready.wait()
        version = services.engine.version
        try:
            trajectories = await workflow.arun_episode(engine, prompt)
            return [_to_sample(services, trajectory) for trajectory in trajectories]
        except EngineDied:
            logger.warning("evaluation of prompt %d starts again with a new engine", prompt.prompt_id)
            # The supervisor clears `ready` as soon as it notices.
            await asyncio.sleep(0.5)
        except UnscorableGold as error:
            logger.warning("prompt %d is left out of the evaluation: %s", prompt.prompt_id, error)
            return []
        except PromptTooLong:
            return [
                EvalSample(prompt.prompt_id, index, 0.0, 0, "too_long", version)
                for index in range(num_samples)
            ]


def _to_sample(services: Services, trajectory: Trajectory) -> EvalSample:
    chosen = trajectory.loss_mask.astype(bool)
    return EvalSample(
        trajectory.prompt_id,
        trajectory.sample_index,
        trajectory.reward,
        trajectory.num_loss_tokens,
        trajectory.finish_reason,
        trajectory.min_version,
        services.encoder.decode(trajectory.tokens[chosen]),
        trajectory.reward_parts,
    )


def evaluate(config: Config, model_path: str | Path) -> list[EvalSample]:
    """Answer and score data.heldout with the model in `model_path`, without a run.

    Blocks; starts an engine and reward workers in this process and ends them.
    """
    return asyncio.run(_evaluate_alone(config, Path(model_path)))


async def _evaluate_alone(config: Config, model_path: Path) -> list[EvalSample]:
    prompts = load_prompts(config.data.heldout)
    tokenizer = config.model.tokenizer if config.model.tokenizer != config.model.path else str(model_path)
    config.model.path, config.model.tokenizer = str(model_path), tokenizer
    ready = asyncio.Event()
    ready.set()
    with tempfile.NamedTemporaryFile(prefix="areal-engine-", suffix=".log") as log:
        engine = RolloutEngine(config, cores=engine_cores_of_process(config), log=Path(log.name))
        try:
            async with RewardService(config.rewards) as rewards:
                await engine.start()
                engine.admit()
                encoder = PromptEncoder(load_tokenizer(tokenizer), config.data)
                services = Services(config, engine, rewards, encoder)
                workflow = load_workflow(config.rollout.workflow, dict(config.rollout.workflow_options))
                return await evaluate_prompts(
                    services, workflow, prompts, config.eval.num_samples, eval_sampling(config), ready
                )
        finally:
            engine.kill()
