"""Finds out which firewall manages this machine, from files that anybody may read."""

from __future__ import annotations

import os
import re

from orchestrator.node.facts import sysfs

UFW = "/etc/ufw/ufw.conf"
# A service that runs has a control group; firewalld without a pid file has only that.
FIREWALLD = (
    "/sys/fs/cgroup/system.slice/firewalld.service",
    "/sys/fs/cgroup/systemd/system.slice/firewalld.service",
    "/run/firewalld.pid",
)


def firewall(root: str = "") -> str:
    """Return "ufw", "firewalld", or nothing where neither of them runs."""
    if any(os.path.exists(root + path) for path in FIREWALLD):
        return "firewalld"
    enabled = re.search(r"^ENABLED=['\"]?yes", sysfs.text(root + UFW), re.MULTILINE | re.IGNORECASE)
    return "ufw" if enabled else ""
