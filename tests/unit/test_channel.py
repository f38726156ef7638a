"""Messages and channels: every message survives the wire; receive keeps what others wait for."""

import typing

import msgspec
import pytest

from areal_hpc import messages
from areal_hpc.messages import AnyMessage, Stop, StepDone, TrainerReady, decode, encode
from areal_hpc.mpi.channel import LocalNetwork
from areal_hpc.types import BatchManifest, Lease, ManifestRow, Prompt, SamplingSpec


def test_union_holds_every_message_class():
    defined = {
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, messages.Message) and value is not messages.Message
    }
    assert defined == set(typing.get_args(AnyMessage))


def test_a_nested_message_survives_the_wire():
    lease = Lease(3, 2, 1, 0, 8, Prompt(5, "2+2=\n", "4"), SamplingSpec(16, stop=("a",), stop_token_ids=(1,)))
    message = messages.GrantLeases((lease,))
    assert decode(encode(message)) == message
    manifest = BatchManifest(1, 0, 0, ("spool/a.h5",), (ManifestRow(0, 1, 2, 3, 4, 5),), ((0,),))
    assert decode(encode(messages.TrainBatch(manifest))) == messages.TrainBatch(manifest)


@pytest.mark.parametrize("data", [b"", b"\x00", b"hello", msgspec.msgpack.encode({"type": "Exploit"})])
def test_foreign_bytes_are_refused_with_a_value_error(data):
    with pytest.raises(ValueError, match="not an areal_hpc message"):
        decode(data)


def test_receive_leaves_other_messages_in_order():
    network = LocalNetwork(3)
    a, b, c = (network.channel(rank) for rank in range(3))
    b.send(0, Stop("one"))
    c.send(0, TrainerReady(1, 1))
    b.send(0, Stop("two"))
    assert a.receive(TrainerReady, 1.0, "the trainer") == (2, TrainerReady(1, 1))
    assert [envelope.message.reason for envelope in a.poll()] == ["one", "two"]
    assert a.poll() == []


def test_receive_from_one_source_only():
    network = LocalNetwork(3)
    a, b, c = (network.channel(rank) for rank in range(3))
    b.send(0, Stop("from 1"))
    c.send(0, Stop("from 2"))
    assert a.receive(Stop, 1.0, "a stop", source=2).message.reason == "from 2"


def test_a_missed_deadline_names_what_and_whom():
    channel = LocalNetwork(2).channel(0)
    with pytest.raises(TimeoutError, match=r"waited 0 s for the step from rank 1"):
        channel.receive(StepDone, 0.01, "the step", source=1)


def test_poll_takes_no_more_than_its_limit():
    network = LocalNetwork(2)
    a, b = network.channel(0), network.channel(1)
    for number in range(10):
        b.send(0, Stop(str(number)))
    assert len(a.poll(4)) == 4
    assert [envelope.message.reason for envelope in a.poll()] == [str(number) for number in range(4, 10)]
