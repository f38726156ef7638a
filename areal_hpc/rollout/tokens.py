"""Text to token ids and back, for one tokenizer. Used by `episode`.

The rollout is the only role that turns text into ids: from there on ids travel as ids.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from areal_hpc.config.schema import DataConfig

_ANSWER = "\u2063answer\u2063"
"""Stands for an answer in a rendered conversation; no template contains it."""


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a Hugging Face folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


class PromptEncoder:
    """Prompts through the tokenizer's chat template if it has one and data.chat_template is on."""

    def __init__(self, tokenizer: Any, data: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._system = data.system_prompt
        self.chat = bool(data.chat_template and getattr(tokenizer, "chat_template", None))
        self._feedback = lru_cache(maxsize=64)(self._render_feedback)

    def prompt(self, text: str) -> list[int]:
        """Ids of a prompt. Without a template: exactly what the tokenizer makes of the text."""
        if not self.chat:
            return list(self._tokenizer(text).input_ids)
        return self.text(self._render([*self._preamble(), {"role": "user", "content": text}]))

    def text(self, text: str) -> list[int]:
        """Ids of text in the middle of a sequence: nothing is added."""
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def feedback(self, text: str, last_token: int) -> list[int]:
        """Ids of an observation after an answer that ended with `last_token`.

        In a conversation that is the user's next turn with all the template puts around
        it; the answer's own end-of-turn token is not repeated.
        """
        if not self.chat:
            return self.text(text)
        ids = self._feedback(text)
        return list(ids[1:] if ids and ids[0] == last_token else ids)

    def decode(self, ids: Any) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)

    def _preamble(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}] if self._system else []

    def _render(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _render_feedback(self, text: str) -> tuple[int, ...]:
        rendered = self._render(
            [
                *self._preamble(),
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": _ANSWER},
                {"role": "user", "content": text},
            ]
        )
        head, found, tail = rendered.partition(_ANSWER)
        if not found:
            raise ValueError("the tokenizer's chat template does not render an assistant's turn")
        return tuple(self.text(tail))
