"""The rollout rank with a real engine: interruption, weights, sampling, failures.

One engine serves most of these tests, in order; the last ones kill it. The oracle for
tokens is transformers with the weights of the token's own version.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from rollout_harness import (
    SECOND_END_ID,
    Director,
    directing,
    make_config,
    make_model,
    reference_logprobs,
    shake,
)

from areal_hpc.config.schema import KvOnUpdate, OnUpdate
from areal_hpc.messages import (
    Drain,
    Drained,
    EngineRestarted,
    EvalRequest,
    EvalResult,
    LeaseFailed,
    RolloutStatus,
    ShardReady,
    UnfinishedSaved,
)
from areal_hpc.rollout.generation import Generation
from areal_hpc.rollout.supervisor import EngineFailures
from areal_hpc.rollout.tokens import load_tokenizer
from areal_hpc.rollout.unfinished import Turn, to_rows
from areal_hpc.spool.shard import ShardWriter, read_rows
from areal_hpc.types import Begun, Lease, Prompt, SamplingSpec, Trajectory, unfinished_run_id
from areal_hpc.weights.transfer import Publication, PublishError, TrainerWeights

TOLERANCE = 1e-3
LONG_PROMPT = "A prompt that fills more than one block of the cache. " * 8


class Stack:
    """The shared engine, its trainer, and the weights of every version that was published."""

    def __init__(self, director: Director, model: torch.nn.Module) -> None:
        self.director = director
        self.models = {0: copy.deepcopy(model)}
        self.policy = model
        self.export_error_after: int | None = None
        self.trainer: TrainerWeights = director.trainer(model, self._export)

    def _export(self) -> Iterator[tuple[str, torch.Tensor]]:
        for count, (name, parameter) in enumerate(self.policy.named_parameters()):
            if count == self.export_error_after:
                raise RuntimeError("the export broke")
            yield name, parameter.data

    @property
    def version(self) -> int:
        return max(self.models)

    def step(self, scale: float = 0.02) -> int:
        """Change the policy as a training step would; the version it will have."""
        shake(self.policy, 100 + self.version, scale)
        return self.version + 1

    def publish(self, version: int) -> dict[str, float]:
        timings = self.trainer.publish(version)
        self.models[version] = copy.deepcopy(self.policy)
        return timings

    def check(self, samples: list[Trajectory], temperature: float = 1.0) -> set[int]:
        """Every token has transformers' log-probability under its version's weights; the versions seen."""
        seen: set[int] = set()
        for sample in samples:
            for version in np.unique(sample.versions[sample.loss_mask > 0]).tolist():
                chosen = sample.versions == version
                expected = reference_logprobs(self.models[version], sample, temperature).numpy()
                np.testing.assert_allclose(
                    sample.rollout_logprobs[chosen], expected[chosen], atol=TOLERANCE, rtol=0
                )
                seen.add(version)
            assert (sample.versions[sample.loss_mask == 0] == -1).all()
        return seen


@pytest.fixture(scope="module")
def stack(tmp_path_factory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("rollout")
    model = make_model(root / "model")
    config = make_config(
        root / "model",
        rollout__hang_deadline_s=8.0,
        rollout__shard_latency_s=0.05,
        weights__bucket_bytes=100_003,
        rewards__fn="math",
    )
    with directing(config, root / "run") as director:
        yield Stack(director, model)


def answer(stack: Stack, texts: list[str], sampling: SamplingSpec, **options) -> list[Trajectory]:
    leases = stack.director.grant(texts, sampling, **options)
    return [sample for group in stack.director.collect(leases).values() for sample in group]


def publish_after(stack: Stack, num_tokens: int) -> int:
    """Publish a changed policy once the engine has produced that many more tokens."""
    gauges = stack.director.engines[0].gauges
    start = gauges.generated_tokens
    version = stack.step()
    stack.director.wait_until(
        lambda: gauges.generated_tokens - start >= num_tokens, f"{num_tokens} tokens"
    )
    stack.publish(version)
    return version


def long_spec(**changes) -> SamplingSpec:
    return SamplingSpec(**{"max_new_tokens": 100, "temperature": 1.0, **changes})


def test_log_probabilities_are_those_of_the_sampled_distribution(stack):
    samples = answer(stack, ["1+1=", "2+3="], long_spec(temperature=0.7), group_size=4)
    assert len(samples) == 8
    assert stack.check(samples, temperature=0.7) == {0}


def test_interrupted_answers_go_on_under_the_new_weights(stack):
    texts = [f"{i}+{i}=" for i in range(8)]
    leases = stack.director.grant(texts, long_spec(), group_size=2)
    version = publish_after(stack, 60 * 6)
    samples = [s for group in stack.director.collect(leases).values() for s in group]
    assert stack.check(samples) == {version - 1, version}
    crossed = [s for s in samples if len(np.unique(s.versions[s.loss_mask > 0])) == 2]
    assert crossed
    for sample in samples:
        # Budget carried over: never more than the limit, and exactly the limit where it says so.
        assert sample.num_loss_tokens <= 100
        assert (sample.finish_reason == "length") == (sample.num_loss_tokens == 100) or (
            sample.tokens[-1] >= 256
        )
        generated = sample.versions[sample.loss_mask > 0]
        assert (np.diff(generated) >= 0).all()


def test_stale_kv_is_what_the_recomputation_avoids(stack):
    """kv_on_update: keep is there for comparison; the oracle must see the difference."""
    rollout = stack.director.config.rollout
    rollout.kv_on_update = KvOnUpdate.keep
    try:
        leases = stack.director.grant([f"{i}*{i}=" for i in range(8)], long_spec(), group_size=2)
        publish_after(stack, 60 * 6)
        samples = [s for group in stack.director.collect(leases).values() for s in group]
    finally:
        rollout.kv_on_update = KvOnUpdate.recompute
    crossed = [s for s in samples if len(np.unique(s.versions[s.loss_mask > 0])) == 2]
    with pytest.raises(AssertionError):
        stack.check(crossed)


@pytest.mark.parametrize("mode", [OnUpdate.drain, OnUpdate.abort_and_resubmit])
def test_other_ways_to_update(stack, mode):
    rollout = stack.director.config.rollout
    rollout.on_update = mode
    try:
        leases = stack.director.grant([f"{i}-{i}=" for i in range(4)], long_spec(), group_size=2)
        version = publish_after(stack, 100)
        samples = [s for group in stack.director.collect(leases).values() for s in group]
    finally:
        rollout.on_update = OnUpdate.interrupt
    versions = stack.check(samples)
    assert all(sample.num_loss_tokens <= 100 for sample in samples)
    # Draining lets every answer finish under the version it began with.
    assert versions == ({version - 1} if mode is OnUpdate.drain else {version - 1, version})


def test_an_export_that_breaks_publishes_nothing(stack):
    version = stack.step()
    stack.export_error_after = 7
    with pytest.raises(PublishError, match="the export broke"):
        stack.trainer.publish(version)
    stack.export_error_after = None
    # The old version serves on ...
    assert stack.check(answer(stack, ["3+4="], long_spec(), group_size=4)) == {version - 1}
    # ... and the retry, over a new connection, is a full one.
    stack.publish(version)
    assert stack.check(answer(stack, ["3+4="], long_spec(), group_size=4)) == {version}


def test_training_may_go_on_while_a_copy_is_published(stack):
    """weights.overlap: what is served is the policy of the moment, not what training made of it since."""
    version = stack.step()
    client = stack.trainer._client
    offer = client.offer

    def fail_once(version: int) -> bool:
        client.offer = offer
        raise RuntimeError("the first attempt fails")

    client.offer = fail_once
    stack.trainer.begin(version)
    stack.models[version] = copy.deepcopy(stack.policy)
    shake(stack.policy, 7, 0.02)
    publication = _finish(stack)
    assert "the first attempt fails" in publication.error and publication.version == version
    # The retry sends the same copy.
    stack.trainer.begin(version)
    assert not _finish(stack).error
    assert stack.check(answer(stack, ["3+9="], long_spec(), group_size=4)) == {version}
    stack.publish(version + 1)


def _finish(stack: Stack) -> Publication:
    found: list[Publication] = []

    def look() -> bool:
        found.extend(filter(None, [stack.trainer.finished()]))
        return bool(found)

    stack.director.wait_until(look, "the publication")
    return found[0]


def test_chunks_may_cut_tensors_anywhere(stack):
    """The same weights in odd little buckets and in one piece give the same bits."""
    found = {}
    version = stack.step()
    for bucket_bytes in (4_099, 1 << 26):
        stack.director.config.weights.bucket_bytes = bucket_bytes
        stack.trainer.close()
        stack.trainer = stack.director.trainer(stack.policy, stack._export)
        stack.publish(version)
        [sample] = answer(stack, ["9+9="], long_spec(seed=5), first_group=900)
        found[bucket_bytes] = sample
        version += 1
    one, other = found.values()
    assert stack.check([one, other]) == {version - 2, version - 1}
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.rollout_logprobs, other.rollout_logprobs)


def test_nucleus_and_top_k(stack):
    model = stack.models[stack.version]
    for options in ({"top_p": 0.7}, {"top_k": 5}):
        samples = answer(stack, ["5+5="], long_spec(max_new_tokens=40, **options), group_size=4)
        for sample in samples:
            tokens = torch.tensor(sample.tokens, dtype=torch.long)
            with torch.no_grad():
                probabilities = torch.softmax(model(tokens[None]).logits[0].float(), -1)
            for position in np.flatnonzero(sample.loss_mask):
                row = probabilities[position - 1]
                ranked, order = row.sort(descending=True)
                before = ranked.cumsum(0) - ranked
                kept = order[before < options["top_p"]] if "top_p" in options else order[:5]
                assert tokens[position] in kept
                expected = torch.log(row[tokens[position]] / row[kept].sum())
                assert abs(expected - sample.rollout_logprobs[position]) < TOLERANCE


def test_answers_end_at_any_end_token_and_at_stop_strings(stack):
    samples = answer(stack, ["7+7="], long_spec(max_new_tokens=300), group_size=24)
    ends = {256, SECOND_END_ID}
    for sample in samples:
        generated = sample.tokens[sample.loss_mask > 0].tolist()
        assert not ends & set(generated[:-1])
        assert (sample.finish_reason == "stop") == (generated[-1] in ends)
    assert {s.tokens[-1] for s in samples if s.finish_reason == "stop"} == ends
    # A printable token that the first run shows to be common ends the second one.
    tokenizer = load_tokenizer(stack.director.config.model.path)
    common = np.bincount(np.concatenate([s.tokens[s.loss_mask > 0] for s in samples])).argsort()[::-1]
    letter, text = next((int(t), tokenizer.decode([t])) for t in common if tokenizer.decode([t]).isalnum())
    for options in ({"stop": (text,)}, {"stop_token_ids": (letter,)}):
        stopped = answer(stack, ["7+7="], long_spec(max_new_tokens=300, **options), group_size=24)
        generated = [s.tokens[s.loss_mask > 0].tolist() for s in stopped]
        assert any(letter in tokens for tokens in generated)
        assert all(letter not in tokens[:-1] for tokens in generated)
        stack.check(stopped)


def test_seeds_follow_group_sample_and_attempt(stack):
    def tokens(group: int, attempt: int) -> list[list[int]]:
        samples = answer(
            stack, ["8+1="], long_spec(max_new_tokens=30), group_size=3, first_group=group, attempt=attempt
        )
        return [sample.tokens.tolist() for sample in samples]

    first = tokens(501, 1)
    assert tokens(501, 1) == first
    assert len({tuple(sample) for sample in first}) == 3
    others = tokens(501, 2) + tokens(502, 1)
    assert len({tuple(sample) for sample in first + others}) == 9


def test_a_group_shares_its_prompt(stack):
    before = _status(stack)
    answer(stack, [LONG_PROMPT + "?"], long_spec(max_new_tokens=4), group_size=8)
    after = _status(stack)
    asked = after["prompt_tokens"] - before["prompt_tokens"]
    cached = after["cached_prompt_tokens"] - before["cached_prompt_tokens"]
    assert asked >= 8 * len(LONG_PROMPT)
    assert cached >= 7 * 0.7 * len(LONG_PROMPT)


def _status(stack: Stack) -> dict[str, float]:
    for _ in range(2):  # the first may have been on its way before
        stack.director.wait_for(RolloutStatus)
    while True:
        try:
            status = stack.director.channel.receive(RolloutStatus, 0.0, "status").message
        except TimeoutError:
            return stack.director.wait_for(RolloutStatus).counters


def test_prompts_that_cannot_be_answered_fail_for_good(stack):
    for options, reason in (
        ({"texts": ["x" * 600]}, "max_context"),
        ({"texts": ["?"], "gold": "\\frac{"}, "gold"),
    ):
        [lease] = stack.director.grant(sampling=long_spec(), **options)
        failed = stack.director.wait_for(LeaseFailed)
        assert failed.lease_id == lease and not failed.retry
        assert reason in failed.reason


def test_an_unfinished_answer_goes_on_under_the_weights_that_serve_now(stack):
    """What an earlier attempt left comes back token by token, and the rest is the new weights'."""
    before = answer(stack, ["7+8="], long_spec(), group_size=4)
    version = stack.step()
    stack.publish(version)
    left = {
        (sample.sample_index, 0): Turn(
            sample.tokens[: start[0]].tolist(),
            Generation(
                *(values[start[0] :][: 5 + 9 * sample.sample_index] for values in (
                    sample.tokens, sample.rollout_logprobs, sample.versions)), "abort",
            ),
        )
        for sample in before if (start := np.flatnonzero(sample.loss_mask)).size > 40 and sample.sample_index != 3
    }  # fmt: skip
    assert left
    paths, name = stack.director.paths, stack.director.config.run.name
    prompt = Prompt(prompt_id=before[0].prompt_id, text="7+8=", gold="7")
    lease = Lease(1, before[0].group_id, 0, 1, 4, prompt, long_spec())
    info = ShardWriter(paths.unfinished(0), unfinished_run_id(name), 0).commit(to_rows(left, lease))
    begun = Begun(paths.relative(info.path), tuple(range(len(left))))
    after = answer(stack, ["7+8="], long_spec(), group_size=4, first_group=before[0].group_id, begun=begun)
    assert stack.check(after) == {version - 1, version}
    for sample in after:
        turn = left.get((sample.sample_index, 0))
        old = 0 if turn is None else len(turn.generation.token_ids)
        start = int(np.flatnonzero(sample.loss_mask)[0])
        if turn is not None:
            np.testing.assert_array_equal(sample.tokens[start:][:old], turn.generation.token_ids)
            np.testing.assert_array_equal(sample.rollout_logprobs[start:][:old], turn.generation.logprobs)
        assert (sample.versions[start:][:old] == version - 1).all() and (sample.versions[start:][old:] == version).all()
        assert old < sample.num_loss_tokens <= 100


