"""Helpers for tests of SSH: an ssh_config is read again, as by each command, and keys are made."""

import subprocess

from orchestrator.head.connect import ssh_config


def read_again() -> None:
    for remembered in (
        ssh_config._ask_once,
        ssh_config._same_for_all,
        ssh_config.SshConfig.last_hop,
    ):
        remembered.cache_clear()  # type: ignore[attr-defined]


def keygen(*words: object) -> None:
    subprocess.run(["ssh-keygen", "-q", *map(str, words)], check=True, capture_output=True)
