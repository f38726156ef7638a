"""Rate of the reward pool against one process, on the same math checks.

    python tools/bench_rewards.py --quick --json rewards.json

Prints and writes `reward_pool_speedup`: checks per second of the pool over those of
calling the math reward in a loop in one process. Answers are of the kinds that
competition problems have (integers, fractions, surds, polynomials, pairs), eight to a
prompt, at the end of a page of reasoning. Both sides are warm and take turns, the
median of the turns counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time

from areal_hpc.config.schema import RewardsConfig
from areal_hpc.rewards.math import math_reward
from areal_hpc.rewards.service import RewardService
from areal_hpc.types import Prompt

GROUP_SIZE = 8
IN_FLIGHT = 32
"""Groups in flight, as a rollout rank has them."""
WARM_CHECKS = 800
"""Checks per process before anything is timed."""
REASONING = "First we look at the terms one by one: $a_{} = {}$, so the sum grows by {}. "


def make_groups(num_checks: int, seed: int) -> list[tuple[Prompt, list[str]]]:
    """Prompts with answers, half of them right."""
    rng = random.Random(seed)
    groups = []
    for number in range(num_checks // GROUP_SIZE):
        answers = []
        gold = _answer(rng)
        for _ in range(GROUP_SIZE):
            final = gold if rng.random() < 0.5 else _answer(rng)
            steps = "".join(
                REASONING.format(k, rng.randrange(99), rng.randrange(99)) for k in range(rng.randrange(5, 30))
            )
            answers.append(f"{steps}The answer is \\boxed{{{final}}}.")
        groups.append((Prompt(number, "", gold=gold), answers))
    return groups


def _answer(rng: random.Random) -> str:
    a, b, c = (rng.randrange(2, 99) for _ in range(3))
    kinds = (
        f"{a}",
        f"{a * 1000 + b:,}",
        f"\\frac{{{a}}}{{{b}}}",
        f"{a}\\sqrt{{{b}}}",
        f"\\frac{{{a}\\pi}}{{{b}}}",
        f"({a}, {b})",
        f"{a}x^2 - {b}x + {c}",
        f"x = {a} + {b}\\sqrt{{{c}}}",
    )
    return rng.choice(kinds)


def direct_rate(groups: list[tuple[Prompt, list[str]]]) -> float:
    """Checks per second of one process."""
    start = time.perf_counter()
    for prompt, answers in groups:
        for answer in answers:
            math_reward(prompt, answer)
    return len(groups) * GROUP_SIZE / (time.perf_counter() - start)


async def pool_rate(service: RewardService, groups: list[tuple[Prompt, list[str]]]) -> float:
    """Checks per second of the pool."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def score(prompt: Prompt, answers: list[str]) -> None:
        async with slots:
            await service.score(prompt, answers)

    start = time.perf_counter()
    await asyncio.gather(*(score(prompt, answers) for prompt, answers in groups))
    return len(groups) * GROUP_SIZE / (time.perf_counter() - start)


async def _measure(num_checks: int, workers: int, turns: int) -> dict[str, float]:
    direct, pool = [], []
    async with RewardService(RewardsConfig(fn="math", workers=workers, timeout_s=30.0)) as service:
        # The parser learns its grammar while it runs, each process for itself.
        warm = make_groups(WARM_CHECKS * workers, seed=0)
        direct_rate(warm[: len(warm) // workers])
        await pool_rate(service, warm)
        for turn in range(turns):
            # New prompts in each turn: a gold answer seen before would not be parsed again.
            groups = make_groups(num_checks // turns, seed=turn + 1)
            direct.append(direct_rate(groups))
            pool.append(await pool_rate(service, groups))
        stats = service.stats()
    return {
        "reward_pool_speedup": statistics.median(p / d for p, d in zip(pool, direct)),
        "checks_per_s_one_process": statistics.median(direct),
        "checks_per_s_pool": statistics.median(pool),
        "workers": workers,
        "checks": num_checks,
        "timeouts": stats["timeouts"],
    }


def measure_pool_speedup(num_checks: int = 1000, workers: int = 2, turns: int = 5) -> dict[str, float]:
    """The figures of one comparison; `reward_pool_speedup` is the ratio of the rates."""
    return asyncio.run(_measure(num_checks, workers, turns))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checks", type=int, default=5000, help="checks on each side (default 5000)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="1000 checks")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    arguments = parser.parse_args()
    num_checks = 1000 if arguments.quick else arguments.checks
    figures = measure_pool_speedup(num_checks, arguments.workers)
    for name, value in figures.items():
        print(f"{name}: {value:.4g}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as stream:
            json.dump(figures, stream, indent=2)


if __name__ == "__main__":
    main()
