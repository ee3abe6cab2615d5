"""Take secrets out of what is written down or sent: by their values, and by what gives them away.

The one border: what a node writes down or sends home goes through hide_secrets() or `Mask`, with
the values secrets_of_environment(). The head's printer and its writers of files call
without_secrets(), which takes out the secrets of this process's launches. Shipped to the nodes: the
standard library alone, and Python 3.9. node/job/ranks/rank.py loads it by its path.
"""

from __future__ import annotations

import binascii
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

T = TypeVar("T")

REDACTED = "(redacted)"
SHORTEST = 4
SHORTEST_TOKEN = 8
# Names of variables and options that hold a secret.
NAME = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|COOKIE|WEBHOOK|CONNECTION|DSN|KEY$|_PWD$"
    r"|(^|_)(API|ACCESS|AUTH|AUTHORIZATION|PASS|PAT|SIG|.*KEY)(_|$)|(^|_)PIN$",
    re.IGNORECASE,
)
# user:password@ in a URL of any variable, and their equivalent in HTTP headers.
URL_LOGIN = r"(?<=://)[^/\s]*:[^/\s]+(?=@)|(?<=http://)[^/\s@]+(?=@)|(?<=https://)[^/\s@]+(?=@)"
BEARER = r"(?<=Bearer )\S+|(?<=Authorization: Basic )\S+"
# Tokens that say by their beginning whose they are: of hubs, of forges, of clouds, of chats.
TOKEN = (
    r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
    r"|sk-[A-Za-z0-9_-]{20,}|xox[abeprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{35}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}(\.[\w-]+)?)"
)
# The secrets of this process's launches, which it prints and writes nowhere.
held: list[str] = []
UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


# -- what is secret ---------------------------------------------------------------------------


def is_secret(name: str, value: str) -> bool:
    """Return True if a variable is named like a secret and its value is not a plain word."""
    return bool(NAME.search(name)) and is_no_word(value)


def is_no_word(value: str) -> bool:
    return len(value) >= SHORTEST_TOKEN and all(
        re.search(kind, value) for kind in (r"\d", "[A-Za-z]")
    )


def secrets_of_environment(env: Mapping[str, str], names: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the values to hide: of variables with these names, and of those like secrets."""
    return secret_texts(
        value for name, value in env.items() if name in names or is_secret(name, value)
    )


def secret_texts(values: Iterable[str]) -> tuple[str, ...]:
    """Return the texts to search for: secret values, their stripped lines, and encodings.

    A file's last newline, or Windows' end of a line, is in the value, and no program sends it.
    """
    values = tuple(filter(None, values))
    lines = (line.strip() for value in values for line in value.splitlines())
    plain = (*values, *(line for line in lines if len(line) >= SHORTEST_TOKEN))
    others = (spelt for value in plain if len(value) >= SHORTEST for spelt in spellings(value))
    return tuple(dict.fromkeys((*plain, *others)))


def spellings(value: str) -> Iterator[str]:
    """Yield how a value is written inside of other texts: in URLs, JSON, reprs and headers."""
    data = value.encode("utf-8", "surrogateescape")
    escaped = "".join(chr(byte) if byte in UNRESERVED else f"%{byte:02X}" for byte in data)
    yield from (escaped, escaped.replace("%20", "+"), escaped.replace("%2F", "/"))
    yield json.dumps(value)[1:-1]
    yield repr(value)[1:-1]
    yield data.hex()
    # Bytes before the value, such as `user:`, may share a base64 group with it.
    for before in range(3):
        text = binascii.b2a_base64(bytes(before) + data, newline=False).decode().rstrip("=")
        # What shares a character with a byte before or after is another one there.
        text = text[(0, 2, 3)[before] : len(text) - bool((before + len(data)) % 3)]
        if len(text) >= SHORTEST_TOKEN:
            yield from (text, text.replace("+", "-").replace("/", "_"))


# -- taking it out ----------------------------------------------------------------------------


def redacted_text(text: str) -> str:
    """Replace the logins and tokens in a text that are recognizable by their form."""
    # Compiling takes 1 ms for each, so it happens on first use. Few texts have such a sign.
    for sign, pattern in (
        *(("://", URL_LOGIN), ("Bearer ", BEARER)),
        *(("Basic ", BEARER), ("", TOKEN)),
    ):
        text = re.sub(pattern, REDACTED, text) if sign in text else text
    return text


def hide_secrets(data: T, secrets: Sequence[str]) -> T:
    """Replace secret values in texts, lists, mappings, dataclasses and messages."""
    return cast("T", _hide(data, sorted(secrets, key=len, reverse=True))) if secrets else data


def without_secrets(data: T) -> T:
    """Return data as hide_secrets() does, without the secrets of this process's launches."""
    return hide_secrets(data, held)


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
    if hasattr(type(data), "map_fields"):
        # Messages of the protocol have this method; this room does not import them.
        return data.map_fields(lambda value: _hide(value, secrets))
    if hasattr(type(data), "__dataclass_fields__"):
        # The import takes 6 ms, and the start of a supervisor does not need it.
        import dataclasses

        fields = [field.name for field in dataclasses.fields(data) if field.init]
        return dataclasses.replace(data, **{f: _hide(getattr(data, f), secrets) for f in fields})
    return data


class Mask:
    """Puts as many asterisks in the place of each secret: the places of all other bytes stay."""

    def __init__(self, secrets: Iterable[str]) -> None:
        values = {os.fsencode(secret) for secret in secrets}
        # The longest first: one may be a part of another.
        self.secrets = sorted((v for v in values if len(v) >= SHORTEST), key=len, reverse=True)
        self.longest = max(map(len, self.secrets), default=0)

    def masked(self, output: bytes) -> bytes:
        for secret in self.secrets:
            output = output.replace(secret, b"*" * len(secret))
        return output

    def begun(self, output: bytes) -> int:
        """Return how many bytes at the end may be the beginning of a secret that goes on later."""
        most = 0
        end = output[-self.longest :]
        for secret in self.secrets:
            if secret[:SHORTEST] not in end:
                continue
            for size in range(min(len(secret) - 1, len(end)), max(most, SHORTEST - 1), -1):
                if end.endswith(secret[:size]):
                    most = size
                    break
        return most
