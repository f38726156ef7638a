"""Workflows over a scripted engine: masks, versions, budgets, tools, and import by path."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from areal_hpc.config.schema import Config, DataConfig
from areal_hpc.data.byte_tokenizer import END_ID, save_byte_tokenizer
from areal_hpc.rewards.service import RewardResult
from areal_hpc.rollout.engine import Generation, PromptTooLong
from areal_hpc.rollout.episode import EpisodeEngine, Services
from areal_hpc.rollout.tokens import PromptEncoder, load_tokenizer
from areal_hpc.rollout.workflow import MultiTurn, PythonTool, SingleTurn, load_workflow
from areal_hpc.types import PROMPT_VERSION, Prompt, SamplingSpec, Trajectory

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(folder)
    return load_tokenizer(str(folder))


class ScriptedEngine:
    """Answers with given texts in turn; token k of answer n has log-probability -(n + k/100)."""

    def __init__(self, encoder: PromptEncoder, texts: list[str], max_context: int) -> None:
        self.encoder, self.texts, self.max_context = encoder, list(texts), max_context
        self.calls: list[tuple[list[int], SamplingSpec, str, int]] = []

    async def generate(
        self, token_ids: list[int], sampling: SamplingSpec, request_id: str, seed: int, begun: Generation | None
    ) -> Generation:
        assert begun is None
        if len(token_ids) >= self.max_context or sampling.max_new_tokens < 1:
            raise PromptTooLong("full")
        number = len(self.calls)
        self.calls.append((list(token_ids), sampling, request_id, seed))
        ids = (self.encoder.text(self.texts[number]) + [END_ID])
        for stop in sampling.stop:
            if stop in self.texts[number]:
                end = self.texts[number].index(stop) + len(stop)
                ids = self.encoder.text(self.texts[number][:end])
        reason = "stop" if len(ids) <= sampling.max_new_tokens else "length"
        ids = ids[: sampling.max_new_tokens]
        return Generation(
            np.array(ids, np.int32),
            -(number + np.arange(len(ids)) / 100).astype(np.float32),
            np.full(len(ids), number, np.int32),
            reason,
        )


class ScriptedRewards:
    """1 where the gold text is in the answer; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], list[bool]]] = []

    async def score(self, prompt, responses, truncated):
        self.asked.append((list(responses), list(truncated)))
        return [RewardResult(v := float(prompt.gold in text), {"found": v}) for text in responses]


def run(workflow, tokenizer, texts, *, group_size=1, max_new_tokens=100, max_context=400, data=None):
    encoder = PromptEncoder(tokenizer, data or DataConfig())
    config = Config()
    config.model.max_context = max_context
    engine = ScriptedEngine(encoder, texts, max_context)
    rewards = ScriptedRewards()
    services = Services(config, engine, rewards, encoder)
    episode = EpisodeEngine(
        services,
        group_id=5,
        group_size=group_size,
        sampling=SamplingSpec(max_new_tokens=max_new_tokens),
        seed_parts=(0, "train", 5, 1),
        request_prefix="lease-1",
    )
    prompt = Prompt(prompt_id=9, text="Question? ", gold="42")
    trajectories = asyncio.run(workflow.arun_episode(episode, prompt))
    return trajectories, engine, rewards


def parts(trajectory: Trajectory, tokenizer) -> list[tuple[str, int]]:
    """Runs of equal loss_mask as (text, mask), with the invariants of every trajectory checked."""
    given = trajectory.loss_mask == 0
    assert (trajectory.versions[given] == PROMPT_VERSION).all()
    assert (trajectory.versions[~given] >= 0).all()
    assert (trajectory.rollout_logprobs[given] == 0).all()
    runs: list[tuple[list[int], int]] = []
    for token, mask in zip(trajectory.tokens.tolist(), trajectory.loss_mask.tolist()):
        if not runs or runs[-1][1] != mask:
            runs.append(([], mask))
        runs[-1][0].append(token)
    return [(tokenizer.decode(ids), mask) for ids, mask in runs]


def test_single_turn_scores_the_group_at_once(tokenizer):
    samples, engine, rewards = run(
        SingleTurn(), tokenizer, ["it is 42", "no", "x" * 200], group_size=3, max_new_tokens=20
    )
    assert [sample.sample_index for sample in samples] == [0, 1, 2]
    assert [sample.reward for sample in samples] == [1.0, 0.0, 0.0]
    assert rewards.asked == [(["it is 42", "no", "x" * 20], [False, False, True])]
    assert parts(samples[0], tokenizer) == [("Question? ", 0), ("it is 42<|endoftext|>", 1)]
    assert samples[0].reward_parts == {"found": 1.0}
    assert (samples[1].group_id, samples[1].prompt_id, samples[1].finish_reason) == (5, 9, "stop")
    assert samples[2].finish_reason == "length"
    assert len({seed for *_, seed in engine.calls}) == 3


