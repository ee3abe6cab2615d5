"""Untrusted messages end in one error; messages of newer versions are understood."""

import functools
import importlib
import inspect
import itertools
import json
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.node.server.session import HANDLERS, handler_of
from orchestrator.protocol import control, events, facts, frames, spec
from orchestrator.protocol.frames import HEADER, JSON, LARGEST, SMALLEST, STREAMS, Splitter
from orchestrator.protocol.message import (
    Message,
    Nonsense,
    decode_value,
    encode_value,
    parse_object,
)
from orchestrator.protocol.requests import request
from orchestrator.protocol.requests.follow import Stop
from orchestrator.protocol.requests.request import (
    REQUESTS,
    ROOMS,
    Clock,
    Request,
    frame_of_request,
    number_of,
    read_incoming,
    read_request,
)
from orchestrator.protocol.version import Version, version_conflict

ROOM_MODULES = [importlib.import_module(f"orchestrator.protocol.requests.{room}") for room in ROOMS]


def kinds() -> Iterator[type[Message]]:
    """Every class of message there is."""
    for module in (request, *ROOM_MODULES, events, control, spec, facts):
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, Message) and kind.__module__ == module.__name__:
                yield kind


KINDS = [kind for kind in kinds() if kind is not Request]

json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


ADDRESSES = st.ip_addresses().map(str)
NARROW: dict[str, st.SearchStrategy[Any]] = {
    "a time": st.floats(0, 1e11, exclude_max=True),
    "an IP address": ADDRESSES,
    "an address or empty": st.just("") | ADDRESSES,
    "a count": st.integers(0, 2**63 - 1),
    "a number below 10,000": st.integers(0, 9999),
    "a port": st.integers(0, 2**16 - 1),
}


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return json_data.filter(lambda data: json.loads(json.dumps(data)) == data)
    if origin is typing.Annotated:
        return NARROW[inner[1].what]
    if origin is typing.Union:
        return st.none() | of_type(inner[0])
    if origin is tuple and inner[-1] is Ellipsis:
        return st.lists(of_type(inner[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(of_type, inner))
    if origin is dict:
        return st.dictionaries(of_type(inner[0]), of_type(inner[1]), max_size=3)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**64), 2**64),
        float: st.floats(-1e30, 1e30),
        str: st.text(),
        bool: st.booleans(),
        bytes: st.binary(),
    }
    return simple[kind] if kind in simple else made(kind)


@functools.cache
def made(kind: type[Message]) -> st.SearchStrategy[Any]:
    all_hints = typing.get_type_hints(kind, include_extras=True)
    hints = {name: all_hints[name] for name in kind._defaults}
    fields = st.fixed_dictionaries({name: of_type(hint) for name, hint in hints.items()})
    return fields.map(lambda values: kind(**values))


# -- messages ---------------------------------------------------------------------------------


def for_every_kind(number: int, check: Callable[[Message], None]) -> None:
    def one(message: Message) -> None:  # short: its source is read twice for every kind
        check(message)

    for kind in KINDS:
        settings(max_examples=number, deadline=None)(given(made(kind))(one))()


def test_every_message_round_trips() -> None:
    def check(message: Message) -> None:
        kind, data = type(message), json.loads(json.dumps(encode_value(message)))
        assert decode_value(kind, data) == message
        newer = {**data, "a key of a newer version": 1}
        assert decode_value(kind, newer, newer=True) == message
        with pytest.raises(Nonsense, match="unknown key"):
            decode_value(kind, newer)

    for_every_kind(3, check)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), json_data)
def test_arbitrary_data_raises_nonsense_alone(kind: type[Message], data: Any) -> None:
    for newer in (False, True):
        try:
            decode_value(kind, data, newer=newer)
        except Nonsense:
            continue


def canonical(data: Any) -> str:
    """Write equal data equally: NaN is unlike itself, a field of floats takes whole numbers."""
    return json.dumps(json.loads(json.dumps(data), parse_int=float), sort_keys=True)


# A few of every type that JSON has: each is put in the place of each field.
OF_EVERY_TYPE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 7, 2**63, 2**200, 0.5, -1e300, float("inf"), float("nan")),
    *("", "x", "10.0.0.1", "7", "\ud800", [], [1], ["x", "y"], [None], [[]], [{}]),
    *({}, {"x": 1}, {"1": "x"}, {"x": None}, {"": []}, {"time": "x"}, {"rank": 1, "local": 0}),
)
SIMPLE = (int, float, str, bool)


