"""Reward for mathematics: 1 if the answer equals the gold answer, else 0.

Plain numbers are compared as exact fractions; everything else is parsed by math-verify
and compared here where its rounding would be wrong (tiny and huge numbers, sets) and by
math-verify otherwise. Runs in reward workers, `worker` bounds time and memory; safe in
any thread (no signals).
"""

from __future__ import annotations

import functools
import logging
import math
import re
import threading
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from areal_hpc.rewards.extract import after_hashes, last_boxed, math_answer
from areal_hpc.rewards.registry import UnscorableGold, per_sample
from areal_hpc.types import Prompt

MAX_ANSWER_CHARS = 1000
MAX_DEPTH = 40
MAX_NUMBER_DIGITS = 4000
MAX_BITS = 200_000
"""Constants that would need more bits than this are not evaluated."""
MAX_SYMBOLIC_POWER = 100
APPROXIMATION = 5e-7
"""Relative error within which a decimal stands for an irrational number."""

_PARSER_LOCK = threading.Lock()  # latex2sympy keeps state in module globals


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
    left, right = _sympy(gold), _sympy(value)
    if left is None or right is None:
        return False
    try:
        return _equal(left, right)
    except (ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError, RecursionError):
        return False  # sympy's ways to say that the two cannot be compared


def _percent_equal(gold: Value, value: Value) -> bool:
    """50% is accepted for 0.5 and for 50, and the other way round."""
    if gold.fraction == value.fraction:
        return True
    if gold.percent != value.percent:
        return gold.fraction * 100 == value.fraction if gold.percent else gold.fraction == value.fraction * 100
    return False


def _parse(content: str) -> Value | None:
    """The value of a gold or extracted answer; None if it is none."""
    if len(content) > MAX_ANSWER_CHARS:
        return None
    text = _normal_text(content)
    if not text or _depth(text) > MAX_DEPTH:
        return None
    number = _fraction(text)
    if number is not None:
        return Value(text, fraction=number[0], percent=number[1])
    if _is_word(text):
        return Value(text)
    if _is_prose(text):
        return None
    symbolic = _parse_latex(text)
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


_UNIT = r"(?:\s*\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?|\s+[A-Za-z]{2,}[A-Za-z ]*)?"
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


# ---- formulas -------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _extraction() -> tuple:
    """math-verify's configuration; imported late, it takes 0.4 s."""
    from math_verify import LatexExtractionConfig

    # Its time limits need the main thread's signals; the service has its own, so the
    # warning that they are off says nothing here.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return (LatexExtractionConfig(boxed_match_priority=0),)


def _parse_latex(text: str) -> Any:
    """The sympy object of `text`, not evaluated; None if math-verify cannot parse it."""
    from math_verify import parse

    extraction = _extraction()
    try:
        with _PARSER_LOCK:
            parsed = parse(
                f"\\boxed{{{text}}}", list(extraction), fallback_mode="no_fallback", parsing_timeout=None
            )
    except RecursionError:
        return None
    if not parsed or isinstance(parsed[0], str):
        return None
    import sympy

    expression = parsed[0]
    if expression.has(sympy.nan, sympy.zoo):
        return None
    return expression


def _sympy(value: Value) -> Any:
    """A sympy object with exact numbers; None if evaluating it would take too much."""
    import sympy

    if value.fraction is not None:
        number = sympy.Rational(value.fraction.numerator, value.fraction.denominator)
        return number * 100 * sympy.UnevaluatedExpr(sympy.Rational(1, 100)) if value.percent else number
    return value.symbolic if _bits(value.symbolic) <= MAX_BITS else None


def _bits(expression: Any) -> float:
    """Upper bound of the bits that evaluating a formula may need; inf if there is none."""
    import sympy

    if isinstance(expression, sympy.Rational):
        return max(abs(int(expression.p)), int(expression.q)).bit_length()
    if not getattr(expression, "args", ()):
        return 64
    parts = [_bits(argument) for argument in _arguments(expression)]
    if any(math.isinf(part) for part in parts):
        return math.inf
    if isinstance(expression, (sympy.Pow, sympy.exp)):
        base, exponent = (parts[0], expression.args[1]) if isinstance(expression, sympy.Pow) else (2, None)
        power = expression.args[-1]
        if not power.is_number:
            return sum(parts)
        if parts[-1] > 64:
            return math.inf
        size = abs(float(power.evalf(15)))
        if not expression.args[0].is_number and exponent is not None and size > MAX_SYMBOLIC_POWER:
            return math.inf
        return max(base, 1) * max(size, 1)
    if isinstance(expression, (sympy.factorial, sympy.gamma)):
        argument = expression.args[0]
        if not argument.is_number:
            return sum(parts)
        if parts[0] > 64:
            return math.inf
        size = abs(float(argument.evalf(15)))
        return size * math.log2(size + 2)
    if isinstance(expression, (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)):
        return math.inf  # the answer to a question is the value, not the task
    return sum(parts)


def _arguments(expression: Any) -> list[Any]:
    import sympy

    return list(expression) if isinstance(expression, sympy.MatrixBase) else list(expression.args)


