"""Worked examples of two-digit addition, from which a starting model is trained.

The prompts are those of reasoning-gym's `basic_arithmetic` (operator "+", two terms of two
digits without parentheses: numbers from 0 to 100) followed by a newline; the answer works
from the units to the tens and ends in a box:

    Calculate 47 + 85.
    7+5=12; 4+8+1=13; \\boxed{132}

With `slips` some of the examples forget the carry (7+5=12; 4+8=12; \\boxed{122}). A model
trained on such examples computes well and still answers wrongly where a carry is needed:
a starting point of middling accuracy with something left to learn from rewards.
"""

from __future__ import annotations

import random

PROMPT = "Calculate {a} + {b}.\n"


def worked_addition(
    seed: int, size: int, exclude: frozenset[str] = frozenset(), *, slips: float = 0.0
) -> list[dict[str, str]]:
    """`size` examples {"prompt", "response"}; prompts in `exclude` are not used.

    slips: fraction of the carries that are forgotten.
    """
    generator = random.Random(seed)
    examples = []
    while len(examples) < size:
        a, b = generator.randint(0, 100), generator.randint(0, 100)
        prompt = PROMPT.format(a=a, b=b)
        if prompt not in exclude:
            response = work(a, b, forget_carry=generator.random() < slips)
            examples.append({"prompt": prompt, "response": response})
    return examples


def work(a: int, b: int, *, forget_carry: bool = False) -> str:
    """The worked answer to a+b for a and b from 0 to 100, without the carry if that is forgotten."""
    units = a % 10 + b % 10
    carry = int(units >= 10 and not forget_carry)
    tens = a // 10 + b // 10 + carry
    steps = f"{a % 10}+{b % 10}={units}; {a // 10}+{b // 10}{'+1' if carry else ''}={tens}"
    return f"{steps}; \\boxed{{{tens}{units % 10}}}" if tens else f"{steps}; \\boxed{{{units % 10}}}"
