"""Worked examples of two-digit addition, from which a starting model is trained.

The prompts are those of reasoning-gym's `basic_arithmetic` (operator "+", two terms of two
digits without parentheses: numbers from 0 to 100) followed by a newline; the answer works
from the units to the tens and ends in a box:

    Calculate 47 + 85.
    7+5=12; 4+8+1=13; \\boxed{132}
"""

from __future__ import annotations

import random

PROMPT = "Calculate {a} + {b}.\n"


def worked_addition(seed: int, size: int, exclude: frozenset[str] = frozenset()) -> list[dict[str, str]]:
    """`size` examples {"prompt", "response"}; prompts in `exclude` are not used."""
    generator = random.Random(seed)
    examples = []
    while len(examples) < size:
        a, b = generator.randint(0, 100), generator.randint(0, 100)
        prompt = PROMPT.format(a=a, b=b)
        if prompt not in exclude:
            examples.append({"prompt": prompt, "response": work(a, b)})
    return examples


def work(a: int, b: int) -> str:
    """The worked answer to a+b for a and b from 0 to 100."""
    units = a % 10 + b % 10
    carry = "+1" if units >= 10 else ""
    tens = a // 10 + b // 10 + bool(carry)
    return f"{a % 10}+{b % 10}={units}; {a // 10}+{b // 10}{carry}={tens}; \\boxed{{{a + b}}}"