def test_field_of_wrong_type_is_refused() -> None:
    def check(message: Message) -> None:
        kind, good = type(message), json.loads(json.dumps(encode_value(message)))
        hints = typing.get_type_hints(kind)
        for name, value in itertools.product(kind._defaults, OF_EVERY_TYPE):
            wrong, place = value, f"{kind.__name__}.{name}"
            try:
                found = decode_value(kind, {**good, name: wrong})
            except Nonsense:
                continue
            assert hints[name] not in SIMPLE or type(getattr(found, name)) is hints[name], place
            right = json.loads(json.dumps(encode_value(found))).get(name)
            if isinstance(wrong, dict) and isinstance(right, dict):
                # Missing fields of a nested message have their defaults, and unknown fields are
                # dropped.
                right = {key: right[key] for key in right if key in wrong}
                wrong = {key: wrong[key] for key in wrong if key in right}
            assert canonical(right) == canonical(wrong), place  # it was of the right type after all

    for_every_kind(1, check)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({}, "Stop is incomplete: Stop needs job, part, attempt, why, grace, wait"),
        ({"job": 1}, "Stop.job must be text, not 1"),
        ({"part": True}, "Stop.part must be a whole number, not True"),
        ({"part": 10**40}, "Stop.part must be a whole number, not 1000"),
        ({"grace": float("inf")}, "Stop.grace must be a number, not inf"),
        ({"grace": float("nan")}, "Stop.grace must be a number, not nan"),
        ({"more": 1}, "Stop has an unknown key 'more'"),
        ([], "Stop must hold keys, not \\[\\]"),
    ],
)
def test_error_names_wrong_field(data: Any, why: str) -> None:
    with pytest.raises(Nonsense, match=why):
        decode_value(Stop, data)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_non_object_json_is_refused(text: bytes) -> None:
    with pytest.raises(Nonsense):
        parse_object(text)


def test_message_is_immutable() -> None:
    beat = Clock(time=1.0)
    with pytest.raises(AttributeError):
        beat.time = 2.0  # type: ignore[misc]
    assert beat.replace(time=2.0) == Clock(time=2.0) != beat
    with pytest.raises(TypeError):
        Clock(tiem=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Clock()  # type: ignore[call-arg]


# -- requests ---------------------------------------------------------------------------------


def test_every_request_has_typed_handler() -> None:
    for kind in REQUESTS.values():
        handler = handler_of(kind)
        hints = typing.get_type_hints(handler)
        assert (hints["request"], hints["return"]) == (kind, kind.answer)
    assert set(HANDLERS) == set(REQUESTS.values())


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([*REQUESTS.values()]).flatmap(made), st.integers(0, 2**40))
def test_request_frame_round_trips(request: Request[Any], number: int) -> None:
    frame = json.loads(frame_of_request(number, request))
    found, fields = number_of(frame)
    assert (found, read_request(fields)) == (number, request)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(["id", "do", "ok", "error", "beat", "version"]), json_data))
def test_arbitrary_frames_raise_nonsense_alone(data: dict[str, Any]) -> None:
    for read in (number_of, read_request, read_incoming):
        try:
            read(data)
        except Nonsense:
            continue


# -- frames -----------------------------------------------------------------------------------

frame = st.tuples(st.sampled_from(sorted(LARGEST)), st.binary(max_size=50)).map(
    lambda pair: (pair[0], bytes(SMALLEST.get(pair[0], 0)) + pair[1])
)


@settings(max_examples=40, deadline=None)
@given(st.lists(frame, max_size=5), st.lists(st.integers(1, 40), max_size=30))
def test_splitter_reassembles_frames(sent: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    data = b"".join(frames.frame_header(kind, len(payload)) + payload for kind, payload in sent)
    splitter, found = Splitter(), []
    for cut in cuts:
        piece, data = data[:cut], data[cut:]
        found += splitter.feed(piece)
    found += splitter.feed(data)
    assert found == sent


def test_oversized_frame_is_refused_by_header() -> None:
    for kind, most in LARGEST.items():
        assert frames.parse_header(HEADER.pack(kind, most)) == (kind, most)
        with pytest.raises(Nonsense):
            frames.parse_header(HEADER.pack(kind, most + 1))
    with pytest.raises(Nonsense):
        frames.parse_header(HEADER.pack(b"X", 1))
    with pytest.raises(Nonsense):
        frames.parse_header(HEADER.pack(STREAMS[0], 7))
    assert frames.parse_header(HEADER.pack(JSON, 0)) == (JSON, 0)


# -- events and lines -------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([*events.EVENTS.values()]).flatmap(made))
def test_event_round_trips(event: events.Event) -> None:
    data = json.loads(json.dumps(events.event_to_data(event)))
    assert events.event_from_data(data) == event


def test_event_of_newer_kind_is_skipped() -> None:
    found = events.event_from_data({"event": "rank_teleported", "time": 1.0, "to": "mars"})
    assert (type(found), found.time) == (events.Event, 1.0)


def test_conflict_compares_versions() -> None:
    own = Version(protocol=3, oldest=2, package="0.3")
    for theirs in (own, Version(protocol=2, oldest=0), Version(protocol=9, oldest=3)):
        assert version_conflict("job-1", theirs, own) == ""
    newer = version_conflict("job-1", Version(protocol=9, oldest=4, package="0.9"), own)
    assert newer == (
        "job job-1 was started by orchestrator 0.9, which speaks protocol 9; this is 0.3 with"
        " protocol 3: attach with orchestrator 0.9, or end the job with `orchestrator stop`,"
        " which works"
    )
    older = version_conflict("job-1", Version(), own)
    assert "started by orchestrator of an earlier version" in older
