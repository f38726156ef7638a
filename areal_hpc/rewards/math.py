"""Reward for mathematics: 1 if the answer equals the gold answer, else 0.

Plain numbers are compared as exact fractions, words as text, everything else by
`formulas`. Runs in reward workers, where time and memory are bounded; safe in any thread
(no signals).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from areal_hpc.rewards.extract import after_hashes, last_boxed, math_answer
from areal_hpc.rewards.formulas import formulas_match, number, parse_formula
from areal_hpc.rewards.registry import UnscorableGold, per_sample
from areal_hpc.types import Prompt

MAX_ANSWER_CHARS = 1000
MAX_DEPTH = 40
MAX_NUMBER_DIGITS = 4000


@per_sample
def math_reward(prompt: Prompt, response: str, *, boxed_only: bool = False) -> float:
    """1.0 if the answer in `response` equals `prompt.gold`.

    boxed_only: an answer outside \\boxed{} counts for nothing. Raises UnscorableGold.
    """
    gold = parse_gold(prompt.gold)
    answer = math_answer(response, boxed_only=boxed_only)
    return 1.0 if answer is not None and equals_gold(gold, answer) else 0.0


# ---- values ---------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """A parsed answer: its normal form as text, and as a fraction or a sympy object where it is one.

    percent: the fraction was written with a percent sign and already divided by 100.
    """

    text: str
    fraction: Fraction | None = None
    percent: bool = False
    symbolic: Any = None

    @property
    def is_word(self) -> bool:
        return self.fraction is None and self.symbolic is None


@functools.lru_cache(maxsize=4096)
def parse_gold(gold: str) -> Value:
    """The gold answer: what follows `####`, the last box, or the whole text. Raises UnscorableGold."""
    content = after_hashes(gold)
    if content is None:
        content = last_boxed(gold)
    if content is None:
        content = gold
    value = _parse(content)
    if value is None:
        shown = gold if len(gold) <= 80 else "..." + gold[-77:]
        raise UnscorableGold(f"gold answer {shown!r} is no number, formula or single word")
    return value


def equals_gold(gold: Value, answer: str) -> bool:
    """Whether the extracted `answer` means the same as `gold`."""
    if len(answer) > MAX_ANSWER_CHARS or not answer.strip():
        return False
    if _normal_text(answer) == gold.text:
        return True
    if gold.is_word:
        return _word(answer) == _word(gold.text)
    value = _parse(answer)
    if value is None or value.is_word:
        return False
    if gold.fraction is not None and value.fraction is not None:
        return _percent_equal(gold, value)
    return formulas_match(_formula(gold), _formula(value))


def _formula(value: Value) -> Any:
    return value.symbolic if value.fraction is None else number(value.fraction, value.percent)


def _percent_equal(gold: Value, value: Value) -> bool:
    """50% is accepted for 0.5 and for 50, and the other way round."""
    if gold.fraction == value.fraction:
        return True
    if gold.percent != value.percent:
        return (
            gold.fraction * 100 == value.fraction if gold.percent else gold.fraction == value.fraction * 100
        )
    return False


def _parse(content: str) -> Value | None:
    """The value of a gold or extracted answer; None if it is none."""
    if len(content) > MAX_ANSWER_CHARS:
        return None
    text = _normal_text(content)
    if not text or _depth(text) > MAX_DEPTH:
        return None
    plain = _fraction(text)
    if plain is not None:
        return Value(text, fraction=plain[0], percent=plain[1])
    if _is_word(text):
        return Value(text)
    if _is_prose(text):
        return None
    symbolic = parse_formula(text)
    return None if symbolic is None else Value(text, symbolic=symbolic)


# ---- text -----------------------------------------------------------------------

_REPLACEMENTS = (
    (re.compile(r"\\(?:left|right|displaystyle|bigl?|bigr?|Bigl?|Bigr?|limits)(?![A-Za-z])\.?"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:mathbf|boldsymbol|bm|textbf|mathit)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\}|\u00b0)|\u00b0|\\degree(?![A-Za-z])"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<=\d)\\[,!:; ](?=\d{3}(?!\d))"), ""),
    (re.compile(r"\\[,!:;> ]|~|\\q?quad(?![A-Za-z])|\u00a0|\u2009|\u202f"), " "),
    (re.compile(r"\\?\$|[\u20ac\u00a3\u00a5]"), ""),
    (re.compile(r"[\u2212\u2013]"), "-"),
    (re.compile(r"\u00d7"), r"\\times "),
    (re.compile(r"\u00b7|\u22c5"), r"\\cdot "),
    (re.compile(r"\u03c0"), r"\\pi "),
    (re.compile(r"\u221e"), r"\\infty "),
    (re.compile(r"\u221a\s*(\d+|\w)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))(?=(?:[\d,]*(?:\.\d+)?)\s*(?:\\?%)?\s*$)"), ""),
    (re.compile(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d])"), lambda m: m[1] + m[2].replace(" ", "")),
)


def _normal_text(content: str) -> str:
    """Spelling differences that never change the meaning, taken away."""
    text = content.strip()
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = " ".join(text.split())
    while text.endswith((".", ",", ";", ":")) and not text.endswith("..."):
        text = text[:-1].rstrip()
    return text


def _depth(text: str) -> int:
    deepest = depth = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest


_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textrm|mbox|operatorname)\s*\{([^{}]*)\}")


_NO_VALUE = ("nan", "none", "null", "undefined")


def _is_prose(text: str) -> bool:
    """Two words in a row, or a word that stands for a missing value."""
    plain = re.sub(r"\\[A-Za-z]+", " ", _TEXT_COMMAND.sub(" ", text)).casefold()
    plain = re.sub(r"\b(and|or)\b", ",", plain)
    return plain.strip() in _NO_VALUE or re.search(r"[a-z]{2,} +[a-z]{2,}", plain) is not None


def _is_word(text: str) -> bool:
    """A word, a choice letter such as (C), or anything inside \\text{}: compared as text.

    sympy would read a word as a product of letters, in which any anagram is equal.
    """
    if _TEXT_COMMAND.fullmatch(text):
        return bool(_word(text))
    return re.fullmatch(r"\(?[A-Z]\)?|[A-Za-z]{2,}", text) is not None and text.lower() not in (
        "pi",
        "oo",
        *_NO_VALUE,
    )


def _word(text: str) -> str:
    plain = _TEXT_COMMAND.sub(r"\1", _normal_text(text)).casefold()
    return re.sub(r"^\((\w)\)$|[\s.]+", lambda m: m[1] or "", plain.strip())


# Two letters may be a product of variables, so only known units; a longer word is one.
_UNIT_WORD = r"(?:[cdkm]m|k?m?g|m?l|ft|in|mi|oz|lb|hr|am|pm|[A-Za-z]{3,})"
_UNIT = (
    r"(?:\s*\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?"
    rf"|\s+{_UNIT_WORD}(?: [A-Za-z]+)*)?"
)
_DECIMAL = re.compile(rf"([-+]?)\s?(\d*\.?\d*)(?:[eE]([-+]?\d+))?(\s?\\?%|\s?percent)?{_UNIT}")
_TEN_POWER = re.compile(
    rf"([-+]?)\s?(\d+\.?\d*)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{{?\s*(-?\d+)\s*\}}?{_UNIT}"
)
_RATIO = re.compile(
    rf"([-+]?)\s?(?:(\d+)(?: |(?=\\)))?(?:\\frac\s*\{{\s*(-?\d+)\s*\}}\s*\{{\s*(\d+)\s*\}}|(\d+)\s?/\s?(\d+))"
    rf"(\s?\\?%)?{_UNIT}"
)


def _fraction(text: str) -> tuple[Fraction, bool] | None:
    """`text` as an exact number and whether it is a percentage; None if it is no plain number."""
    match = _DECIMAL.fullmatch(text)
    if match and any(character.isdigit() for character in match[2]):
        return _scaled(match[1] + match[2], match[3] or "0", bool(match[4]))
    match = _TEN_POWER.fullmatch(text)
    if match:
        return _scaled(match[1] + match[2], match[3], False)
    match = _RATIO.fullmatch(text)
    if not match or max(map(len, (g for g in match.groups() if g))) > MAX_NUMBER_DIGITS:
        return None
    numerator, denominator = (match[3], match[4]) if match[3] else (match[5], match[6])
    if int(denominator) == 0:
        return None
    value = int(match[2] or 0) + Fraction(int(numerator), int(denominator))
    value = -value if match[1] == "-" else value
    return (value / 100, True) if match[7] else (value, False)


def _scaled(decimal: str, exponent: str, percent: bool) -> tuple[Fraction, bool] | None:
    if len(decimal) > MAX_NUMBER_DIGITS or len(exponent) > 5 or abs(int(exponent)) > MAX_NUMBER_DIGITS:
        return None
    value = Fraction(decimal) * Fraction(10) ** int(exponent)
    return (value / 100, True) if percent else (value, False)
