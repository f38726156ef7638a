"""Workflows: how a prompt becomes trajectories. One interface, three built in, more by import path.

A workflow is a class whose constructor takes rollout.workflow_options as keywords and
whose `arun_episode(engine, prompt)` answers one prompt `engine.group_size` times. Called
by the rollout's loop, many episodes at once; it may await whatever it likes.
"""

from __future__ import annotations

import difflib
import importlib
import re
from typing import Any, Protocol

from areal_hpc.rollout.engine import PromptTooLong
from areal_hpc.rollout.episode import EpisodeEngine, Transcript, gather_all
from areal_hpc.types import Prompt, Trajectory


class Workflow(Protocol):
    async def arun_episode(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        """`engine.group_size` trajectories with sample_index 0, 1, ...

        Raises PromptTooLong or UnscorableGold where the prompt can never be answered.
        """
        ...


class SingleTurn:
    """One answer per sample; the group is scored together."""

    async def arun_episode(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        prompt_ids = engine.encode_prompt(prompt)
        transcripts = [Transcript(prompt_ids) for _ in range(engine.group_size)]
        answers = await gather_all(
            [engine.generate(transcript, index) for index, transcript in enumerate(transcripts)]
        )
        results = await engine.score(
            prompt,
            [engine.decode(answer.token_ids) for answer in answers],
            [answer.finish_reason == "length" for answer in answers],
        )
        return [
            engine.finish(transcript, prompt, index, result)
            for index, (transcript, result) in enumerate(zip(transcripts, results, strict=True))
        ]


class MultiTurn:
    """Try again after a wrong answer, up to `max_turns` answers.

    What is right is said by `rewards` (right_part, right_at). The trajectory's reward is
    that of the last answer times `discount` for every further turn.
    """

    def __init__(
        self,
        max_turns: int = 2,
        discount: float = 0.9,
        feedback: str = "\nThat answer is wrong. Try again.\n",
    ) -> None:
        self._max_turns = max_turns
        self._discount = discount
        self._feedback = feedback

    async def arun_episode(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        prompt_ids = engine.encode_prompt(prompt)
        return await gather_all(
            [self._sample(engine, prompt, prompt_ids, index) for index in range(engine.group_size)]
        )

    async def _sample(
        self, engine: EpisodeEngine, prompt: Prompt, prompt_ids: list[int], index: int
    ) -> Trajectory:
        transcript = Transcript(prompt_ids)
        for turn in range(self._max_turns):
            answer = await engine.generate(transcript, index, turn)
            truncated = answer.finish_reason == "length"
            [result] = await engine.score(prompt, [engine.decode(answer.token_ids)], [truncated])
            last = turn == self._max_turns - 1
            if engine.is_right(result) or truncated or last:
                break
            feedback = engine.encode_feedback(self._feedback, transcript)
            if engine.budget(transcript) <= len(feedback):
                break
            transcript.observe(feedback)
        return engine.finish(transcript, prompt, index, result, result.reward * self._discount**turn)


class PythonTool:
    """The policy may run Python between `open_tag` and `close_tag` and reads its output.

    What a program prints is put after the call, between `output_tags`, cut to
    `max_output_chars`. The last stretch of policy tokens, after the last output, is scored.
    """

    def __init__(
        self,
        max_calls: int = 4,
        timeout_s: float = 5.0,
        max_output_chars: int = 1000,
        open_tag: str = "<python>",
        close_tag: str = "</python>",
        output_tags: tuple[str, str] = ("<output>", "</output>"),
    ) -> None:
        self._max_calls = max_calls
        self._timeout_s = timeout_s
        self._max_output_chars = max_output_chars
        self._close_tag = close_tag
        self._call = re.compile(f"{re.escape(open_tag)}(.*?){re.escape(close_tag)}", re.DOTALL)
        self._output_tags = tuple(output_tags)

    async def arun_episode(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        prompt_ids = engine.encode_prompt(prompt)
        samples = await gather_all(
            [self._sample(engine, prompt_ids, index) for index in range(engine.group_size)]
        )
        results = await engine.score(
            prompt,
            [text for _, text in samples],
            [transcript.finish_reason == "length" for transcript, _ in samples],
        )
        return [
            engine.finish(transcript, prompt, index, result)
            for index, ((transcript, _), result) in enumerate(zip(samples, results, strict=True))
        ]

    async def _sample(
        self, engine: EpisodeEngine, prompt_ids: list[int], index: int
    ) -> tuple[Transcript, str]:
        transcript = Transcript(prompt_ids)
        for turn in range(self._max_calls + 1):
            try:
                answer = await engine.generate(transcript, index, turn, stop=(self._close_tag,))
            except PromptTooLong:
                if turn == 0:
                    raise
                transcript.finish_reason = "length"
                return transcript, ""
            text = engine.decode(answer.token_ids)
            calls = self._call.findall(text)
            if not calls or answer.finish_reason == "length" or turn == self._max_calls:
                break
            output = await engine.run_python(calls[-1], timeout_s=self._timeout_s)
            shown = engine.encode_text(
                f"\n{self._output_tags[0]}\n{output[: self._max_output_chars]}\n{self._output_tags[1]}\n"
            )
            if engine.budget(transcript) <= len(shown):
                transcript.finish_reason = "length"
                break
            transcript.observe(shown)
        return transcript, text


BUILTIN: dict[str, type] = {"single_turn": SingleTurn, "multi_turn": MultiTurn, "python_tool": PythonTool}


def load_workflow(name: str, options: dict[str, Any]) -> Workflow:
    """A built-in workflow or `package.module:Class`; ValueError says which key to change."""
    if name in BUILTIN:
        cls = BUILTIN[name]
    else:
        cls = _import_class(name)
    try:
        workflow = cls(**options)
    except TypeError as error:
        raise ValueError(f"rollout.workflow_options do not fit {name}: {error}") from None
    if not callable(getattr(workflow, "arun_episode", None)):
        raise ValueError(f"rollout.workflow={name!r} has no method arun_episode(engine, prompt)")
    return workflow


def _import_class(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, BUILTIN, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"rollout.workflow={name!r} is no built-in workflow ({', '.join(BUILTIN)}; did you mean "
            f"{near}?) and no import path package.module:Class"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"rollout.workflow={name!r} cannot be imported: {error}") from None
