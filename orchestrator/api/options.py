"""The keywords of Cluster and Cluster.launch.

Made by `scripts/config_reference.py` from the definitions in config/launch.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypedDict

StrPath = str | os.PathLike[str]


class Options(TypedDict, total=False):
    """The options of `master_launch`, by their names in a config's section `launch:`."""

    config: StrPath
    set: Mapping[str, object]
    env: Mapping[str, str]
    env_file: Sequence[StrPath]
    env_pass: Sequence[str]
    secret: Sequence[str]
    name: str
    nproc: int
    nnodes: str | int
    gpus: int
    claim: str
    queue: bool
    after: tuple[str, ...]
    check: str
    python: StrPath
    activate: str
    wrap: str
    workdir: StrPath
    sync: str
    hook: StrPath
    start: str
    rank_env: str
    no_torchrun: bool
    warm: str
    node_loss_timeout: float
    on_node_loss: str
    hang_timeout: float
    on_hang: str
    max_restarts: int
    time_limit: str
    grace: float
    notify: Sequence[str]
    note: str
    tag: tuple[str, ...]
    master_port: int
    connect_timeout: float
    strict_host_keys: bool
