"""Take secrets out of what is written down or told: by their values, and by what gives them away.

Shipped to the nodes: the standard library alone, and Python 3.9.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

T = TypeVar("T")

REDACTED = "(redacted)"
SHORTEST = 4
LONG_LINE = 16
# user:password@ in a URL, whatever the variable is called, and what stands for both over HTTP
URL_LOGIN = re.compile(
    r"(?<=://)[^/\s]*:[^/\s]+(?=@)|(?<=http://)[^/\s@]+(?=@)|(?<=https://)[^/\s@]+(?=@)"
)
BEARER = re.compile(r"(?<=Bearer )\S+|(?<=Authorization: Basic )\S+")


def redacted_text(text: str) -> str:
    """Leave out the logins that a text gives away by its form."""
    return BEARER.sub(REDACTED, URL_LOGIN.sub(REDACTED, text))


def hide(data: T, secrets: Sequence[str]) -> T:
    """Replace secret values wherever they are in texts, lists, mappings and dataclasses."""
    if not secrets:
        return data
    return cast("T", _hide(data, sorted(secrets, key=len, reverse=True)))


def _hide(data: Any, secrets: Sequence[str]) -> Any:
    if isinstance(data, str):
        for secret in secrets:
            # A shorter one is part of too many words, and is hidden where it stands alone.
            if data == secret or len(secret) >= SHORTEST:
                data = data.replace(secret, REDACTED)
        return data
    if isinstance(data, Mapping):
        return {key: _hide(value, secrets) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(_hide(item, secrets) for item in data)
    if hasattr(type(data), "__dataclass_fields__"):
        import dataclasses  # 6 ms that the start of a supervisor does without

        fields = [field.name for field in dataclasses.fields(data) if field.init]
        return dataclasses.replace(data, **{f: _hide(getattr(data, f), secrets) for f in fields})
    return data


def parts(values: Iterable[str]) -> tuple[str, ...]:
    """Return secret values, and the lines of long ones: a key is printed line by line."""
    values = tuple(filter(None, values))
    lines = (line for value in values if "\n" in value for line in value.splitlines())
    return (*values, *(line for line in lines if len(line) >= LONG_LINE))


def masked(output: bytes, secrets: Sequence[bytes]) -> bytes:
    """Put as many asterisks in the place of each secret: the places of all other bytes stay."""
    for secret in secrets:
        if len(secret) >= SHORTEST:
            output = output.replace(secret, b"*" * len(secret))
    return output
