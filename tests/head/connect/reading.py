"""Helper that makes a test read an ssh_config again, as each command does."""

from __future__ import annotations

from orchestrator.head.connect import ssh_config


def read_again() -> None:
    for remembered in (
        ssh_config._ask_once,
        ssh_config._same_for_all,
        ssh_config.SshConfig.last_hop,
    ):
        remembered.cache_clear()  # type: ignore[attr-defined]
