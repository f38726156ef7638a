"""Two decoupled PPO steps by plain transformers, autograd and torch.optim.AdamW, one row at a time."""

from pathlib import Path

import numpy as np
import torch

from areal_hpc.config.schema import Config
from areal_hpc.trainer.microbatch import split_minibatches
from areal_hpc.types import BatchManifest, ManifestRow, Trajectory

NUM_STEPS = 2
GROUPS, GROUP_SIZE = 4, 4


def make_config(models: Path, folder: Path) -> Config:
    config = Config()
    config.run.folder, config.run.total_steps, config.run.seed = str(folder), NUM_STEPS, 3
    config.model.path = config.model.tokenizer = str(models / "qwen2-tied")
    config.rewards.weights = {"format": 0.1, "math": 1.0}
    config.rollout.group_size, config.rollout.temperature, config.rollout.max_new_tokens = GROUP_SIZE, 0.8, 64
    config.trainer.batch_size, config.trainer.micro_batch_tokens = GROUPS * GROUP_SIZE, 64
    config.trainer.optimizer.lr, config.trainer.optimizer.warmup_steps = 1.0e-2, 1
    config.algorithm.minibatches, config.algorithm.max_staleness = 2, 1
    config.trainer.weight_history = 0  # only tokens of the current version count as fresh
    return config


def make_batch(step: int) -> list[Trajectory]:
    """Answers of two versions, behaviour log-probs off by a little, NaN where nothing is trained."""
    generator = np.random.default_rng(100 + step)
    batch = []
    for index in range(GROUPS * GROUP_SIZE):
        prompt, answer = int(generator.integers(3, 8)), int(generator.integers(2, 40))
        mask = np.repeat([0, 1], [prompt, answer]).astype(np.uint8)
        mask[prompt + answer // 2] = answer < 4  # a hole: tool output
        length = prompt + answer
        logprobs = np.where(mask, -4.0 + generator.normal(size=length), np.nan).astype(np.float32)
        versions = np.where(mask, np.sort(generator.integers(0, step, length)), -1).astype(np.int32)
        batch.append(
            Trajectory(
                tokens=generator.integers(0, 151, length).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=logprobs,
                versions=versions,
                # The last group's rewards are all equal.
                reward=1.0 if index >= 12 else float(generator.integers(0, 3)) / 2,
                prompt_id=index // GROUP_SIZE,
                group_id=10 * step + index // GROUP_SIZE,
                sample_index=index % GROUP_SIZE,
                finish_reason="length" if index % 5 == 0 else "stop",
                # Every answer is well-formed, every third one right.
                reward_parts={"math": float(index % 3 == 0), "format": 1.0},
            )
        )
    return batch


def make_manifest(step: int, shards: tuple[str, ...], dp: int) -> BatchManifest:
    """Rows alternate between two shards."""
    rows = tuple(
        ManifestRow(index % 2, index // 2, trajectory.group_id, trajectory.sample_index, trajectory.num_tokens,
                    trajectory.checksum)
        for index, trajectory in enumerate(make_batch(step))
    )
    numbers = range(len(rows))
    return BatchManifest(step, step - 1, 0, shards, rows, tuple(tuple(numbers[rank::dp]) for rank in range(dp)))


def train(config: Config) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """(weights after the last step by Hugging Face name, metrics of each step)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32, attn_implementation="eager"
    )
    settings = config.trainer.optimizer
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps,
    )

    def logprobs_of(trajectory: Trajectory) -> torch.Tensor:
        ids = torch.from_numpy(trajectory.tokens).long()[None]
        distribution = torch.log_softmax(model(ids).logits[0, :-1] / config.rollout.temperature, dim=-1)
        return distribution.gather(-1, ids[0, 1:, None])[:, 0]

    metrics, updates = [], 0
    for step in range(1, NUM_STEPS + 1):
        batch = make_batch(step)
        with torch.no_grad():
            proximal = [logprobs_of(trajectory) for trajectory in batch]
        rewards = np.array([trajectory.reward for trajectory in batch]).reshape(GROUPS, GROUP_SIZE)
        spread = rewards.std(axis=1, ddof=1, keepdims=True)
        advantages = np.where(spread > 0, (rewards - rewards.mean(1, keepdims=True)) / (spread + 1e-6), 0).flatten()
        norms, clipped, trained = [], 0, 0
        lengths = [trajectory.num_tokens for trajectory in batch]
        for minibatch in split_minibatches(lengths, 2, 3 * 1_000_003 + step):
            total, num_tokens = torch.zeros(()), 0
            for index in minibatch:
                trajectory, mask = batch[index], torch.from_numpy(batch[index].loss_mask[1:]).bool()
                ratio = torch.exp(logprobs_of(trajectory)[mask] - proximal[index][mask])
                weight = torch.exp(proximal[index][mask] - torch.from_numpy(trajectory.rollout_logprobs[1:])[mask])
                plain = ratio * advantages[index]
                held = ratio.clamp(0.8, 1.2) * advantages[index]
                total = total - (weight * torch.minimum(plain, held)).sum()
                num_tokens += int(mask.sum())
                clipped += int((held < plain).sum())
            trained += num_tokens
            updates += 1
            # One warm-up step is two updates: lr * n / 3, then the full rate.
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * min(1.0, updates / 3)
            optimizer.zero_grad()
            (total / num_tokens).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)))
            optimizer.step()
        gaps = np.concatenate([
            np.abs(prox.numpy() - trajectory.rollout_logprobs[1:])[
                (trajectory.loss_mask[1:] == 1) & (trajectory.versions[1:] == step - 1)
            ]
            for prox, trajectory in zip(proximal, batch)
        ])
        metrics.append({
            "reward_mean": float(rewards.mean()),
            "accuracy": 6 / 16,
            "reward.math": 6 / 16,
            "reward.format": 1.0,
            "grad_norm": float(np.mean(norms)),
            "clip_fraction": clipped / trained,
            "num_loss_tokens": float(trained),
            "behave_gap_fresh_max": float(gaps.max()),
            "behave_gap_fresh_mean": float(gaps.mean()),
            "behave_gap_fresh_count": float(len(gaps)),
            "staleness_mean": float(np.mean([step - 1 - trajectory.min_version for trajectory in batch])),
            "truncated_fraction": float(np.mean([trajectory.finish_reason == "length" for trajectory in batch])),
        })
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, metrics


if __name__ == "__main__":
    import sys

    models, target = Path(sys.argv[1]), Path(sys.argv[2])
    torch.save(train(make_config(models, target)), target / "step.oracle")
