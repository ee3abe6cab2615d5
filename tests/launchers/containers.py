"""What Compose and Kubernetes put in place of variables before a container runs."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Becomes process 1, as a container's program does.
IN_COMPOSE = re.compile(r"\$(?:(\$)|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\}|)")


def composed(text: str, environ: Mapping[str, str]) -> str:
    """Compose's interpolation, of https://docs.docker.com/reference/compose-file/interpolation."""

    def put(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name = match[2] or match[3]
        assert name, f"invalid interpolation format in {text!r}"
        return environ.get(name, "")

    return IN_COMPOSE.sub(put, text)


def expanded(text: str, environ: Mapping[str, str]) -> str:
    """Kubernetes' $(NAME): k8s.io/kubernetes/third_party/forked/golang/expansion."""

    def put(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return environ.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", put, text)