def test_evaluation_runs_between_other_requests_at_one_version(stack):
    leases = stack.director.grant(["6+6="], long_spec(), group_size=8)
    prompts = tuple(Prompt(prompt_id=i, text=f"{i}+1=", gold=str(i + 1)) for i in range(3))
    greedy = SamplingSpec(max_new_tokens=20, temperature=0.0)
    stack.director.channel.send(2, EvalRequest(1, stack.version, 2, prompts, greedy))
    result = stack.director.wait_for(EvalResult)
    answered = [(sample.prompt_id, sample.sample_index) for sample in result.samples]
    assert answered == [(prompt, index) for prompt in range(3) for index in (0, 1)]
    assert {sample.version for sample in result.samples} == {stack.version}
    assert result.samples[0].text == result.samples[1].text
    model = stack.models[stack.version]
    stack.director.collect(leases)
    tokenizer = load_tokenizer(stack.director.config.model.path)
    tokens = torch.tensor([tokenizer("0+1=").input_ids])
    expected = model.generate(tokens, max_new_tokens=20, do_sample=False)[0, tokens.shape[1] :]
    assert result.samples[0].text == tokenizer.decode(expected, skip_special_tokens=True)


def test_signals_of_the_scheduler_do_not_reach_the_engine(stack):
    for pid in stack.director.engines[0].pids:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            os.kill(pid, number)
    assert len(answer(stack, ["1+2="], long_spec(), group_size=2)) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_hangs_is_replaced(stack, number):
    """Every prompt is answered in the end, under the weights that were live."""
    director = stack.director
    texts = [f"{i}+7=" for i in range(6)]
    leases = director.grant(texts, long_spec(max_new_tokens=400), group_size=4)
    gauges = director.engines[0].gauges
    start = gauges.generated_tokens
    director.wait_until(lambda: gauges.generated_tokens > start + 100, "generation")
    os.kill(director.engines[0].pids[-1], number)
    done, lost = _collect_or_lose(director, leases)
    assert lost
    again = director.grant(texts[: len(lost)], long_spec(), group_size=4, attempt=2)
    samples = done + [s for group in director.collect(again).values() for s in group]
    assert stack.check(samples) == {stack.version}
    # The trainer's connection went with the old engine: the next publication makes a new one.
    stack.publish(stack.step())
    assert stack.check(answer(stack, ["2+2="], long_spec(), group_size=2)) == {stack.version}


