"""Immutable typed messages, and the one strict decoder that turns JSON data into them.

A Message is declared like a frozen dataclass with keyword arguments. It is not one because every
node pays for the declarations at each start: 50 frozen dataclasses take 38 ms, these take 1.
"""

from __future__ import annotations

import collections.abc
import functools
import json
import types
import typing
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda cls: cls


T = TypeVar("T")
M = TypeVar("M", bound="Message")
REQUIRED = object()  # a field without a default
LARGEST_NUMBER = 1 << 128
UNIONS = (typing.Union, getattr(types, "UnionType", typing.Union))  # X | None is 3.10's
MAPPINGS = (dict, collections.abc.Mapping)
NONE = type(None)
PLAIN = {str, int, float, bool, NONE}  # types that JSON has as well


class Nonsense(ValueError):
    """Raised for data that is no message of the protocol."""


class Check:
    """Narrows the type of a field, so that whoever uses its value need not look at it again."""

    def __init__(self, what: str, fits: typing.Callable[[Any], bool]) -> None:
        self.what = what
        self.fits = fits


@functools.cache
def is_address(text: str) -> bool:
    import ipaddress  # not needed on the node

    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# A time by somebody's clock: before the year 5138, so that every calendar function takes it.
Moment = typing.Annotated[float, Check("a time", lambda value: 0 <= value < 1e11)]
IpAddress = typing.Annotated[str, Check("an IP address", is_address)]
NoAddress = typing.Annotated[str, Check("an address or nothing", lambda v: not v or is_address(v))]
Count = typing.Annotated[int, Check("a count", lambda value: 0 <= value < 1 << 63)]
Few = typing.Annotated[int, Check("a number below 10,000", lambda value: 0 <= value < 10_000)]
Port = typing.Annotated[int, Check("a port", lambda value: 0 <= value < 1 << 16)]


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Message:
    """One immutable record. A field that is None by default is left out of the JSON when None."""

    _defaults: typing.ClassVar[dict[str, Any]] = {}
    _required: typing.ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, kw_only: bool = True) -> None:
        super().__init_subclass__()
        annotations = vars(cls).get("__annotations__", {})
        names = [name for name in annotations if not str(annotations[name]).startswith("ClassVar")]
        values = {name: vars(cls).get(name, REQUIRED) for name in names}
        cls._defaults = {}
        for base in reversed(cls.__mro__[1:]):
            cls._defaults.update(vars(base).get("_defaults", {}))
        cls._defaults.update(values)
        cls._required = tuple(n for n, value in cls._defaults.items() if value is REQUIRED)

    def __init__(self, *positional: Any, **values: Any) -> None:
        defaults = self._defaults
        if positional:
            values.update(zip(defaults, positional))  # noqa: B905  3.9 has no strict=
            assert len(positional) <= len(defaults)
        if not values.keys() <= defaults.keys():
            raise TypeError(f"{type(self).__name__} has no {sorted(values.keys() - defaults)}")
        missing = [name for name in self._required if name not in values]
        if missing:
            raise TypeError(f"{type(self).__name__} needs {', '.join(missing)}")
        vars(self).update(defaults)
        vars(self).update(values)

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
        """Return a copy in which these fields have other values."""
        return type(self)(**{**vars(self), **changes})


# -- to JSON ----------------------------------------------------------------------------------


def encode(value: Any, *, nones: bool = False) -> Any:
    """Return the JSON data of a message, of a dataclass, or of a value inside one.

    All fields of a dataclass are in it; with `nones`, those of messages, too.
    """
    # Most values are: a launch on 32 nodes encodes 24,000.
    if type(value) in PLAIN:
        return value
    if isinstance(value, Message):
        defaults = value._defaults
        return {
            name: encode(inner, nones=nones)
            for name, inner in vars(value).items()
            if nones or inner is not None or defaults[name] is not None
        }
    if isinstance(value, dict):
        return {key: encode(inner, nones=nones) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(inner, nones=nones) for inner in value]
    if isinstance(value, bytes):
        import base64  # not for the supervisor

        return base64.b64encode(value).decode("ascii")
    if hasattr(value, "__dataclass_fields__"):
        names = value.__dataclass_fields__
        return {name: encode(getattr(value, name), nones=nones) for name in names}
    return value


# -- from JSON --------------------------------------------------------------------------------


