"""Decoupled PPO steps and their relatives by plain transformers, autograd and torch.optim.AdamW, one row at a time."""

import copy
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from areal_hpc.config.algorithm import Objective
from areal_hpc.config.schema import Config
from areal_hpc.trainer.microbatch import split_minibatches
from areal_hpc.types import BatchManifest, ManifestRow, Trajectory

NUM_STEPS = 2
GROUPS, GROUP_SIZE = 4, 4
CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "gae": {
        "algorithm.advantage": "gae", "algorithm.gamma": 0.95, "algorithm.gae_lambda": 0.9, "trainer.critic_lr": 2.0e-3,
    },
    # A k3 penalty is far from linear: the two policies must not lie far apart.
    "kl": {"algorithm.kl_coef": 0.5, "algorithm.entropy_coef": 0.01, "trainer.optimizer.lr": 2.0e-3},
    "naive": {
        "algorithm.objective": Objective.naive, "algorithm.surrogate": "gspo",
        "algorithm.aggregation": "seq-mean-token-mean",
    },
    "interpolate": {
        "algorithm.proximal": "interpolate", "algorithm.behaviour_weight": "truncate", "algorithm.drop_truncated": True,
    },
    # One row an update: with dp=2 a rank has none at all.
    "few": {
        "algorithm.advantage": "gae", "algorithm.kl_coef": 0.1, "algorithm.minibatches": 4,
        "trainer.optimizer.lr": 2.0e-3,
    },
}  # fmt: skip
"""Settings by case. In every one the second step has stale tokens, moved weights and a critic that has learnt."""


def num_rows(case: str) -> int:
    return 3 if case == "few" else GROUPS * GROUP_SIZE


def make_config(models: Path, folder: Path, case: str = "plain") -> Config:
    config = Config()
    config.run.folder, config.run.total_steps, config.run.seed = str(folder), NUM_STEPS, 3
    config.model.path = config.model.tokenizer = str(models / "qwen2-tied")
    config.rewards.weights = {"format": 0.1, "math": 1.0}
    config.rollout.group_size, config.rollout.temperature, config.rollout.max_new_tokens = GROUP_SIZE, 0.8, 64
    config.trainer.batch_size, config.trainer.micro_batch_tokens = GROUPS * GROUP_SIZE, 64
    config.trainer.optimizer.lr, config.trainer.optimizer.warmup_steps = 1.0e-2, 1
    config.algorithm.minibatches, config.algorithm.max_staleness = 2, 1
    config.trainer.weight_history = 0  # only tokens of the current version count as fresh
    apply_settings(config, CASES[case])
    return config


def apply_settings(config: Config, settings: dict[str, object]) -> None:
    """Values by dotted key."""
    for key, value in settings.items():
        *groups, name = key.split(".")
        owner = config
        for group in groups:
            owner = getattr(owner, group)
        assert hasattr(owner, name), key
        setattr(owner, name, value)


def make_batch(step: int, case: str = "plain") -> list[Trajectory]:
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
    return batch[: num_rows(case)]


def make_manifest(step: int, shards: tuple[str, ...], dp: int, case: str = "plain") -> BatchManifest:
    """Rows alternate between two shards."""
    rows = tuple(
        ManifestRow(index % 2, index // 2, trajectory.group_id, trajectory.sample_index, trajectory.num_tokens,
                    trajectory.checksum)
        for index, trajectory in enumerate(make_batch(step, case))
    )
    numbers = range(len(rows))
    return BatchManifest(step, step - 1, 0, shards, rows, tuple(tuple(numbers[rank::dp]) for rank in range(dp)))


@dataclass
class Answer:
    """A trajectory and its n trained tokens; tensors [n], in their order."""

    trajectory: Trajectory
    before: torch.Tensor
    """Position before each: what predicts it."""
    behaviour: torch.Tensor
    staleness: torch.Tensor
    advantages: torch.Tensor | None = None
    proximal: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    @property
    def ids(self) -> torch.Tensor:
        return torch.from_numpy(self.trajectory.tokens).long()

    @property
    def num_trained(self) -> int:
        return len(self.before)


def make_answer(config: Config, trajectory: Trajectory, version: int) -> Answer:
    dropped = config.algorithm.drop_truncated and trajectory.finish_reason == "length"
    trained = [] if dropped else [place for place, kept in enumerate(trajectory.loss_mask) if kept and place]
    trained = torch.tensor(trained, dtype=torch.long)
    return Answer(
        trajectory, trained - 1, torch.from_numpy(trajectory.rollout_logprobs)[trained],
        version - torch.from_numpy(trajectory.versions)[trained],
    )