def test_multi_turn_tries_again_after_a_wrong_answer(tokenizer):
    samples, engine, rewards = run(
        MultiTurn(max_turns=3, discount=0.5, feedback="Wrong."), tokenizer, ["41", "42"]
    )
    [sample] = samples
    assert parts(sample, tokenizer) == [
        ("Question? ", 0), ("41<|endoftext|>", 1), ("Wrong.", 0), ("42<|endoftext|>", 1),
    ]
    assert sample.reward == 0.5
    assert [asked for asked, _ in rewards.asked] == [["41"], ["42"]]
    # The second turn's prompt is exactly what the sequence holds, and its tokens keep their own values.
    assert engine.calls[1][0] == sample.tokens[: len(engine.calls[1][0])].tolist()
    second = sample.versions == 1
    np.testing.assert_allclose(sample.rollout_logprobs[second], -(1 + np.arange(3) / 100), rtol=1e-6)
    # One budget for the whole episode.
    assert engine.calls[1][1].max_new_tokens == 100 - 3


def test_multi_turn_stops_when_right_or_at_the_end(tokenizer):
    assert len(run(MultiTurn(max_turns=3), tokenizer, ["42"])[1].calls) == 1
    samples, engine, _ = run(MultiTurn(max_turns=2), tokenizer, ["1", "2", "3"])
    assert len(engine.calls) == 2 and samples[0].reward == 0.0


def test_multi_turn_leaves_no_observation_without_an_answer(tokenizer):
    samples, engine, _ = run(
        MultiTurn(max_turns=5, feedback="w" * 50), tokenizer, ["1" * 20] * 5, max_context=120
    )
    assert parts(samples[0], tokenizer)[-1][1] == 1
    assert len(engine.calls) == 2


def test_feedback_is_a_turn_of_the_conversation(tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE
    try:
        data = DataConfig(system_prompt="Be brief.")
        samples, _, _ = run(MultiTurn(feedback="Wrong."), tokenizer, ["41", "42"], data=data)
    finally:
        tokenizer.chat_template = None
    assert parts(samples[0], tokenizer) == [
        ("<system>Be brief.<|endoftext|><user>Question? <|endoftext|><assistant>", 0),
        ("41<|endoftext|>", 1),
        # The answer's own end is not repeated.
        ("<user>Wrong.<|endoftext|><assistant>", 0),
        ("42<|endoftext|>", 1),
    ]


def test_python_tool_runs_programs_and_shows_their_output(tokenizer):
    samples, engine, rewards = run(
        PythonTool(), tokenizer, ["Let me see <python>print(6 * 7)</python> ignored", "So it is 42."]
    )
    assert parts(samples[0], tokenizer) == [
        ("Question? ", 0),
        ("Let me see <python>print(6 * 7)</python>", 1),
        ("\n<output>\n42\n\n</output>\n", 0),
        ("So it is 42.<|endoftext|>", 1),
    ]
    # Only what the policy said after the output is scored: a printed gold answer pays nothing.
    assert rewards.asked == [(["So it is 42."], [False])]
    assert engine.calls[0][1].stop == ("</python>",)


def test_python_tool_shows_errors_and_ends(tokenizer):
    samples, engine, _ = run(
        PythonTool(max_calls=1), tokenizer, ["<python>1/0</python>", "<python>print(1)</python>"]
    )
    texts = parts(samples[0], tokenizer)
    assert "ZeroDivisionError" in texts[2][0]
    assert len(engine.calls) == 2 and texts[-1][1] == 1


def test_a_prompt_that_does_not_fit_is_the_prompts_fault(tokenizer):
    for workflow in (SingleTurn(), MultiTurn(), PythonTool()):
        with pytest.raises(PromptTooLong):
            run(workflow, tokenizer, ["42"], max_context=5, group_size=2)


def test_plain_prompts_are_encoded_as_the_tokenizer_does(tokenizer):
    encoder = PromptEncoder(tokenizer, DataConfig())
    assert encoder.prompt("a b") == tokenizer("a b").input_ids
    tokenizer.chat_template = CHAT_TEMPLATE
    try:
        assert PromptEncoder(tokenizer, DataConfig(chat_template=False)).prompt("a") == encoder.text("a")
    finally:
        tokenizer.chat_template = None


def test_workflows_by_name_and_path():
    assert isinstance(load_workflow("single_turn", {}), SingleTurn)
    assert isinstance(load_workflow("areal_hpc.rollout.workflow:MultiTurn", {"max_turns": 4}), MultiTurn)
    for name, options, words in (
        ("single_trun", {}, "did you mean single_turn"),
        ("multi_turn", {"turns": 3}, "rollout.workflow_options do not fit multi_turn"),
        ("areal_hpc.nothing:There", {}, "cannot be imported"),
        ("areal_hpc.rollout.workflow:load_workflow", {"name": "single_turn", "options": {}}, None),
        ("areal_hpc.rollout.episode:Transcript", {"prompt_ids": []}, "no method arun_episode"),
    ):
        if words is None:
            assert isinstance(load_workflow(name, options), SingleTurn)
        else:
            with pytest.raises(ValueError, match=words):
                load_workflow(name, options)
