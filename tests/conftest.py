"""Clusters for tests: `loopback_cluster(2)`, `netns_cluster(2)`, `two_nodes` of the better kind.

A test undoes its own fault in `two_nodes`, because the tests of a module share them.
"""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.clusters.loopback import FaultyLoopback
from tests.clusters.netns import NetnsCluster
from tests.clusters.require import require_namespaces, require_sshd
from tests.launching import Head

Cluster = FaultyLoopback | NetnsCluster

# Modules and tests stay to the end: looks for garbage pass them by, and are rare. It saves a tenth.
gc.disable()

# With several ranks on few cores, more threads only compete.
os.environ["OMP_NUM_THREADS"] = "1"
for name in ("CONFIG_FILE", "MASTER_PORT", "NPROC_PER_NODE"):
    # A developer's own settings must not reach the tests.
    os.environ.pop(name, None)
# A head's files for its login (machines, keys, connections) are not the developer's own.
os.environ["ORCHESTRATOR_HOME"] = tempfile.mkdtemp(prefix="orch-tests-")
atexit.register(shutil.rmtree, os.environ["ORCHESTRATOR_HOME"], ignore_errors=True)
# How long an example takes says nothing on a busy machine, and every run tries the same examples.
hypothesis.settings.register_profile("suite", max_examples=20, deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")
# A shell ignores Ctrl-C for what it runs in the background, nohup hang-ups; a program inherits what
# is ignored and not what is handled, so that all that the tests start is as in a terminal.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(number) == signal.SIG_IGN:
        handler = signal.default_int_handler if number == signal.SIGINT else lambda *_: None
        signal.signal(number, handler)


def pytest_runtest_teardown() -> None:
    # A training in this process sets these, and commands of later tests would inherit them.
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture
def loopback_cluster(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., FaultyLoopback]]:
    """`loopback_cluster(size, slots=..., port=...)`: sshd on 127.0.0.2, .3, ...; any user."""
    require_sshd()
    with ExitStack() as running:

        def start(size: int = 2, **options: Any) -> FaultyLoopback:
            directory = tmp_path_factory.mktemp("loopback")
            return running.enter_context(FaultyLoopback(size, directory, **options))

        yield start


@pytest.fixture
def netns_cluster(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., NetnsCluster]]:
    """`netns_cluster(size, slots=..., tmpfs=..., second_nic=...)`: true hosts; root."""
    require_namespaces()
    with ExitStack() as running:

        def start(size: int = 2, **options: Any) -> NetnsCluster:
            directory = tmp_path_factory.mktemp("netns")
            return running.enter_context(NetnsCluster(size, directory, **options))

        yield start


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two running hosts, for one module: in namespaces as root, else on loopback addresses."""
    require_sshd()
    if os.geteuid() == 0:
        require_namespaces()
    kind = NetnsCluster if os.geteuid() == 0 else FaultyLoopback
    with kind(2, tmp_path_factory.mktemp("two")) as cluster:
        yield cluster


@pytest.fixture
def head(two_nodes: Cluster, tmp_path: Path) -> Iterator[Head]:
    """Someone at the head node of `two_nodes`, in an empty directory."""
    someone = Head(two_nodes, tmp_path)
    yield someone
    someone.end_background()
