"""Clusters for tests: `loopback_cluster(2)`, `netns_cluster(2)`, `two_nodes` of the better kind.

What a fault verb did to `two_nodes` has to be undone by the test that did it: a module shares them.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.clusters.loopback import FaultyLoopback
from tests.clusters.netns import NetnsCluster
from tests.clusters.require import require_namespaces, require_sshd
from tests.gears import EXAMPLES, SHARE, dealt, gear, none_in_first_gear
from tests.launching import Head
from tests.rows import as_one

Cluster = FaultyLoopback | NetnsCluster

# Modules and tests stay to the end: looks for garbage pass them by, and are rare. It saves a tenth.
gc.disable()

os.environ["OMP_NUM_THREADS"] = "1"  # several ranks on few cores: more threads only fight
for name in ("CONFIG_FILE", "MASTER_PORT", "NPROC_PER_NODE"):
    os.environ.pop(name, None)  # a developer's own setting is not the test's
# What a head keeps for its login (machines, keys, connections) is not that of whoever runs this.
os.environ["ORCHESTRATOR_HOME"] = tempfile.mkdtemp(prefix="orch-tests-")
atexit.register(shutil.rmtree, os.environ["ORCHESTRATOR_HOME"], ignore_errors=True)
# How long one example takes says nothing on a machine that does other work.
# The same examples in every run: a suite that is red by chance helps nobody.
for name, share in (("gear", SHARE), ("all", 1)):
    hypothesis.settings.register_profile(
        name, max_examples=EXAMPLES // share, deadline=None, derandomize=True
    )
# A shell ignores Ctrl-C for what it runs in the background, nohup hang-ups; a program inherits what
# is ignored and not what is handled, so that all that the tests start is as in a terminal.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(number) == signal.SIG_IGN:
        handler = signal.default_int_handler if number == signal.SIGINT else lambda *_: None
        signal.signal(number, handler)


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("gear" if config.option.markexpr else "all")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The first gear does not import modules that it runs nothing of."""
    name = collection_path.relative_to(config.rootpath).as_posix()
    first = config.option.markexpr == "fast"
    return True if first and none_in_first_gear(name, collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Each worker begins to import the modules at another place.

    pytest rewrites the asserts of each module once and keeps them. In a new clone all workers would
    rewrite the same one at the same time.
    """
    config = session.config
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    if not worker:
        return
    roots = [config.rootpath / arg for arg in config.args]
    files = sorted({path for root in roots for path in root.rglob("test_*.py")})
    files = [path for path in files if not pytest_ignore_collect(path, config)]
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for path in files[first:] + files[:first]:
        with suppress(Exception, pytest.skip.Exception):  # which the collection itself will tell
            importlib.import_module(
                ".".join(path.relative_to(config.rootpath).with_suffix("").parts)
            )


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> pytest.Function | None:
    return as_one(collector, name, obj) if isinstance(collector, pytest.Module) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    for item in items:
        if name := gear(item):
            item.add_marker(name)
    yield  # pytest drops those of other gears
    items[:] = dealt(items, getattr(config, "workerinput", {}).get("workercount", 0))


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
    """`netns_cluster(size, slots=..., tmpfs=..., nics=..., second_nic=...)`: true hosts; root."""
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
