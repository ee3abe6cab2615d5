"""Immutable typed messages, and the one strict decoder of typed values, for JSON and YAML.

A Message is declared like a frozen dataclass with keyword arguments. It is not one because every
node pays for the declarations at each start: 50 frozen dataclasses take 38 ms, these take 1.
"""

from __future__ import annotations

import base64
import collections.abc
import functools
import json
import types
import typing
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform as dataclass_transform  # noqa: PLC0414
else:

    def dataclass_transform(**_):
        return lambda cls: cls


T = TypeVar("T")
M = TypeVar("M", bound="Message")
# Marks a field without a default.
REQUIRED = object()
LARGEST_NUMBER = 1 << 128
# Python 3.10 added `X | None`.
UNIONS = (typing.Union, getattr(types, "UnionType", typing.Union))
MAPPINGS = (dict, collections.abc.Mapping)
NONE = type(None)
# The types that stand in JSON as they are, bytes as base64.
NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    bytes: "bytes",
}


class Nonsense(ValueError):
    """Raised for data that is not a valid message of the protocol."""


class Check:
    """Narrows the type of a field, so that users of its value need no further checks."""

    def __init__(self, what: str, fits: typing.Callable[[Any], bool]) -> None:
        self.what = what
        self.fits = fits


@functools.cache
def is_address(text: str) -> bool:
    # The node does not need this import.
    import ipaddress

    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# A time by any clock: before the year 5138, so that every calendar function accepts it.