def parse(data: bytes | str) -> dict[str, Any]:
    """Return the JSON object in these bytes."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Nonsense(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise Nonsense(f"no JSON object: {shown(value)}")
    return value


def decode(kind: type[T], data: Any, *, newer: bool = False, where: str = "") -> T:
    """Return `data` as a message, a dataclass or another value of this type, or raise Nonsense.

    Every key must be a field and every value of its field's type. `newer` passes over unknown keys:
    it is for what a process of another version may have written.
    """
    value: T = _reader(kind)(data, newer, where or kind.__name__)
    return value


Reader = typing.Callable[[Any, bool, str], Any]  # of the data, newer and where
_readers: dict[Any, Reader] = {}


def _reader(kind: Any) -> Reader:
    """Return what reads data as a type: looking at a type takes longer than reading."""
    try:
        return _readers[kind]
    except KeyError:
        made = _readers[kind] = _reader_of(kind)
        return made


def _record(kind: Any) -> Reader:
    hints = _hints(kind)
    readers: dict[str, Reader] = {}  # of those fields that came once: a type may hold itself

    def read(data: Any, newer: bool, where: str) -> Any:
        if not isinstance(data, dict):
            raise Nonsense(f"{where} must hold keys, not {shown(data)}")
        values = {}
        for key, value in data.items():
            if key in hints:
                reader = readers.get(key) or readers.setdefault(key, _reader(hints[key]))
                values[key] = reader(value, newer, f"{where}.{key}")
            elif not newer:
                raise Nonsense(f"{where} has an unknown key {shown(key)}")
        try:
            return kind(**values)
        except TypeError:
            missing = [name for name in hints if name not in data and _required(kind, name)]
            raise Nonsense(f"{where} lacks {', '.join(missing)}") from None

    return read


def _hints(kind: Any) -> dict[str, Any]:
    """Return field -> type of a message class or a dataclass."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = kind._defaults if issubclass(kind, Message) else kind.__dataclass_fields__
    return {name: hints[name] for name in fields}


def _required(kind: Any, name: str) -> bool:
    if issubclass(kind, Message):
        return name in kind._required
    field = kind.__dataclass_fields__[name]
    return repr(field.default) == repr(field.default_factory)  # both MISSING


def _reader_of(kind: Any) -> Reader:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is None:
        return _single(kind)
    if origin is typing.Annotated:
        return _narrowed(_reader(inner[0]), inner[1])
    if origin in UNIONS:
        return _union(inner)
    if origin is tuple:
        return _tuple(inner)
    if origin is list:  # a record on the head's disk has some
        return _list(_tuple((*inner, Ellipsis)))
    if origin in MAPPINGS:
        return _dict(inner)
    raise TypeError(f"no message may have a field of type {kind}")


def _narrowed(read: Reader, check: Check) -> Reader:
    def read_it(data: Any, newer: bool, where: str) -> Any:
        value = read(data, newer, where)
        if not check.fits(value):
            raise Nonsense(f"{where} must be {check.what}, not {shown(data)}")
        return value

    return read_it


def _union(kinds: tuple[Any, ...]) -> Reader:
    may_be_none = NONE in kinds
    *others, last = (_reader(kind) for kind in kinds if kind is not NONE)

    def read(data: Any, newer: bool, where: str) -> Any:
        if data is None and may_be_none:
            return None
        for other in others:  # text or a number, as --nnodes is
            try:
                return other(data, newer, where)
            except Nonsense:
                pass
        return last(data, newer, where)

    return read


def _single(kind: Any) -> Reader:
    if kind is Any:
        return lambda data, newer, where: data
    if kind is bytes:
        return _bytes
    if kind is float:
        return _float
    if kind is int:
        return _int
    if kind in (str, bool):

        def read(data: Any, newer: bool, where: str) -> Any:
            if type(data) is not kind:
                raise _of_other_type(kind, data, where)
            return data

        return read
    return _record(kind)


def _of_other_type(kind: Any, data: Any, where: str) -> Nonsense:
    return Nonsense(f"{where} must be of type {kind.__name__}, not {shown(data)}")


def _bytes(data: Any, newer: bool, where: str) -> bytes:
    import base64

    if not isinstance(data, str):
        raise _of_other_type(bytes, data, where)
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise Nonsense(f"{where} is not base64") from None


def _float(data: Any, newer: bool, where: str) -> float:
    if type(data) in (int, float) and abs(data) < LARGEST_NUMBER:  # no NaN, no infinity
        return float(data)
    raise _of_other_type(float, data, where)


def _int(data: Any, newer: bool, where: str) -> int:
    if type(data) is int and abs(data) < LARGEST_NUMBER:
        return data
    raise _of_other_type(int, data, where)


def _tuple(kinds: tuple[Any, ...]) -> Reader:
    many = kinds[-1] is Ellipsis
    readers = [_reader(kind) for kind in kinds if kind is not Ellipsis]

    def read(data: Any, newer: bool, where: str) -> tuple[Any, ...]:
        if not isinstance(data, list) or not (many or len(data) == len(readers)):
            raise Nonsense(f"{where} must be a list{'' if many else f' of {len(readers)}'}")
        return tuple(
            readers[0 if many else i](item, newer, f"{where}[{i}]") for i, item in enumerate(data)
        )

    return read


def _list(read: Reader) -> Reader:
    return lambda data, newer, where: list(read(data, newer, where))


def _dict(kinds: tuple[Any, ...]) -> Reader:
    numbered, read = kinds[0] is int, _reader(kinds[1])

    def read_it(data: Any, newer: bool, where: str) -> dict[Any, Any]:
        if not isinstance(data, dict):
            raise Nonsense(f"{where} must hold keys, not {shown(data)}")
        items = {}
        for key, item in data.items():
            if numbered:
                if not (key.isascii() and key.lstrip("-").isdigit() and len(key) < 40):
                    raise Nonsense(f"{where} has a key that is not a number: {shown(key)}")
                key = int(key)  # noqa: PLW2901  JSON has no other keys than text
            items[key] = read(item, newer, f"{where}.{key}")
        return items

    return read_it


def shown(data: Any) -> str:
    """Return a value as an error may show it: it may be very large."""
    text = repr(data)
    return text if len(text) <= 60 else text[:60] + "..."
