"""Every record survives the way to protobuf bytes and back."""

import dataclasses
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopline import launcher_messages, messages
from loopline.identity import Capacity, HandoffKey, WorkerId
from loopline.messages import PushNotice, PushRange
from loopline.request import InitialState, Request, SamplingParams, TokenLogprobs
from loopline.wire import convert
from loopline.wire._generated.loopline.v1 import cluster_pb2

UNSIGNED = st.integers(0, 2**31 - 1)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
FLOATS = st.floats(allow_nan=False)
PEER_MESSAGES = (
    messages.Connect,
    messages.Connected,
    messages.Commit,
    messages.CommitAnswer,
    messages.CloseHandoff,
    messages.HandoffClosed,
    launcher_messages.LauncherReport,
    launcher_messages.Wanted,
)


def record_strategy(kind: type) -> st.SearchStrategy[typing.Any]:
    if kind is SamplingParams:  # the stop strings stay behind
        return st.builds(
            SamplingParams,
            max_tokens=UNSIGNED,
            temperature=FLOATS,
            top_p=FLOATS,
            seed=st.integers(0, 2**64 - 1),
            logit_bias=st.dictionaries(UNSIGNED, FLOATS, max_size=3),
            stop_ids=st.lists(UNSIGNED, max_size=3).map(tuple),
            logprobs=st.none() | st.integers(0, 20),
            exit_probabilities=st.booleans(),
            loops=UNSIGNED,
            initial_state=st.sampled_from(InitialState),
        )
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{f.name: value_strategy(f.name, hints[f.name]) for f in dataclasses.fields(kind)})


def value_strategy(name: str, hint: typing.Any) -> st.SearchStrategy[typing.Any]:
    simple = {int: UNSIGNED, float: FLOATS, str: TEXT, bool: st.booleans(), bytes: st.binary(max_size=8)}
    if hint in simple:
        return simple[hint]
    if dataclasses.is_dataclass(hint):
        return record_strategy(typing.cast(type, hint))
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        if typing.get_origin(item) is tuple and name != "fields":
            return st.dictionaries(TEXT, UNSIGNED, max_size=3).map(lambda pairs: tuple(sorted(pairs.items())))
        if typing.get_origin(item) is tuple:
            return st.lists(st.tuples(TEXT, TEXT), max_size=3).map(tuple)
        return st.lists(value_strategy(name, item), max_size=3).map(tuple)
    options = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if options:
        return st.none() | value_strategy(name, options[0])
    return st.sampled_from(hint)


@pytest.mark.parametrize("kind", typing.get_args(messages.WorkerMessage), ids=lambda kind: kind.__name__)
def test_worker_messages_round_trip(kind: type) -> None:
    @settings(max_examples=25, deadline=None)
    @given(record_strategy(kind), UNSIGNED)
    def check(record: typing.Any, epoch: int) -> None:
        data = convert.wrap_worker_message(record, epoch).SerializeToString()
        assert convert.unwrap_worker_message(cluster_pb2.WorkerMessage.FromString(data)) == (record, epoch)

    check()


@pytest.mark.parametrize("kind", typing.get_args(messages.CoordinatorMessage), ids=lambda kind: kind.__name__)
def test_coordinator_messages_round_trip(kind: type) -> None:
    @settings(max_examples=25, deadline=None)
    @given(record_strategy(kind), UNSIGNED)
    def check(record: typing.Any, epoch: int) -> None:
        data = convert.wrap_coordinator_message(record, epoch).SerializeToString()
        assert convert.unwrap_coordinator_message(cluster_pb2.CoordinatorMessage.FromString(data)) == (record, epoch)

    check()


@pytest.mark.parametrize("kind", PEER_MESSAGES, ids=lambda kind: kind.__name__)
def test_peer_messages_round_trip(kind: type) -> None:
    @settings(max_examples=25, deadline=None)
    @given(record_strategy(kind))
    def check(record: typing.Any) -> None:
        message = convert.to_proto(record)
        again = type(message).FromString(message.SerializeToString())
        assert convert.from_proto(kind, again) == record

    check()


def test_push_notice_round_trips_and_garbage_is_a_value_error() -> None:
    notice = PushNotice(HandoffKey("r", 3), PushRange(1, 2, 3))
    assert convert.decode_push_notice(convert.encode_push_notice(notice)) == notice
    for garbage in (b"", b"warm-up", b"\xff" * 40):
        with pytest.raises(ValueError):
            convert.decode_push_notice(garbage)


def test_none_and_zero_stay_apart() -> None:
    row = messages.TokenRow("r", 1, 7, None, 4)
    zero = dataclasses.replace(row, token_id=0, logprobs=TokenLogprobs(-1.0))
    for record in (row, zero):
        assert convert.from_proto(messages.TokenRow, convert.to_proto(record)) == record


def test_a_missing_part_names_its_field() -> None:
    with pytest.raises(ValueError, match=r"Register\.peer: missing"):
        convert.from_proto(messages.Register, cluster_pb2.Register(role="decode"))
    message = convert.to_proto(messages.Reserved(HandoffKey("r", 1)))
    message.cause = "no such cause"
    with pytest.raises(ValueError, match=r"Reserved\.cause"):
        convert.from_proto(messages.Reserved, message)


def test_an_empty_envelope_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="envelope"):
        convert.unwrap_worker_message(cluster_pb2.WorkerMessage())


def test_stop_strings_do_not_travel() -> None:
    request = Request(request_id="r", prompt_ids=(1,), params=SamplingParams(stop=("x",)))
    again = convert.from_proto(Request, convert.to_proto(request))
    assert again.params.stop == ()
    assert WorkerId("u", 1) < WorkerId("u", 2)
    assert Capacity(16, 1, 1, 1).block_size == 16