A_TIME = Check("a time", lambda value: 0 <= value < 1e11)
Moment = typing.Annotated[float, A_TIME]
# A time by the clock of the node that sends it; decode_value() converts it to the receiver's.
NODE_TIME = Check(A_TIME.what, A_TIME.fits)
NodeTime = typing.Annotated[float, NODE_TIME]
IpAddress = typing.Annotated[str, Check("an IP address", is_address)]
NoAddress = typing.Annotated[str, Check("an address or empty", lambda v: not v or is_address(v))]
Count = typing.Annotated[int, Check("a count", lambda value: 0 <= value < 1 << 63)]
Few = typing.Annotated[int, Check("a number below 10,000", lambda value: 0 <= value < 10_000)]
Port = typing.Annotated[int, Check("a port", lambda value: 0 <= value < 1 << 16)]


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Message:
    """One immutable record. A field is omitted from the JSON if it and its default are None."""

    # Each field with its default.
    _defaults: typing.ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, kw_only: bool = True) -> None:
        super().__init_subclass__()
        annotations = vars(cls).get("__annotations__", {})
        names = [name for name in annotations if not str(annotations[name]).startswith("ClassVar")]
        cls._defaults = {}
        for base in reversed(cls.__mro__[1:]):
            cls._defaults.update(vars(base).get("_defaults", {}))
        cls._defaults.update({name: vars(cls).get(name, REQUIRED) for name in names})

    def __init__(self, *positional: Any, **values: Any) -> None:
        if positional:
            values.update(zip(self._defaults, positional))
            assert len(positional) <= len(self._defaults)
        if not values.keys() <= self._defaults.keys():
            raise TypeError(
                f"{type(self).__name__} has no {sorted(values.keys() - self._defaults)}"
            )
        vars(self).update({**self._defaults, **values})
        missing = [name for name, value in vars(self).items() if value is REQUIRED]
        if missing:
            raise TypeError(f"{type(self).__name__} needs {', '.join(missing)}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"

    def replace(self: M, **changes: Any) -> M:
        """Return a copy with other values for these fields."""
        return type(self)(**{**vars(self), **changes})

    def map_fields(self: M, function: typing.Callable[[Any], Any]) -> M:
        """Return a copy with the function's result for the value of each field."""
        return self.replace(**{name: function(value) for name, value in vars(self).items()})


# -- to JSON ----------------------------------------------------------------------------------


def to_json(value: Any, *, nones: bool = False) -> str:
    """Return the JSON text of a message, of a dataclass, or of a value that has some inside.

    All fields of a dataclass are included; with `nones`, all fields of messages as well.
    """
    return json.dumps(value, default=functools.partial(to_dict, nones=nones))


def encode_value(value: Any, *, nones: bool = False) -> Any:
    """Return the data of to_json()."""
    return json.loads(to_json(value, nones=nones))


def to_dict(value: Any, *, nones: bool = False) -> Any:
    """Return a message or dataclass as a dict, whose values are not encoded; bytes as base64."""
    if isinstance(value, Message):
        defaults = value._defaults
        return {
            name: inner
            for name, inner in vars(value).items()
            if nones or inner is not None or defaults[name] is not None
        }
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    raise TypeError(f"{type(value).__name__} has no form in JSON")


# -- from JSON --------------------------------------------------------------------------------


def parse_object(data: bytes | str) -> dict[str, Any]:
    """Return the JSON object in these bytes."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Nonsense(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Nonsense(f"not a JSON object: {shorten_value(value)}")
    return value


class Reading(typing.NamedTuple):
    """How data is read."""

    # True ignores unknown keys.
    newer: bool
    # Seconds by which the clock of the node that sent the data is ahead.
    ahead: float


def decode_value(
    kind: type[T], data: Any, *, newer: bool = False, where: str = "", ahead: float = 0.0
) -> T:
    """Return `data` as a message, a dataclass or another value of this type, or raise Nonsense.

    Every key must be a field and every value of its field's type. `newer` ignores unknown keys:
    it is used for data that a process of another version may have written. `ahead` is how far the
    clock of the node is ahead of the reader's, in seconds: times of the node are moved by it.
    """
    return typing.cast("T", _read(kind, data, Reading(newer, ahead), where or kind.__name__))


@functools.cache
def _form(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


def _read(kind: Any, data: Any, how: Reading, where: str) -> Any:
    if kind in NAMES:
        return _plain(kind, data, where)
    if kind is Any:
        return data
    origin, inner = _form(kind)
    if origin is typing.Annotated:
        value = _read(inner[0], data, how, where)
        if not inner[1].fits(value):
            raise Nonsense(f"{where} must be {inner[1].what}, not {shorten_value(data)}")
        # No time at all is 0.
        return value - how.ahead if value and inner[1] is NODE_TIME else value
    if origin in UNIONS:
        # Only None stands beside another type.
        (other,) = (one for one in inner if one is not NONE)
        return None if data is None else _read(other, data, how, where)
    if origin in (tuple, list):
        many = origin is list or inner[-1] is Ellipsis
        if not isinstance(data, (list, tuple)) or not (many or len(data) == len(inner)):
            size = "" if many else f" of {len(inner)}"
            raise Nonsense(f"{where} must be a list{size}, not {shorten_value(data)}")
        kinds = [inner[0]] * len(data) if many else inner
        values = (_read(kinds[i], item, how, f"{where}[{i}]") for i, item in enumerate(data))
        return origin(values)
    if not isinstance(data, dict):
        raise Nonsense(f"{where} must hold keys, not {shorten_value(data)}")
    if origin in MAPPINGS:
        return _mapping(inner, data, how, where)
    return _record(kind, data, how, where)


def _plain(kind: Any, data: Any, where: str) -> Any:
    if kind is bytes and isinstance(data, str):
        try:
            return base64.b64decode(data, validate=True)
        except ValueError:
            raise Nonsense(f"{where} is not base64") from None
    # NaN and infinity fail this test.
    number = type(data) in (int, float) and abs(data) < LARGEST_NUMBER
    if kind is float and number:
        return float(data)
    if type(data) is not kind or (kind in (int, float) and not number):
        raise Nonsense(f"{where} must be {NAMES[kind]}, not {shorten_value(data)}")
    return data


def _mapping(
    kinds: tuple[Any, ...], data: dict[str, Any], how: Reading, where: str
) -> dict[Any, Any]:
    items = {}
    for key, item in data.items():
        # Keys in JSON are always text.
        number = kinds[0] is int
        if number and not (key.isascii() and key.lstrip("-").isdigit() and len(key) < 40):
            raise Nonsense(f"{where} has a key that is not a number: {shorten_value(key)}")
        items[int(key) if number else key] = _read(kinds[1], item, how, f"{where}.{key}")
    return items


def _record(kind: Any, data: dict[str, Any], how: Reading, where: str) -> Any:
    hints, values = hints_of(kind), {}
    for key, value in data.items():
        if key in hints:
            values[key] = _read(hints[key], value, how, f"{where}.{key}")
        elif not how.newer:
            raise Nonsense(f"{where} has an unknown key {shorten_value(key)}")
    try:
        return kind(**values)
    except TypeError as error:
        raise Nonsense(f"{where} is incomplete: {error}") from None


@functools.cache
def hints_of(kind: Any) -> dict[str, Any]:
    """Return the type of each field of a message class or a dataclass."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = kind._defaults if issubclass(kind, Message) else kind.__dataclass_fields__
    return {name: hints[name] for name in fields}


def shorten_value(data: Any) -> str:
    """Return a value as text for an error message, shortened to 60 characters."""
    text = repr(data)
    return text if len(text) <= 60 else text[:60] + "..."
