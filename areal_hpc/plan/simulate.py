"""A discrete-event simulation of the asynchronous system, exact for its cost model.

An engine decodes one token of each of its m running sequences in
    base + per_sequence * m + per_kv_token * (tokens in its cache)
seconds. The cache grows by m tokens a step, so n steps take a closed-form time: the queue
holds one event per finished answer, none per token. Engines, trainer and publication
follow the run's own protocol: groups are granted while Eq. 3 and the engines' room allow, a
group is ready when its last answer is scored and committed, a batch takes the oldest ready
groups but waits for stragglers that would get too old, and engines stand still while new
weights arrive and are loaded. Deterministic by seed.

Called by `splits` and the tests; all times are seconds, all lengths tokens.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from areal_hpc.plan.lengths import Lengths
from areal_hpc.plan.system import Result, Step, System


@dataclass
class _Group:
    ordinal: int
    engine: int
    granted: int
    """Version that was live when it was granted."""
    left: int
    """Answers that are not finished."""
    started: list[int] = field(default_factory=list)
    """Version of the first token of each answer."""
    tokens: int = 0
    """Of the finished answers."""
    ready_at: float = 0.0


@dataclass
class _Engine:
    """`clock` is the time its state is true for; before it, it stands still (prefill, load)."""

    index: int
    clock: float = 0.0
    steps: float = 0.0
    """Decode steps done; a sequence of L tokens started at s ends at s + L."""
    kv: float = 0.0
    running: list[tuple[float, int, int]] = field(default_factory=list)
    """Heap of (step at which it ends, tokens, ordinal of its group)."""
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    groups: int = 0
    """Granted and not ready."""
    stamp: int = 0
    version: int = 0
    draining: bool = False
    scorer_free: float = 0.0
    busy_s: float = 0.0
    slot_s: float = 0.0
    tokens: float = 0.0


class Simulation:
    """`trace`, if given, receives (time, event, value) of all that the invariants speak of:
    admit (trajectories so far), train (step), trained (version), live (version)."""

    def __init__(
        self,
        system: System,
        lengths: Lengths,
        seed: int = 0,
        trace: list[tuple[float, str, int]] | None = None,
    ) -> None:
        if system.batch_size % system.group_size:
            raise ValueError(
                f"batch of {system.batch_size} is no multiple of the group size {system.group_size}"
            )
        self._system, self._rates, self._lengths = system, system.rates, lengths
        self._rng = np.random.default_rng(seed)
        self._trace = trace
        self._events: list[tuple[float, int, str, int, int]] = []
        self._num_events = 0
        self._engines = [_Engine(index) for index in range(system.num_engines)]
        self._groups: dict[int, _Group] = {}
        self._under_way: Counter[int] = Counter()
        """Groups by the version they were granted under."""
        self._ready: list[tuple[int, int, _Group]] = []
        self._ready_versions: Counter[int] = Counter()
        self._num_groups = self._admitted = 0
        self._trained_version = self._live_version = 0
        self._training = self._publishing = self._saving = False
        self._num_updating = 0
        self._steps: list[Step] = []
        self._train_busy_s = 0.0
        self._loading_version = self._target = 0
        self._now = 0.0

    def run(self, num_steps: int, warmup: int | None = None) -> Result:
        """Simulate until `num_steps` batches are trained; the first `warmup` are not counted.

        By default as many as it takes until batches hold answers of all lengths: short ones
        come first, and what eta admits ahead is over after eta steps.
        """
        self._target = num_steps
        self._grant(self._engines)
        handlers = {
            "finish": self._finish,
            "ready": self._group_ready,
            "trained": self._trained,
            "staged": self._staged,
            "updated": self._updated,
            "saved": self._saved,
        }
        while self._trained_version < num_steps:
            self._now, _, kind, index, stamp = heapq.heappop(self._events)
            handlers[kind](index, stamp)
        if warmup is None:
            warmup = min(2 * num_steps // 3, max(num_steps // 3, self._system.eta + 3))
        return self._result(warmup)

    # ---- admission -----------------------------------------------------------------

    def _may_admit(self) -> bool:
        """Whether Eq. 3 and the end of the run leave a place for one more group."""
        system, after = self._system, self._admitted + self._system.group_size
        if system.total_steps and after > system.total_steps * system.batch_size:
            return False
        return (after - 1) // system.batch_size <= self._live_version + system.eta

    def _grant(self, engines: list[_Engine]) -> None:
        """Give groups to the least loaded of `engines` while there are places and room."""
        if not self._may_admit():
            return
        room = self._system.room
        order = [(engine.groups, engine.index) for engine in engines
                 if engine.groups < room and not engine.draining]  # fmt: skip
        heapq.heapify(order)
        touched: dict[int, _Engine] = {}
        while order and self._may_admit():
            load, index = order[0]
            engine = self._engines[index]
            if index not in touched:
                self._advance(engine)
                touched[index] = engine
            self._admit(engine)
            if load + 1 < room:
                heapq.heapreplace(order, (load + 1, index))
            else:
                heapq.heappop(order)
        for engine in touched.values():
            self._fill(engine)
            self._schedule(engine)

    def _admit(self, engine: _Engine) -> None:
        size, ordinal = self._system.group_size, self._num_groups
        self._num_groups += 1
        self._groups[ordinal] = _Group(ordinal, engine.index, self._live_version, size)
        self._under_way[self._live_version] += 1
        engine.groups += 1
        engine.waiting.extend((length, ordinal) for length in self._lengths.sample(self._rng, size))
        # The prompt is computed once; the other answers of the group find it in the prefix cache.
        self._stall(engine, self._system.prompt_tokens / self._rates.prefill_tokens_s, busy=True)
        self._admitted += size
        self._note("admit", self._admitted)

    # ---- engines -------------------------------------------------------------------

    def _advance(self, engine: _Engine) -> None:
        """Decode up to now."""
        if engine.running and self._now > engine.clock:
            count, seconds = len(engine.running), self._now - engine.clock
            per_step = self._per_step(engine)
            growth = self._rates.decode_kv_s * count
            # Invert n * per_step + growth * n^2 / 2 = seconds without cancellation for small growth.
            steps = 2 * seconds / (per_step + math.sqrt(per_step**2 + 2 * growth * seconds))
            self._decode(engine, min(steps, engine.running[0][0] - engine.steps), seconds)
        engine.clock = max(engine.clock, self._now)

    def _per_step(self, engine: _Engine) -> float:
        rates = self._rates
        return rates.decode_base_s + rates.decode_seq_s * len(engine.running) + rates.decode_kv_s * engine.kv

    def _decode(self, engine: _Engine, steps: float, seconds: float) -> None:
        count = len(engine.running)
        engine.steps += steps
        engine.kv += steps * count
        engine.tokens += steps * count
        engine.busy_s += seconds
        engine.slot_s += seconds * count

    def _stall(self, engine: _Engine, seconds: float, *, busy: bool) -> None:
        engine.clock = max(engine.clock, self._now) + seconds
        if busy:
            engine.busy_s += seconds

    def _fill(self, engine: _Engine) -> None:
        """Start waiting sequences while there are slots and the engine serves."""
        while not engine.draining and engine.waiting and len(engine.running) < self._system.slots:
            length, ordinal = engine.waiting.popleft()
            heapq.heappush(engine.running, (engine.steps + length, length, ordinal))
            self._groups[ordinal].started.append(engine.version)
            engine.kv += self._system.prompt_tokens

    def _schedule(self, engine: _Engine) -> None:
        """Queue the next end of an answer; a later change makes the event stale by its stamp."""
        engine.stamp += 1
        if engine.running:
            count = len(engine.running)
            steps = engine.running[0][0] - engine.steps
            seconds = steps * self._per_step(engine) + self._rates.decode_kv_s * count * steps**2 / 2
            self._push(engine.clock + seconds, "finish", engine.index, engine.stamp)

    def _finish(self, index: int, stamp: int) -> None:
        """The shortest running answer of an engine ends (and any that ends with it)."""
        engine = self._engines[index]
        if stamp != engine.stamp:
            return
        end = engine.running[0][0]
        self._decode(engine, end - engine.steps, self._now - engine.clock)
        engine.steps, engine.clock = end, self._now
        while engine.running and engine.running[0][0] <= end + 1e-6:
            _, length, ordinal = heapq.heappop(engine.running)
            engine.kv -= length + self._system.prompt_tokens
            self._score(engine, self._groups[ordinal], length)
        if not engine.running:
            engine.kv = 0.0
        self._fill(engine)
        if engine.draining and not engine.running:
            self._load(engine)
        else:
            self._schedule(engine)

    def _score(self, engine: _Engine, group: _Group, length: int) -> None:
        """Queue an answer at the engine's reward pool; the last one makes the group ready."""
        rates = self._rates
        share = rates.reward_s / rates.reward_workers
        engine.scorer_free = max(engine.scorer_free, self._now) + share
        group.ready_at = max(group.ready_at, engine.scorer_free + rates.reward_s - share)
        group.tokens += length
        group.left -= 1
        if not group.left:
            self._push(group.ready_at + rates.commit_s, "ready", group.ordinal)

    # ---- trainer -------------------------------------------------------------------

    def _group_ready(self, ordinal: int, _: int) -> None:
        group = self._groups.pop(ordinal)
        self._under_way[group.granted] -= 1
        oldest = min(group.started)
        heapq.heappush(self._ready, (oldest, ordinal, group))
        self._ready_versions[oldest] += 1
        engine = self._engines[group.engine]
        engine.groups -= 1
        self._form_batch()
        self._grant([engine])

    def _form_batch(self) -> None:
        """Train on the oldest ready groups if there are enough and the trainer is free."""
        system, version = self._system, self._trained_version
        needed = system.batch_size // system.group_size
        busy = self._training or self._saving or (system.trainer_waits and self._publishing)
        if busy or version == self._target or len(self._ready) < needed:
            return
        if system.bounded and self._must_wait(needed):
            return
        batch = [heapq.heappop(self._ready)[2] for _ in range(needed)]
        self._ready_versions -= Counter(min(group.started) for group in batch)
        tokens = sum(group.tokens for group in batch)
        ages = [version - started for group in batch for started in group.started]
        seconds = (
            self._rates.train_step_s
            + (tokens + system.batch_size * system.prompt_tokens) / self._rates.train_tokens_s
        )
        self._steps.append(Step(self._now, self._now + seconds, tokens, sum(ages), max(ages)))
        self._training = True
        self._note("train", len(self._steps))
        self._push(self._now + seconds, "trained")

    def _must_wait(self, needed: int) -> bool:
        """Whether a batch now would leave a group that no later batch could take within eta.

        Groups of versions up to m have to be in batches trained from versions up to m + eta.
        """
        version, eta = self._trained_version, self._system.eta
        in_batch = waiting = 0
        for bound in sorted({*self._ready_versions, *self._under_way}):
            in_batch += self._ready_versions[bound]
            waiting += self._under_way[bound]
            if in_batch >= needed:
                return False
            if waiting and -(-waiting // needed) > bound + eta - version:
                return True
        return False

    def _trained(self, *_: int) -> None:
        self._training = False
        self._train_busy_s += self._steps[-1].end - self._steps[-1].start
        self._trained_version += 1
        self._note("trained", self._trained_version)
        if not self._publishing:
            self._publish()
        self._form_batch()

    def _saved(self, *_: int) -> None:
        self._saving = False
        self._form_batch()

    # ---- publication ---------------------------------------------------------------

    def _publish(self) -> None:
        self._publishing = True
        self._push(self._now + self._rates.stage_s, "staged", self._trained_version)

    def _staged(self, version: int, _: int) -> None:
        """The new weights are ready for the engines: interrupt or drain them, and load."""
        self._num_updating = len(self._engines)
        self._loading_version = version
        for engine in self._engines:
            self._advance(engine)
            engine.draining = True
            if not self._system.drain or not engine.running:
                self._load(engine)

    def _load(self, engine: _Engine) -> None:
        engine.stamp += 1  # no answer ends before the engine serves again
        self._stall(engine, self._rates.load_s, busy=False)
        self._push(engine.clock, "updated", engine.index)

    def _updated(self, index: int, _: int) -> None:
        engine = self._engines[index]
        self._num_updating -= 1
        if not self._system.resume_together:
            self._serve(engine)
            self._grant([engine])
        if self._num_updating:
            return
        if self._system.resume_together:
            for engine in self._engines:
                self._serve(engine)
        self._live_version = self._loading_version
        self._publishing = False
        self._note("live", self._live_version)
        self._grant(self._engines)
        if self._live_version < self._trained_version:
            self._publish()
        every = self._system.checkpoint_every
        if every and self._live_version % every == 0:
            self._saving = True
            self._push(self._now + self._rates.checkpoint_s, "saved")
        self._form_batch()

    def _serve(self, engine: _Engine) -> None:
        """Go on under the new weights; interrupted answers have their cache computed again."""
        engine.draining = False
        engine.version = self._loading_version
        engine.clock = max(engine.clock, self._now)
        if self._system.recompute_kv:
            self._stall(engine, engine.kv / self._rates.prefill_tokens_s, busy=True)
        self._fill(engine)
        self._schedule(engine)

    # ---- bookkeeping ---------------------------------------------------------------

    def _push(self, time: float, kind: str, index: int = 0, stamp: int = 0) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, kind, index, stamp))

    def _note(self, event: str, value: int) -> None:
        if self._trace is not None:
            self._trace.append((self._now, event, value))

    def _result(self, warmup: int) -> Result:
        for engine in self._engines:
            self._advance(engine)
        unused = sum(
            length - (end - engine.steps) for engine in self._engines for end, length, _ in engine.running
        )
        unused += sum(group.tokens for group in self._groups.values()) + sum(
            group.tokens for _, _, group in self._ready
        )
        # The last prefill may reach beyond the end.
        busy = sum(engine.busy_s - max(0.0, engine.clock - self._now) for engine in self._engines)
        engine_seconds = self._now * len(self._engines)
        return Result(
            steps=self._steps,
            warmup=warmup,
            batch_size=self._system.batch_size,
            mean_tokens=self._lengths.mean,
            generated_tokens=sum(engine.tokens for engine in self._engines),
            unused_tokens=unused,
            trainer_busy=self._train_busy_s / self._now,
            rollout_busy=max(0.0, busy) / engine_seconds,
            slots_filled=sum(engine.slot_s for engine in self._engines) / engine_seconds / self._system.slots,
        )