def read(model, config: Config, answer: Answer) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the trained tokens."""
    logits = model(answer.ids[None]).logits[0, answer.before]
    distribution = torch.log_softmax(logits / config.rollout.temperature, dim=-1)
    chosen = distribution.gather(-1, answer.ids[answer.before + 1][:, None])[:, 0]
    return chosen, -(distribution.exp() * distribution).sum(-1)


class Critic(torch.nn.Module):
    """The policy's first weights with a head of zeros: the value of the text before each trained token."""

    def __init__(self, model) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(model.model)
        self.head = torch.nn.Parameter(torch.zeros(1, model.config.hidden_size))

    def forward(self, answer: Answer) -> torch.Tensor:
        return (self.backbone(answer.ids[None]).last_hidden_state[0, answer.before] @ self.head.T)[:, 0]


class Optimizer:
    """AdamW without decay on vectors, a linear warm-up counted from 1, clipping by the norm."""

    def __init__(self, config: Config, model: torch.nn.Module, lr: float) -> None:
        self._settings, self._model, self._lr, self._updates = config.trainer.optimizer, model, lr, 0
        self._warmup = self._settings.warmup_steps * config.algorithm.minibatches
        parameters = list(model.parameters())
        self._adam = torch.optim.AdamW(
            [
                {"params": [each for each in parameters if each.dim() > 1], "weight_decay": self._settings.weight_decay},
                {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=lr, betas=(self._settings.beta1, self._settings.beta2), eps=self._settings.eps,
        )

    def update(self, loss: torch.Tensor) -> tuple[float, float]:
        """(gradient norm, learning rate) of the update made."""
        self._updates += 1
        rate = self._lr * min(1.0, self._updates / (self._warmup + 1))
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.clip_grad)
        self._adam.step()
        return float(norm), rate


def grpo_advantages(answers: list[Answer]) -> None:
    rewards = np.array([answer.trajectory.reward for answer in answers]).reshape(GROUPS, GROUP_SIZE)
    spread = rewards.std(axis=1, ddof=1, keepdims=True)
    advantages = np.where(spread > 0, (rewards - rewards.mean(1, keepdims=True)) / (spread + 1e-6), 0).flatten()
    for answer, advantage in zip(answers, advantages):
        answer.advantages = torch.full((answer.num_trained,), float(advantage))


def critic_advantages(config: Config, critic: Critic, answers: list[Answer]) -> None:
    """A_t = sum_k (gamma * lambda)^k d_(t+k) with the reward after the last token, then normalised."""
    gamma, decay = config.algorithm.gamma, config.algorithm.gamma * config.algorithm.gae_lambda
    for answer in answers:
        with torch.no_grad():
            answer.values = critic(answer)
        values = [*answer.values.tolist(), 0.0]
        rewards = [0.0] * (answer.num_trained - 1) + [answer.trajectory.reward]
        deltas = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
        raw = [sum(decay ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]
        answer.advantages = torch.tensor(raw)
        answer.returns = answer.advantages + answer.values
    everything = torch.cat([answer.advantages for answer in answers])
    for answer in answers:
        answer.advantages = (answer.advantages - everything.mean()) / (everything.std(unbiased=False) + 1e-6)


def objective(config: Config, answer: Answer, policy: torch.Tensor, totals: dict[str, float]) -> torch.Tensor:
    """What the answer adds to the objective, before the division by tokens or sequences."""
    algorithm = config.algorithm
    if algorithm.objective is Objective.naive:
        # GSPO as published: one ratio and one clip for the whole answer.
        ratio = torch.exp((policy - answer.behaviour).mean())
        plain, held = ratio * answer.advantages[0], ratio.clamp(0.8, 1.2) * answer.advantages[0]
        totals["clip_fraction"] += float(held < plain) * answer.num_trained
        return torch.minimum(plain, held)
    if algorithm.proximal == "interpolate":
        share = 1 / (answer.staleness + 1)
        proximal = share * answer.behaviour + (1 - share) * policy.detach()
    else:
        proximal = answer.proximal
    weight = torch.exp(proximal - answer.behaviour)
    if algorithm.behaviour_weight == "truncate":
        weight = weight.clamp(max=algorithm.behaviour_cap)
    ratio = torch.exp(policy - proximal)
    plain, held = ratio * answer.advantages, ratio.clamp(0.8, 1.2) * answer.advantages
    totals["clip_fraction"] += int((held < plain).sum())
    totals["importance_weight_mean"] += float(weight.sum())
    return (weight * torch.minimum(plain, held)).sum()


def train(config: Config, case: str) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """(weights after the last step by Hugging Face name, metrics of each step)."""
    from transformers import AutoModelForCausalLM

    algorithm = config.algorithm
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32, attn_implementation="eager")
    reference = copy.deepcopy(model)
    optimizer = Optimizer(config, model, config.trainer.optimizer.lr)
    critic = Critic(model)
    critic_optimizer = Optimizer(config, critic, config.trainer.critic_lr or config.trainer.optimizer.lr)
    with_critic = algorithm.advantage == "gae"
    recomputes = algorithm.objective is Objective.decoupled and algorithm.proximal == "recompute"
    metrics = []
    for step in range(1, NUM_STEPS + 1):
        batch = make_batch(step, case)
        answers = [make_answer(config, trajectory, step - 1) for trajectory in batch]
        with torch.no_grad():
            for answer in answers:
                answer.proximal = read(model, config, answer)[0]
        if with_critic:
            critic_advantages(config, critic, answers)
        else:
            grpo_advantages(answers)
        totals = dict.fromkeys(("clip_fraction", "importance_weight_mean", "entropy", "kl_reference", "value_loss"), 0.0)
        losses, updates, critic_updates = [], [], []
        minibatches = split_minibatches(
            [trajectory.num_tokens for trajectory in batch], min(algorithm.minibatches, len(batch)), 3 * 1_000_003 + step
        )
        for minibatch in minibatches:
            chosen = [answers[index] for index in minibatch if answers[index].num_trained]
            num_tokens = sum(answer.num_trained for answer in chosen)
            total = torch.zeros(())
            for answer in chosen:
                policy, entropies = read(model, config, answer)
                total = total + objective(config, answer, policy, totals)
                totals["entropy"] += float(entropies.detach().sum())
                if algorithm.kl_coef:
                    with torch.no_grad():
                        gap = read(reference, config, answer)[0]
                    gap = gap - policy
                    divergence = (torch.exp(gap) - 1 - gap).sum()
                    totals["kl_reference"] += float(divergence.detach())
                    total = total - algorithm.kl_coef * divergence + algorithm.entropy_coef * entropies.sum()
            loss = -total / (len(chosen) if algorithm.aggregation.startswith("seq-mean") else num_tokens)
            losses.append(float(loss.detach()))
            updates.append(optimizer.update(loss))
            if with_critic:
                value_loss = torch.zeros(())
                for answer in chosen:
                    values = critic(answer)
                    moved = answer.values + (values - answer.values).clamp(-algorithm.value_clip, algorithm.value_clip)
                    squares = (values - answer.returns) ** 2, (moved - answer.returns) ** 2
                    value_loss = value_loss + 0.5 * torch.maximum(*squares).sum()
                totals["value_loss"] += float(value_loss.detach())
                critic_updates.append(critic_optimizer.update(value_loss / num_tokens))
        trained = sum(answer.num_trained for answer in answers)
        # Without a forward pass of its own the comparison ends with the first update.
        compared = answers if recomputes else [answers[index] for index in minibatches[0]]
        gaps = torch.cat([(each.proximal - each.behaviour).abs()[each.staleness == 0] for each in compared])
        right = float(np.mean([trajectory.reward_parts["math"] for trajectory in batch]))
        found = {
            "reward_mean": float(np.mean([trajectory.reward for trajectory in batch])),
            "accuracy": right,
            "reward.math": right,
            "reward.format": 1.0,
            "loss": float(np.mean(losses)),
            "grad_norm": float(np.mean([norm for norm, _ in updates])),
            "lr": updates[-1][1],
            "skipped_updates": 0.0,
            "clip_fraction": totals["clip_fraction"] / trained,
            "entropy": totals["entropy"] / trained,
            "num_loss_tokens": float(trained),
            "behave_gap_fresh_max": float(gaps.max()),
            "behave_gap_fresh_mean": float(gaps.mean()),
            "behave_gap_fresh_count": float(len(gaps)),
            "staleness_mean": float(np.mean([step - 1 - trajectory.min_version for trajectory in batch])),
            "truncated_fraction": float(np.mean([trajectory.finish_reason == "length" for trajectory in batch])),
        }
        if algorithm.objective is Objective.decoupled:
            found["importance_weight_mean"] = totals["importance_weight_mean"] / trained
        if algorithm.kl_coef:
            found["kl_reference"] = totals["kl_reference"] / trained
        if with_critic:
            found |= {
                "value_loss": totals["value_loss"] / trained,
                "critic_grad_norm": float(np.mean([norm for norm, _ in critic_updates])),
                "critic_lr": critic_updates[-1][1],
                "critic_skipped_updates": 0.0,
            }
        metrics.append(found)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, metrics


if __name__ == "__main__":
    models, target = Path(sys.argv[1]), Path(sys.argv[2])
    for case in CASES:
        torch.save(train(make_config(models, target, case), case), target / f"{case}.oracle")
