"""Prompts: files, generated tasks, held-out exclusion, worked examples."""

import json
import re
from fractions import Fraction

import pyarrow
import pyarrow.parquet
import pytest

from areal_hpc.config.load import ConfigError
from areal_hpc.config.schema import DataConfig, DatasetConfig
from areal_hpc.data.datasets import load_prompt_sets, load_prompts
from areal_hpc.data.worked import PROMPT, worked_addition

ADDITION = {
    "min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2, "operators": ["+"],
    "allow_parentheses": False, "allow_negation": False,
}  # fmt: skip


def addition(seed: int, size: int) -> DatasetConfig:
    return DatasetConfig(
        task="basic_arithmetic", task_seed=seed, size=size, task_options=ADDITION, template="{prompt}\n"
    )


@pytest.fixture
def rows() -> list[dict]:
    return [{"q": f"What is {n}+1?", "a": n + 1, "t": {"inputs": [n]}} for n in range(5)]


def test_jsonl_and_parquet_give_the_same_prompts(tmp_path, rows):
    jsonl, parquet = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    loaded = [
        load_prompts(DatasetConfig(path=str(p), prompt_column="q", gold_column="a", tests_column="t", size=4))
        for p in (jsonl, parquet)
    ]
    assert loaded[0] == loaded[1]
    assert [(p.prompt_id, p.text, p.gold) for p in loaded[0]] == [
        (n, f"What is {n}+1?", str(n + 1)) for n in range(4)
    ]
    assert json.loads(loaded[0][2].tests) == {"inputs": [2]}


def test_gsm8k_is_read_as_it_is(test_data):
    prompts = load_prompts(DatasetConfig(path=str(test_data / "gsm8k" / "test.jsonl")))
    assert len(prompts) == 1319
    assert all(re.search(r"#### -?[\d,.]+$", prompt.gold) for prompt in prompts)
    assert "Janet" in prompts[0].text


def test_a_task_is_reproducible_and_its_gold_is_right():
    prompts = load_prompts(addition(3, 50))
    assert prompts == load_prompts(addition(3, 50))
    assert prompts != load_prompts(addition(4, 50))
    for prompt in prompts:
        a, b = map(int, re.fullmatch(r"Calculate (\d+) \+ (\d+)\.\n", prompt.text).groups())
        assert a + b == int(prompt.gold)


def test_held_out_prompts_are_never_trained_on():
    sets = load_prompt_sets(DataConfig(train=addition(1, 3000), heldout=addition(2, 300)))
    held = {prompt.text for prompt in sets.heldout}
    assert sets.num_removed > 0
    assert len(sets.train) + sets.num_removed == 3000
    assert not held & {prompt.text for prompt in sets.train}


def test_digest_changes_with_the_data():
    a = load_prompt_sets(DataConfig(train=addition(1, 20)))
    assert a.digest == load_prompt_sets(DataConfig(train=addition(1, 20))).digest
    assert a.digest != load_prompt_sets(DataConfig(train=addition(1, 21))).digest


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ('{"question": "a"}\n', {}, "row 0 .* has no column 'answer'"),
        ('{"question": "a", "answer": "b"}\n{broken\n', {}, "line 2 is not JSON"),
        ("[1, 2]\n", {}, "line 1 is not a JSON object"),
        ("", {}, "has no prompts"),
        (b"\xff\xfe\x00", {}, "not UTF-8"),
    ],
)
def test_bad_files_are_named_in_one_line(tmp_path, content, options, words):
    file = tmp_path / "data.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=words) as caught:
        load_prompts(DatasetConfig(path=str(file), **options))
    assert "\n" not in str(caught.value)


def test_missing_file_unknown_task_and_bad_options_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="data.train.path=.*absent.jsonl does not exist"):
        load_prompts(DatasetConfig(path=str(tmp_path / "absent.jsonl")))
    with pytest.raises(ConfigError, match="did you mean basic_arithmetic"):
        load_prompts(DatasetConfig(task="basic_arithmetics", size=1))
    with pytest.raises(ConfigError, match="task_options do not fit"):
        load_prompts(DatasetConfig(task="basic_arithmetic", size=1, task_options={"no_such": 1}))
    with pytest.raises(ConfigError, match="neither path nor task"):
        load_prompt_sets(DataConfig())
    file = tmp_path / "data.parquet"
    file.write_text("no parquet")
    with pytest.raises(ConfigError, match="not a readable Parquet"):
        load_prompts(DatasetConfig(path=str(file)))


def test_worked_examples_are_right_at_every_step():
    exclude = frozenset(PROMPT.format(a=a, b=50) for a in range(101))
    examples = worked_addition(5, 2000, exclude)
    assert examples == worked_addition(5, 2000, exclude)
    for example in examples:
        assert example["prompt"] not in exclude
        a, b = map(int, re.fullmatch(r"Calculate (\d+) \+ (\d+)\.\n", example["prompt"]).groups())
        *steps, box = example["response"].split("; ")
        assert box == rf"\boxed{{{a + b}}}"
        for step in steps:
            left, right = step.split("=")
            assert sum(map(Fraction, left.split("+"))) == int(right)
        assert len(steps) == 2


def test_slips_forget_carries_and_nothing_else():
    examples = worked_addition(6, 4000, slips=0.6)
    carries = forgotten = 0
    for example in examples:
        a, b = map(int, re.fullmatch(r"Calculate (\d+) \+ (\d+)\.\n", example["prompt"]).groups())
        answer = int(re.search(r"boxed\{(\d+)\}", example["response"]).group(1))
        if a % 10 + b % 10 < 10:
            assert answer == a + b
        else:
            carries += 1
            forgotten += answer == a + b - 10
            assert answer in (a + b, a + b - 10)
    assert abs(forgotten / carries - 0.6) < 0.05
