"""Applies a per-node shell file (config_node.sh): what it exports becomes the job's environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile

HOOK_SECONDS = 60
SHELL_OWN = {"_", "SHLVL", "PWD", "OLDPWD"}
# The environment goes to standard output alone; whatever the file prints goes to standard error.
SCRIPT = "exec 3>&1 1>&2; . /dev/stdin || exit $?; exec env -0 >&3"


class HookError(Exception):
    """The hook failed on this node."""


def run_hook(text: str, env: dict[str, str], workdir: str) -> tuple[dict[str, str], list[str]]:
    """(what it set, what it unset), seen from the given environment on top of our own."""
    before = {**os.environ, **env}
    with tempfile.TemporaryFile() as exported:
        try:
            done = subprocess.run(
                [shutil.which("bash") or "/bin/sh", "-c", SCRIPT],
                input=text.encode("utf-8", "surrogateescape"),
                stdout=exported,
                stderr=subprocess.PIPE,
                env=before,
                cwd=workdir if os.path.isdir(workdir) else None,
                timeout=HOOK_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise HookError(f"did not end within {HOOK_SECONDS} s") from error
        exported.seek(0)
        raw = exported.read()
    if done.returncode != 0 or not raw:
        words = done.stderr.decode("utf-8", "replace").strip()[-2000:]
        left = (
            "left by `exit`" if done.returncode == 0 else f"ended with exit code {done.returncode}"
        )
        raise HookError(left + (f": {words}" if words else ""))
    after = {}
    for entry in raw.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals:
            after[os.fsdecode(name)] = os.fsdecode(value)
    changed = {k: v for k, v in after.items() if before.get(k) != v and k not in SHELL_OWN}
    return changed, [name for name in before if name not in after and name not in SHELL_OWN]
