"""The byte stream of a publication, its control calls, its export and its ends (imports vLLM, starts nothing)."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.config.schema import Config, WeightBackend
from areal_hpc.messages import WeightReturn
from areal_hpc.mpi.channel import LocalNetwork
from areal_hpc.mpi.world import World
from areal_hpc.paths import RunPaths
from areal_hpc.telemetry import Telemetry
from areal_hpc.weights import nccl
from areal_hpc.weights.client import RolloutClient, RolloutError
from areal_hpc.weights.gloo import (
    BucketGroup,
    GlooTrainerEngine,
    GlooTrainerInitInfo,
    _joined_key,
    buckets,
    lay_aside,
)
from areal_hpc.weights.source import ALIGNMENT, ExportSource, Layout, describe_metadata
from areal_hpc.weights.stage import CONTROL_BYTES, Stage, TransferControl
from areal_hpc.weights.staged import StagedUpdateInfo, TransferCancelled
from areal_hpc.weights.transfer import PublishError, TrainerWeights
from areal_hpc.weights.watch import TransferStuck, run_watched

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64)


def make_tensors(shapes: list[tuple[list[int], int]]) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (f"layer.{index}", (torch.randn(shape, generator=generator) * 50).to(DTYPES[kind]))
        for index, (shape, kind) in enumerate(shapes)
    ]


def make_source(tensors: list[tuple[str, torch.Tensor]]) -> ExportSource:
    return ExportSource(
        lambda: [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors],
        lambda: iter(tensors),
    )


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=3), st.integers(0, len(DTYPES) - 1)), max_size=12
    ),
    st.integers(1, 700),
)
@settings(max_examples=150, deadline=None)
def test_every_bucket_size_gives_the_same_bits(shapes, bucket_bytes):
    tensors = make_tensors(shapes)
    source = make_source(tensors)
    layout = Layout.of(**describe_metadata(source.metadata()))
    # Buffers are used again: a receiver copies each bucket as it comes.
    received = [bucket.clone() for bucket in buckets(source, layout, bucket_bytes)]
    assert all(bucket.numel() == bucket_bytes for bucket in received[:-1])
    stream = torch.cat(received) if received else torch.empty(0, dtype=torch.uint8)
    assert stream.numel() == layout.total_bytes
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    for (name, tensor), (found_name, found) in zip(tensors, layout.views(stream), strict=True):
        assert name == found_name and tensor.dtype == found.dtype and tensor.shape == found.shape
        assert torch.equal(tensor.view(-1).view(torch.uint8), found.reshape(-1).view(torch.uint8))


def test_an_export_must_keep_its_word():
    tensors = make_tensors([([2, 3], 0), ([4], 1)])
    metadata = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
    for brought, words in (
        (tensors[::-1], "layer.1"),
        (tensors[:1], "ended before"),
        ([*tensors, tensors[0]], "declares None"),
        ([tensors[0], ("layer.1", tensors[1][1].float())], "float32"),
    ):
        with pytest.raises(ValueError, match=words):
            list(ExportSource(lambda: metadata, lambda brought=brought: iter(brought)))


def recorded(tensors):
    """(names of the tensors that were asked for so far, an export of all of them)."""
    seen = []

    def export():
        for pair in tensors:
            seen.append(pair[0])
            yield pair

    return seen, export


def test_a_pass_that_was_begun_is_run_to_its_end():
    """The other trainer ranks are in the same collectives."""
    tensors = make_tensors([([2], 0)] * 5)
    seen, export = recorded(tensors)

    source = ExportSource(lambda: [(n, t.dtype, tuple(t.shape)) for n, t in tensors], export)
    for stop_after in (0, 2, 5):
        seen.clear()
        source.begin_publication()
        passes = iter(source)
        for _ in range(stop_after):
            next(passes)
        source.drain()
        assert seen == [name for name, _ in tensors]


class Rollouts:
    """Rollout ranks that answer the lead's weight calls from a script, in a thread."""

    def __init__(self, network: LocalNetwork, answer, lead: int = 0) -> None:
        self._lead = lead
        self._channels = {rank: network.channel(rank) for rank in (lead + 1, lead + 2)}
        self._answer = answer
        self.calls: list[tuple[int, str, dict]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stopped.wait(0.001):
            for rank, channel in self._channels.items():
                for _, call in channel.poll():
                    payload = json.loads(call.payload)
                    self.calls.append((rank, call.method, payload))
                    for result, error, call_id in self._answer(rank, call.method, payload):
                        number = call_id or call.call_id
                        channel.send(self._lead, WeightReturn(number, 0, json.dumps(result), error))

    def __enter__(self) -> Rollouts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()


def make_client(network: LocalNetwork, timeout_s: float = 5.0, members: int = 1) -> RolloutClient:
    return RolloutClient(
        network.channel(0), (1, 2), "rank {}".format, timeout_s=timeout_s, members_per_engine=members
    )


def test_all_ranks_are_called_and_know_their_place():
    network = LocalNetwork(3)
    client = make_client(network, members=4)
    with Rollouts(network, lambda rank, method, payload: [({"connected": rank}, "", None)]) as rollouts:
        client.init_weight_transfer_engine({"port": 5})
        assert client.offer(7)
        client.update_weights({"names": []})
        client.finish_weight_update()
    assert [(rank, method) for rank, method, _ in rollouts.calls[:2]] == [
        (1, "init_weight_transfer_engine"),
        (2, "init_weight_transfer_engine"),
    ]
    assert [payload["rank_offset"] for _, _, payload in rollouts.calls[:2]] == [1, 5]
    assert rollouts.calls[-1][2] == {"version": 7}


def test_the_rank_that_does_not_answer_is_named():
    network = LocalNetwork(3)
    with Rollouts(network, lambda rank, *_: [({}, "", None)] if rank == 1 else []):
        with pytest.raises(TimeoutError, match="finish_weight_update from rank 2$"):
            make_client(network, timeout_s=0.2).finish_weight_update()


def test_an_error_comes_at_once_and_old_answers_are_dropped():
    network = LocalNetwork(3)
    client = make_client(network, timeout_s=30.0)

    def answer(rank: int, method: str, payload: dict) -> list[tuple[dict, str, int | None]]:
        if method == "abandon":
            # A late answer to the call before, and then the true one.
            return [({}, "too late", 1), ({}, "", None)]
        return [({}, "no memory", None)] if rank == 2 else []

    with Rollouts(network, answer):
        with pytest.raises(RolloutError, match="update_weights failed on rank 2: no memory"):
            client.update_weights({"names": []})
        client.abandon()


def test_a_call_that_was_given_up_ends_its_waiter():
    network = LocalNetwork(3)
    client = make_client(network)
    call = client.begin("update_weights", {})
    client.begin("abandon", {})
    with pytest.raises(RolloutError, match="given up"):
        client.gather(call)


# -- ends of transfers that do not come to their own -------------------------------------


def test_the_engine_that_does_not_take_its_buckets_is_named():
    """Its rank lives and waits like the others, and would give up at the same time."""
    source = make_source(make_tensors([([500], 0)] * 6))
    layout = Layout.of(**describe_metadata(source.metadata()))
    network = LocalNetwork(3)
    client = make_client(network)
    over = threading.Event()

    def engine(info: dict, num_buckets: int) -> None:
        store = torch.distributed.TCPStore(info["host"], info["port"], is_master=False, timeout=timedelta(seconds=9))
        store.set(_joined_key(info["prefix"], info["rank_offset"]), "")
        group = BucketGroup(store, info["prefix"], info["rank_offset"], 3, 9.0)

        def give_up() -> None:
            if over.is_set():
                raise TransferCancelled

        with suppress(RuntimeError):  # cancelled, or the trainer's end is closed by then
            for start in range(0, 1000 * num_buckets, 1000):
                group.broadcast(torch.empty(min(1000, layout.total_bytes - start), dtype=torch.uint8), give_up)
            group.finish(give_up)
        over.wait()
        lay_aside(group)

    def answer(rank: int, method: str, payload: dict) -> list[tuple[dict, str, int | None]]:
        if method != "init_weight_transfer_engine":
            return []
        num_buckets = 2 if rank == 2 else -(-layout.total_bytes // 1000)
        threading.Thread(target=engine, args=(payload, num_buckets), daemon=True).start()
        return [({}, "", None)]

    with Rollouts(network, answer):
        info = GlooTrainerInitInfo(host="127.0.0.1", world_size=3, bucket_bytes=1000, timeout_s=1.0, rank=0)
        trainer = GlooTrainerEngine.trainer_init(info, client=client, source=source)
        with pytest.raises(TimeoutError, match="^waited 1 s for weight buckets to reach rank 2$"):
            trainer.send_weights()
        over.set()
        trainer.shutdown()


class UninterruptibleEngine:
    """As vLLM's trainer engine for NCCL: its call runs in a thread beside a broadcast without a deadline."""

    def __init__(self, client: RolloutClient, source: ExportSource) -> None:
        self._client, self._source = client, source
        self._aborted = threading.Event()

    def send_weights(self) -> None:
        call = ThreadPoolExecutor(1).submit(self._client.update_weights, {"names": []})
        export = iter(self._source)
        next(export)
        assert self._aborted.wait(20.0), "still in the broadcast"
        for name, _ in export:
            raise AssertionError(f"{name} would be sent over a communicator that is gone")
        call.result()

    def shutdown(self) -> None:
        self._aborted.set()


@pytest.mark.parametrize("answers", [True, False])
def test_a_broadcast_ends_when_an_engine_answers_with_an_error_or_not_in_time(tmp_path, monkeypatch, answers):
    network = LocalNetwork(4)
    config = Config()
    config.weights.backend = WeightBackend.nccl
    config.weights.timeout_s = 30.0 if answers else 1.0
    world = World(
        role="trainer", role_rank=0, world_rank=1, trainer_ranks=(1,), rollout_ranks=(2, 3),
        hosts=("localhost",) * 4, channel=network.channel(1),
    )  # fmt: skip
    tensors = make_tensors([([2], 0)] * 5)
    seen, export = recorded(tensors)

    def answer(rank: int, method: str, payload: dict) -> list[tuple[dict, str, int | None]]:
        if method == "update_weights":
            return [({}, "the engine died during the transfer", None)] if answers and rank == 3 else []
        return [({"connected": True}, "", None)]

    def open_group(weights: TrainerWeights) -> None:
        weights._engine = UninterruptibleEngine(weights._client, weights._source)

    monkeypatch.setattr(TrainerWeights, "_open", open_group)
    weights = TrainerWeights(
        config, world, RunPaths(tmp_path), lambda: [(n, t.dtype, tuple(t.shape)) for n, t in tensors], export,
        Telemetry(tmp_path / "spans.jsonl"),
    )  # fmt: skip
    words = (
        "update_weights failed on rollout 1 on localhost: the engine died" if answers
        else "waited 1 s for update_weights from rollout 0 on localhost, rollout 1 on localhost"
    )  # fmt: skip
    with Rollouts(network, answer, lead=1) as rollouts:
        weights.connect((2, 3))
        with pytest.raises(PublishError, match=words):
            weights.publish(1)
    # The pass, which other trainer ranks share, was run to its end, and once.
    assert seen == [name for name, _ in tensors]
    assert [method for rank, method, _ in rollouts.calls if rank == 2][-1] == "abandon"


def test_a_transfer_that_does_not_come_back_from_its_abort_ends_the_run():
    over, aborts = threading.Event(), []
    failure = RolloutError("update_weights failed on rank 2")
    with pytest.raises(TransferStuck, match="within 0.1 s of its abort, after: update_weights failed on rank 2"):
        run_watched(over.wait, lambda: failure, lambda: aborts.append(1), settle_s=0.1)
    over.set()
    assert aborts == [1]


def test_an_engine_leaves_a_broadcast_that_was_cancelled(monkeypatch):
    """A sender that is gone wakes nobody: the communicator is aborted here too."""
    aborted = threading.Event()
    engine = nccl.NcclEngine.__new__(nccl.NcclEngine)
    engine._group = SimpleNamespace(destroy=aborted.set)
    engine._init_info = SimpleNamespace(packed_buffer_size_bytes=1000, packed_num_buffers=2)
    engine.parallel_config, engine.device = SimpleNamespace(rank=1), None

    def broadcast(iterator, **options: object) -> None:
        next(iterator)
        assert aborted.wait(20.0), "still in the broadcast"
        with pytest.raises(TransferCancelled):
            next(iterator)

    monkeypatch.setattr(nccl, "packed_nccl_broadcast_consumer", broadcast)
    memory = Stage("control", CONTROL_BYTES)
    control = TransferControl(memory.path)
    info = StagedUpdateInfo(["a", "b"], ["float32"] * 2, [[2]] * 2, control=memory.path, attempt=3)
    timer = threading.Timer(0.2, control.cancel, (3,))
    timer.start()
    with pytest.raises(TransferCancelled):
        engine.receive_weights(info)
    assert engine._group is None
    timer.join()
    control.close()
    memory.close()
