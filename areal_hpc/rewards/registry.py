"""Finds rewards by name or import path and holds them to their contract.

A reward is `fn(prompt: Prompt, responses: list[str], **options) -> list[float]`, plain
or async: one number per response. `@per_sample` marks a function of one response,
`fn(prompt, response, **options) -> float`. Called by `service` (which rewards, with
which weights) and by `worker` (which imports and calls them); imports no reward itself
until asked, so that configurations can be checked on a login node.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from areal_hpc.config.schema import RewardsConfig
from areal_hpc.types import Prompt

BUILTIN = {
    "math": "areal_hpc.rewards.math:math_reward",
    "code": "areal_hpc.rewards.code:code_reward",
    "format": "areal_hpc.rewards.shaping:format_reward",
    "length": "areal_hpc.rewards.shaping:length_reward",
}


class RewardError(RuntimeError):
    """A reward function broke its contract; names the function and the prompt."""


class UnscorableGold(ValueError):
    """The prompt's gold answer or unit tests cannot be parsed: no answer can be paid."""


@dataclass(frozen=True)
class Traits:
    """How the service calls a reward.

    per_sample: one response per call, each with limits of its own. sees_truncated:
    empty answers and answers cut off at the token limit are passed too; without it they
    get 0. uses_sandbox: gets the keyword `limits`, and the sandbox is checked at the start.
    """

    per_sample: bool = False
    sees_truncated: bool = False
    uses_sandbox: bool = False


def per_sample(function: Callable) -> Callable:
    """Mark `fn(prompt, response, **options) -> float`: called for one response at a time."""
    return _mark(function, per_sample=True)


def sees_truncated(function: Callable) -> Callable:
    """Mark a reward that also scores empty answers and answers cut off at the token limit."""
    return _mark(function, sees_truncated=True)


def uses_sandbox(function: Callable) -> Callable:
    """Mark a reward that runs programs in `sandbox`: it gets the keyword `limits: Limits`."""
    return _mark(function, uses_sandbox=True)


def _mark(function: Callable, **changes: bool) -> Callable:
    traits = traits_of(function)
    function.reward_traits = Traits(**{**vars(traits), **changes})
    return function


def traits_of(function: Callable) -> Traits:
    return getattr(function, "reward_traits", Traits())


@dataclass(frozen=True)
class RewardSpec:
    """One reward of a run: `weight` in the sum, `options` passed as keywords."""

    name: str
    weight: float
    options: dict[str, Any]


def reward_specs(config: RewardsConfig) -> list[RewardSpec]:
    """The rewards that `config` names; ValueError (one line) for what cannot be a reward."""
    if not config.weights:
        specs = [RewardSpec(config.fn, 1.0, dict(config.options))]
    else:
        for name, options in config.options.items():
            if name not in config.weights:
                raise ValueError(
                    f"rewards.options.{name}: with rewards.weights, options are given per reward, and "
                    f"{name!r} is none of {', '.join(config.weights)}"
                )
            if not isinstance(options, dict):
                raise ValueError(f"rewards.options.{name}={options!r} must be a mapping of option to value")
        specs = [
            RewardSpec(name, float(weight), dict(config.options.get(name, {})))
            for name, weight in config.weights.items()
        ]
    for spec in specs:
        target_of(spec.name)
        if not math.isfinite(spec.weight):
            raise ValueError(f"rewards.weights.{spec.name}={spec.weight} must be a finite number")
    return specs


def target_of(name: str) -> str:
    """`package.module:function` of a reward name; ValueError with the nearest name if there is none."""
    if name in BUILTIN:
        return BUILTIN[name]
    module, colon, function = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, BUILTIN, n=1, cutoff=0.0)
        raise ValueError(
            f"rewards.fn={name!r} is no built-in reward ({', '.join(BUILTIN)}; did you mean {near[0]}?) "
            "and no import path package.module:function"
        )
    if not all(part.isidentifier() for part in [*module.split("."), *function.split(".")]):
        raise ValueError(f"rewards.fn={name!r} is not of the form package.module:function")
    return name


def load_reward(target: str) -> Callable:
    """Import the function of `package.module:function`; RewardError says what is missing."""
    module_name, _, path = target.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for part in path.split("."):
            value = getattr(value, part)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise RewardError(
            f"reward {target} cannot be imported: {type(error).__name__}: {error}; "
            "change rewards.fn or rewards.weights"
        ) from error
    if not callable(value):
        raise RewardError(f"reward {target} is a {type(value).__name__}, not a function")
    return value


def check_options(name: str, function: Callable, options: dict[str, Any]) -> None:
    """RewardError if `function` does not take these options."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None, **options)
    except TypeError as error:
        raise RewardError(f"reward {name} does not take rewards.options {sorted(options)}: {error}") from None


def call_reward(name: str, function: Callable, prompt: Prompt, responses: Sequence[str]) -> tuple[float, ...]:
    """One finite number per response; RewardError names what broke. UnscorableGold and MemoryError pass."""
    single = traits_of(function).per_sample
    try:
        if single:
            values = [_finish(function(prompt, response)) for response in responses]
        else:
            values = _finish(function(prompt, list(responses)))
    except (UnscorableGold, MemoryError, RewardError):
        raise
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"reward {name} raised {type(error).__name__} on prompt {prompt.prompt_id}: {error}"
        ) from error
    return _checked(name, prompt, len(responses), values)


def _finish(value: Any) -> Any:
    """The result of a coroutine, or the value itself."""
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def _checked(name: str, prompt: Prompt, num_responses: int, values: Any) -> tuple[float, ...]:
    where = f"reward {name} on prompt {prompt.prompt_id}"
    if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__len__"):
        raise RewardError(
            f"{where} returned {_short(values)}; it must return a list of {num_responses} numbers, "
            "one per response (or be marked @per_sample)"
        )
    if len(values) != num_responses:
        raise RewardError(f"{where} returned {len(values)} values for {num_responses} responses")
    numbers = []
    for index, value in enumerate(values):
        # numpy's and torch's scalars pass by float(); strings, lists and None do not.
        if isinstance(value, (str, bytes)):
            raise RewardError(f"{where} returned {_short(value)} for response {index}; it must be a number")
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise RewardError(
                f"{where} returned {_short(value)} for response {index}; it must be a number"
            ) from None
        if not math.isfinite(number):
            raise RewardError(f"{where} returned {number} for response {index}; it must be finite")
        numbers.append(number)
    return tuple(numbers)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
