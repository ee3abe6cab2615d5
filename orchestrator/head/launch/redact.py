"""Remove values that must not be written where others can read them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|COOKIE|KEY$|_PWD$"
    r"|(^|_)(API|ACCESS|AUTH|PASS|.*KEY)(_|$)",
    re.IGNORECASE,
)
# user:password@ in a URL, whatever the variable is called
URL_LOGIN = re.compile(r"(?<=://)[^/\s]*:[^/\s]+(?=@)")


def redacted(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: "(redacted)" if SECRET.search(name) else URL_LOGIN.sub("(redacted)", value)
        for name, value in sorted(env.items())
    }


def redacted_command(command: Sequence[str]) -> list[str]:
    """Remove from a command line what `--token X`, `--api-key=X` or `NAME_TOKEN=X` would reveal."""
    shown = []
    before = ""
    for word in command:
        name, equals, _ = word.partition("=")
        if equals and SECRET.search(name.lstrip("-").replace("-", "_")):
            shown.append(f"{name}=(redacted)")
        elif before.startswith("-") and SECRET.search(before.lstrip("-").replace("-", "_")):
            shown.append("(redacted)")
        else:
            shown.append(URL_LOGIN.sub("(redacted)", word))
        before = "" if equals else word
    return shown
