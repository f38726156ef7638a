"""Finds the answer in a text: the last box, `#### x`, or the last number; and Python code blocks.

Pure string work in linear time (answers may be megabytes of hostile text). Called by
`math` and `code`.
"""

from __future__ import annotations

import re
from collections import deque

BOXES = ("\\boxed", "\\fbox")
NUMBER = re.compile(
    r"""(?<![\w.])[-+\u2212]?\s?(?:\\?\$\s?)?      # sign and currency, not inside a word
    (?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?    # digits, with or without groups of thousands
    (?:[eE][-+]?\d+(?!\w))?
    (?:\s?/\s?\d+(?![\d.]))?                      # a fraction
    (?:\s?\\?%)?
    |(?<![\w.])[-+\u2212]?\.\d+(?:\s?\\?%)?""",
    re.VERBOSE,
)
TAIL_CHARS = 4000
"""Without a box or marker, the answer is looked for in this much of the end."""
FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([^\n`]*)$", re.MULTILINE)


def last_boxed(text: str) -> str | None:
    """Content of the last box; "" if it is empty or never closes, None if there is no box."""
    start, name = max((text.rfind(name), name) for name in BOXES)
    if start < 0:
        return None
    rest = text[start + len(name) :].lstrip()
    if not rest.startswith("{"):
        word = re.match(r"[^\s$\\]+", rest)  # TeX takes one token: \boxed 5
        return word.group() if word else ""
    depth = 0
    position = 0
    while position < len(rest):
        character = rest[position]
        if character == "\\":
            position += 2  # an escaped brace is not a bracket
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:position].strip()
        position += 1
    return ""


def after_hashes(text: str) -> str | None:
    """What follows the last `####` on its line (GSM8K's form)."""
    _, marker, rest = text.rpartition("####")
    return rest.strip().split("\n", 1)[0].strip() if marker else None


def last_number(text: str) -> str | None:
    """The last number, or the last formula between dollar signs if that comes later or holds it."""
    tail = text[-TAIL_CHARS:]
    number = next(iter(deque(NUMBER.finditer(tail), maxlen=1)), None)
    formula = _last_formula(tail)
    if formula is not None and (number is None or formula[1] >= number.end()):
        return formula[0]
    return number.group().strip() if number is not None else None


def _last_formula(text: str) -> tuple[str, int] | None:
    """Content and end of the last $...$, \\(...\\) or \\[...\\] on one line, if it holds mathematics."""
    found = None
    for match in re.finditer(r"\$\$?([^$\n]{1,400})\$\$?|\\\(([^\n]{1,400}?)\\\)|\\\[(.{1,400}?)\\\]", text):
        content = next(group for group in match.groups() if group is not None).strip()
        # "costs $5 and $6" is money, not a formula.
        if content and not re.search(r"[A-Za-z]{2,} [a-z]", re.sub(r"\\[a-z]+(\{[^{}]*\})?", "", content)):
            found = (content, match.end())
    return found


def math_answer(text: str, *, boxed_only: bool = False) -> str | None:
    """The answer of a response: last box, else (unless `boxed_only`) `####`, else the last number."""
    boxed = last_boxed(text)
    if boxed is not None or boxed_only:
        return boxed
    return after_hashes(text) or last_number(text)


def python_block(text: str) -> str | None:
    """The last fenced block that is Python or has no language; an open last fence runs to the end.

    None if the text has fences but none of them is Python; the whole text if it has none.
    """
    fences = list(FENCE.finditer(text))
    if not fences:
        return text
    block, index = None, 0
    while index < len(fences):
        opening = fences[index]
        closing = index + 1
        while closing < len(fences) and not _closes(fences[closing], opening):
            closing += 1
        end = fences[closing].start() if closing < len(fences) else len(text)
        words = opening.group(2).split()
        if not words or words[0].strip("{}.").lower() in ("python", "py", "python3"):
            block = text[opening.end() + 1 : end]
        index = closing + 1
    return block


def _closes(fence: re.Match, opening: re.Match) -> bool:
    return fence.group(1).startswith(opening.group(1)) and not fence.group(2).strip()
