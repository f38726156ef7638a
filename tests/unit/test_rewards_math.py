"""The math reward: a table of answers, exactness against fractions, threads."""

import random
import threading
import time
from fractions import Fraction
from pathlib import Path

import math_cases
import pytest

from areal_hpc.rewards import extract
from areal_hpc.rewards.math import math_reward, parse_gold
from areal_hpc.rewards.registry import UnscorableGold
from areal_hpc.types import Prompt

README = Path(__file__).parents[2] / "areal_hpc" / "rewards" / "README.md"


@pytest.fixture(scope="module", autouse=True)
def parser():
    """Let the parser load its grammar before anything is timed."""
    math_reward(Prompt(1, "", gold=r"\sqrt{2}"), r"\boxed{\sqrt{3}}")


@pytest.mark.parametrize(
    ("gold", "response", "reward"),
    [pytest.param(*case[1:], id=case[0]) for case in math_cases.HOSTILE + math_cases.ORDINARY],
)
def test_answers_are_paid_as_the_table_says(gold, response, reward):
    start = time.monotonic()
    assert math_reward(Prompt(1, "", gold=gold), response) == reward
    assert time.monotonic() - start < 5.0


@pytest.mark.parametrize("gold", math_cases.UNSCORABLE)
def test_a_gold_answer_that_is_none_is_refused(gold):
    with pytest.raises(UnscorableGold):
        parse_gold(gold)
    with pytest.raises(UnscorableGold):
        math_reward(Prompt(1, "", gold=gold), gold)


def test_the_readme_shows_every_hostile_answer():
    text = README.read_text()
    for name, _, _, reward in math_cases.HOSTILE:
        assert f"| {name} | {reward:g} |" in text


def test_plain_numbers_agree_with_fractions():
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(500):
        values = [Fraction(rng.randrange(-50, 50), rng.choice((1, 2, 3, 4, 5, 8, 10))) for _ in range(2)]
        gold, answer = (_written(value, rng) for value in values)
        expected = 1.0 if values[0] == values[1] else 0.0
        assert math_reward(Prompt(1, "", gold=gold), f"\\boxed{{{answer}}}") == expected, (gold, answer)


def _written(value: Fraction, rng: random.Random) -> str:
    """One of the spellings of a number."""
    factor = rng.randrange(1, 5)
    numerator, denominator = value.numerator * factor, value.denominator * factor
    forms = [f"{numerator}/{denominator}", f"\\frac{{{numerator}}}{{{denominator}}}"]
    if value.denominator == 1:
        forms += [str(value.numerator), f"{value.numerator}.0"]
    if value.denominator in (1, 2, 4, 5, 8, 10):
        forms.append(format(float(value), ".3f"))
    return rng.choice(forms)


def test_threads_get_the_verdicts_of_one_thread():
    cases = [
        case for case in math_cases.ORDINARY if "sqrt" in case[1] or "x" in case[1] or "(" in case[1]
    ] * 3
    wrong = []

    def score() -> None:
        for name, gold, response, reward in cases:
            if math_reward(Prompt(1, "", gold=gold), response) != reward:
                wrong.append(name)

    threads = [threading.Thread(target=score) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_gsm8k_gold_answers_are_read(test_data):
    import json

    path = test_data / "gsm8k" / "test.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is missing")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        prompt = Prompt(1, row["question"], gold=row["answer"])
        final = row["answer"].rpartition("####")[2].strip()
        assert math_reward(prompt, f"The answer is {final}.") == 1.0, final
        assert math_reward(prompt, f"The answer is {final}1.") == 0.0, final


def test_boxed_only_ignores_other_numbers():
    prompt = Prompt(1, "", gold="5")
    assert math_reward(prompt, "it is 5", boxed_only=True) == 0.0
    assert math_reward(prompt, r"it is \boxed 5", boxed_only=True) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}} done", r"\{1,2\}"),
        (r"\fbox{3}", "3"),
        (r"\boxed{1 \text{ or } \boxed{2}}", "2"),
        (r"no box: 7 eggs cost $14", "$14"),
        ("so $x^2$ is it", "x^2"),
        ("3/4 of 12 is 9.", "9"),
        ("nothing here", None),
    ],
)
def test_extraction(text, answer):
    assert extract.math_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nor\n```py\nx = 2\n```\nend", "x = 2\n"),
        ("```python\nx = 1\n```\noutput:\n```text\n1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```bash\nls\n```", None),
    ],
)
def test_python_blocks(text, block):
    assert extract.python_block(text) == block