def _equal(gold: Any, answer: Any) -> bool:
    """Equality of two parsed formulas."""
    import sympy
    from sympy.core.relational import Relational

    gold, answer = _unwrapped(gold, answer)
    if gold == answer:
        return True
    if isinstance(gold, sympy.MatrixBase) or isinstance(answer, sympy.MatrixBase):
        return (
            isinstance(gold, sympy.MatrixBase)
            and isinstance(answer, sympy.MatrixBase)
            and gold.shape == answer.shape
            and all(_equal(g, a) for g, a in zip(gold, answer))
        )
    if isinstance(gold, sympy.FiniteSet) and isinstance(answer, sympy.FiniteSet):
        return _same_members(gold, answer)
    if isinstance(gold, (sympy.Tuple, sympy.Interval)) and isinstance(answer, (sympy.Tuple, sympy.Interval)):
        return _same_sequence(gold, answer)
    if isinstance(gold, sympy.FiniteSet) or isinstance(answer, sympy.FiniteSet):
        alone = [list(x) if isinstance(x, sympy.FiniteSet) else [x] for x in (gold, answer)]
        return len(alone[0]) == len(alone[1]) == 1 and _equal(alone[0][0], alone[1][0])
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        if gold.is_number and answer.is_number:
            return _constants_equal(gold, answer)
        return _formulas_equal(_exact(gold), _exact(answer))
    if isinstance(gold, (Relational, sympy.Set, sympy.And, sympy.Or)):
        from math_verify import verify

        return bool(verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None))
    return False


def _unwrapped(gold: Any, answer: Any) -> tuple[Any, Any]:
    """`x = 5` against `5`: only the values are compared."""
    import sympy

    if isinstance(answer, sympy.Eq) and not isinstance(gold, sympy.Eq):
        if isinstance(gold, (sympy.Expr, sympy.Set, sympy.Tuple, sympy.MatrixBase)):
            return gold, answer.rhs
    if isinstance(gold, sympy.Eq) and not isinstance(answer, sympy.Eq) and gold.lhs.is_Symbol:
        if isinstance(answer, (sympy.Expr, sympy.Set, sympy.Tuple, sympy.MatrixBase)):
            return gold.rhs, answer
    return gold, answer


def _same_members(gold: Any, answer: Any) -> bool:
    """Each member of one set has its own partner in the other."""
    if len(gold) != len(answer):
        return False
    rest = list(answer)
    for member in gold:
        partner = next((k for k, other in enumerate(rest) if _equal(member, other)), None)
        if partner is None:
            return False
        del rest[partner]
    return True


def _same_sequence(gold: Any, answer: Any) -> bool:
    """Tuples member by member; an open interval is written like a pair."""
    import sympy

    sides = []
    for value in (gold, answer):
        if isinstance(value, sympy.Interval):
            sides.append(([value.start, value.end], (value.left_open, value.right_open)))
        else:
            sides.append((list(value), None))
    (gold_members, gold_ends), (answer_members, answer_ends) = sides
    ends = {end for end in (gold_ends, answer_ends) if end is not None}
    if len(ends) > 1 or (None in (gold_ends, answer_ends) and ends and ends != {(True, True)}):
        return False
    return len(gold_members) == len(answer_members) and all(map(_equal, gold_members, answer_members))


def _exact(expression: Any) -> Any:
    """Decimals as the fractions that they were written as."""
    import sympy

    floats = expression.atoms(sympy.Float)
    return expression.xreplace({number: sympy.Rational(str(number)) for number in floats})


def _constants_equal(gold: Any, answer: Any) -> bool:
    """Exact for rationals; otherwise equal to 40 digits, or a decimal within APPROXIMATION."""
    import sympy

    percents = [_without_percent(gold), _without_percent(answer)]
    if (percents[0] is None) != (percents[1] is None):
        bare = [plain if plain is not None else side for plain, side in zip(percents, (gold, answer))]
        if _constants_equal(*bare):
            return True
    values = [_exact(side).doit() for side in (gold, answer)]
    if all(value.is_Rational for value in values):
        return values[0] == values[1]
    difference = sympy.Abs(sympy.N(values[0] - values[1], 60))
    scale = sum(sympy.Abs(sympy.N(term, 60)) for value in values for term in sympy.Add.make_args(value))
    if not (difference.is_Float or difference.is_Integer) or not scale.is_finite:
        return False
    if difference <= sympy.Float("1e-40") * scale:
        return True
    rationals = [value for value in values if value.is_Rational]
    if len(rationals) != 1 or not _is_decimal(rationals[0].q):
        return False
    return bool(difference <= APPROXIMATION * sympy.Abs(rationals[0]))


def _is_decimal(denominator: int) -> bool:
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def _without_percent(expression: Any) -> Any:
    """x of x% (math-verify writes x * UnevaluatedExpr(1/100)); None if it is no percentage."""
    import sympy

    hundredth = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    if not expression.is_Mul or hundredth not in expression.args:
        return None
    return sympy.Mul(*(factor for factor in expression.args if factor != hundredth))


def _formulas_equal(gold: Any, answer: Any) -> bool:
    """Whether two formulas with variables are the same function."""
    import sympy

    if gold.free_symbols != answer.free_symbols:
        # Cheap refusal; x - x + 1 for 1 is the price.
        return False
    difference = gold.doit() - answer.doit()
    if sympy.expand(difference) == 0:
        return True
    return sympy.simplify(difference) == 0
