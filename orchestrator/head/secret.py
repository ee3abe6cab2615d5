"""Values that must not be written down where others can read them."""

from __future__ import annotations

import re
from collections.abc import Mapping

SECRET = re.compile(
    r"(TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|COOKIE|(^|_)(API|ACCESS|AUTH|.*KEY)(_|$)|KEY$)",
    re.IGNORECASE,
)
# user:password@ in a URL, whatever the variable is called
URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+:[^/@\s]+(?=@)")


def redacted(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: "(redacted)" if SECRET.search(name) else URL_LOGIN.sub("(redacted)", value)
        for name, value in sorted(env.items())
    }
