"""The byte stream of a publication, its control calls and its export (imports vLLM, starts nothing)."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.messages import WeightReturn
from areal_hpc.mpi.channel import LocalNetwork
from areal_hpc.weights.client import RolloutClient, RolloutError
from areal_hpc.weights.gloo import buckets
from areal_hpc.weights.source import ALIGNMENT, ExportSource, Layout, describe_metadata

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


def test_a_pass_that_was_begun_is_run_to_its_end():
    """The other trainer ranks are in the same collectives."""
    tensors = make_tensors([([2], 0)] * 5)
    seen = []

    def export():
        for pair in tensors:
            seen.append(pair[0])
            yield pair

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
    """Rollout ranks 1 and 2 that answer weight calls from a script, in a thread."""

    def __init__(self, network: LocalNetwork, answer) -> None:
        self._channels = {rank: network.channel(rank) for rank in (1, 2)}
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
                        channel.send(0, WeightReturn(number, rank - 1, json.dumps(result), error))

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