def _collect_or_lose(director: Director, leases: list[int]) -> tuple[list[Trajectory], list[int]]:
    done: list[Trajectory] = []
    while True:
        message = director.wait_for(ShardReady, EngineRestarted, deadline_s=240.0)
        if isinstance(message, EngineRestarted):
            assert set(message.lost_leases) <= set(leases)
            return done, list(message.lost_leases)
        done += read_rows(director.paths.resolve_inside(message.path))


def test_a_drain_commits_what_is_done_and_names_the_rest(stack):
    director = stack.director
    short = director.grant(["1+1="], long_spec(max_new_tokens=2), group_size=2)
    director.collect(short)
    leases = director.grant(["1+1=", "2+2="], long_spec(max_new_tokens=450), group_size=8)
    gauges = director.engines[0].gauges
    start = gauges.generated_tokens
    director.wait_until(lambda: gauges.generated_tokens > start + 20, "generation")
    director.channel.send(2, Drain(abandon=True, reason="test", keep=True))
    kept = director.wait_for(UnfinishedSaved, deadline_s=30.0)
    assert director.wait_for(Drained, deadline_s=10.0).unfinished_leases == tuple(leases)
    rows = read_rows(
        director.paths.resolve_inside(kept.path), run_id=unfinished_run_id(director.config.run.name), verify=True
    )
    # Every answer that was under way, with the tokens it had, is that of the weights that served.
    assert {(row.group_id, row.sample_index) for row in rows} == {(g, s) for g in leases for s in range(8)}
    assert sum(row.num_loss_tokens for row in rows) >= 20 and any(row.finish_reason == "abort" for row in rows)
    assert stack.check(rows) == {stack.version}
    [late] = director.grant(["1+1="], long_spec())
    failed = director.wait_for(LeaseFailed)
    assert failed.lease_id == late and failed.retry


def test_too_many_failures_end_the_run_with_the_engines_last_words(stack):
    director = stack.director
    with open(director.paths.engine_log(0), "a", encoding="utf-8") as log:
        log.write("the last words of the engine\n")
    os.kill(director.engines[0].pids[0], signal.SIGKILL)
    with pytest.raises(EngineFailures, match="failed 3 times.*\n(.*\n)*the last words of the engine"):
        director.wait_for(EngineRestarted, deadline_s=60.0)
