"""Formulas: parsed by math-verify, compared exactly.

math-verify rounds to six decimals and drops what is below 1e-15, so numbers, sets and
tuples are compared here and only relations and intervals of other kinds there. Called
by `math`; importing it takes 0.4 s, which a worker does before its first check.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from fractions import Fraction
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.relational import Relational

MAX_BITS = 200_000
"""Constants that would need more bits than this are not evaluated."""
MAX_SYMBOLIC_POWER = 100
APPROXIMATION = 5e-7
"""Relative error within which a decimal stands for an irrational number."""

_PARSER_LOCK = threading.Lock()  # latex2sympy keeps state in module globals


@functools.lru_cache(maxsize=1)
def _extraction() -> tuple:
    """math-verify's configuration."""
    # Its time limits need the main thread's signals; the service has its own, so the
    # warning that they are off says nothing here.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return (LatexExtractionConfig(boxed_match_priority=0),)


def parse_formula(text: str) -> Any:
    """The sympy object of `text`, not evaluated; None if math-verify cannot parse it."""
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
    try:
        return None if parsed[0].has(sympy.nan, sympy.zoo) else parsed[0]
    except (ArithmeticError, ValueError, TypeError, AttributeError, RecursionError):
        return None  # an object that even a look at its parts breaks


def number(fraction: Fraction, percent: bool) -> Any:
    """An exact number; a percentage in the form that math-verify gives it."""
    value = sympy.Rational(fraction.numerator, fraction.denominator)
    return value * 100 * sympy.UnevaluatedExpr(sympy.Rational(1, 100)) if percent else value


def formulas_match(gold: Any, answer: Any) -> bool:
    """Whether two parsed formulas mean the same; False if evaluating one would take too much."""
    try:
        return max(_bits(gold), _bits(answer)) <= MAX_BITS and _equal(gold, answer)
    except (ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError, RecursionError):
        return False  # sympy's ways to say that the two cannot be compared


def _bits(expression: Any) -> float:
    """Upper bound of the bits that evaluating a formula may need; inf if there is none."""
    if isinstance(expression, sympy.Rational):
        return max(abs(int(expression.p)), int(expression.q)).bit_length()
    members = list(expression) if isinstance(expression, sympy.MatrixBase) else expression.args
    if not members:
        return 64
    if isinstance(expression, (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)):
        return math.inf  # the answer to a question is the value, not the task
    parts = [_bits(member) for member in members]
    if math.inf in parts:
        return math.inf
    if isinstance(expression, sympy.Pow) and members[1].is_number:
        power = _size(members[1], parts[1])
        if not members[0].is_number and power > MAX_SYMBOLIC_POWER:
            return math.inf
        return max(parts[0], 1) * max(power, 1)
    if isinstance(expression, sympy.exp) and members[0].is_number:
        return 2 * max(_size(members[0], parts[0]), 1)
    if isinstance(expression, (sympy.factorial, sympy.gamma)) and members[0].is_number:
        size = _size(members[0], parts[0])
        return size * math.log2(size + 2)
    return sum(parts)


def _size(constant: Any, bits: float) -> float:
    """Magnitude of a constant that takes `bits` bits; inf if that is too much to find out."""
    return math.inf if bits > 64 else float(abs(constant.evalf(15)))


def _equal(gold: Any, answer: Any) -> bool:
    """Equality of two parsed formulas."""
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
        return bool(verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None))
    return False


def _unwrapped(gold: Any, answer: Any) -> tuple[Any, Any]:
    """`x = 5` against `5`: only the values are compared."""
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
    floats = expression.atoms(sympy.Float)
    return expression.xreplace({number: sympy.Rational(str(number)) for number in floats})


def _constants_equal(gold: Any, answer: Any) -> bool:
    """Exact for rationals; otherwise equal to 40 digits, or a decimal within APPROXIMATION."""
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
    hundredth = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    if not expression.is_Mul or hundredth not in expression.args:
        return None
    return sympy.Mul(*(factor for factor in expression.args if factor != hundredth))


def _formulas_equal(gold: Any, answer: Any) -> bool:
    """Whether two formulas with variables are the same function."""
    if gold.free_symbols != answer.free_symbols:
        # Cheap refusal; x - x + 1 for 1 is the price.
        return False
    difference = gold.doit() - answer.doit()
    if sympy.expand(difference) == 0:
        return True
    return sympy.simplify(difference) == 0
