"""The results of a node's probe, as the plan wants them. Equal machines give equal parts."""

from __future__ import annotations

import functools
import ipaddress
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestrator.common.errors import CheckFailed
from orchestrator.common.hosts import listed
from orchestrator.head.nodes.node_list import Node
from orchestrator.protocol.facts import Interface
from orchestrator.protocol.message import decode, encode
from orchestrator.protocol.requests.machine import Probed


class Facts(Probed):
    """One machine: what its node reported, and how far its clock is from the head's."""

    clock_offset: float = 0.0  # the node's clock minus the head's, seconds

    @property
    def target_kind(self) -> str:
        return self.target.kind

    @property
    def target_name(self) -> str:
        return self.target.name

    def to_json(self) -> dict[str, Any]:
        data = encode(self, nones=True)
        del data["target"], data["time"]
        return {**data, "target_kind": self.target_kind, "target_name": self.target_name}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Facts:
        """Return what to_json() was made of, but for the time."""
        target = {"kind": data.get("target_kind"), "name": data.get("target_name")}
        return decode(cls, {**data, "target": target, "time": 0.0}, newer=True)

    def interface(self, name: str) -> Interface | None:
        return next((interface for interface in self.interfaces if interface.name == name), None)

    @property
    def machine(self) -> tuple[str, int]:
        """Return what is the same for two names that lead to one network stack."""
        return self.boot, self.network

    def same_machine(self, other: Facts) -> bool:
        """Tell whether two names lead to one network stack."""
        return bool(self.boot) and self.machine == other.machine


# -- probed node --------------------------------------------------------------------------------
# A node of the list together with what was learned about it when it was reached.

NEWEST = "/environments/newest/bin/python"  # of `orchestrator bootstrap`
PLAIN = re.compile(r"~?(/[\w.+-]+)+")  # a path that a shell and a node list take as it is
# Bridges of containers, which may have the same addresses on every machine.
OWN_BRIDGES = ("docker", "virbr", "br-", "cni", "podman", "lxcbr", "flannel", "veth")

N = TypeVar("N")
V = TypeVar("V")


@dataclass(frozen=True)
class ProbedNode:
    """A node, its facts, and the IP address by which the head reached it ("" via a jump host)."""

    node: Node
    facts: Facts
    reached: str
    way: str = ""  # by which program, and why: for `plan --explain`

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def ifname(self) -> str | None:
        """The interface that the user chose in the node list."""
        return self.node.ifname


@functools.cache
def is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address).is_loopback


def release(version: str) -> tuple[int, ...] | None:
    """Return the first two numbers of a version: (2, 13) for 2.13.0+cu130."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else None


def names(nodes: Sequence[ProbedNode]) -> str:
    return listed([node.name for node in nodes])


def by_value(values: Iterable[tuple[N, V]]) -> dict[V, list[N]]:
    """Return the nodes of each value, of pairs of a node (or its name) and its value."""
    found: dict[V, list[N]] = {}
    for node, value in values:
        found.setdefault(value, []).append(node)
    return found


def said_of(words: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield what is said of nodes, of pairs of a name and words, once for those that are alike."""
    for each, where in by_value(words).items():
        if each:
            yield f"{listed(where)}: {each}"


def no_torch(nodes: Sequence[ProbedNode]) -> CheckFailed:
    """Return the error for nodes of which the Python of some has no torch."""
    without = [node for node in nodes if not node.facts.torch]
    lacking = by_value((node.name, node.facts.python) for node in without)
    version = next((node.facts.torch for node in nodes if node.facts.torch), "")
    return CheckFailed(
        "there is no torch on: "
        + ", ".join(f"{listed(where)} ({python})" for python, where in lacking.items()),
        how_to_get_torch({node.name: node.facts for node in without}, version),
    )


def how_to_get_torch(without: Mapping[str, Facts], version: str) -> str:
    """Say what to type for nodes whose Python has no torch; the others have this version."""
    found = {
        name: python
        for name, facts in without.items()
        for python in reversed(facts.torch_elsewhere)
        if PLAIN.fullmatch(python)
    }
    if found and all(python.endswith(NEWEST) for python in found.values()):
        return "orchestrator bootstrap made an environment with it there: --activate bootstrap"
    if found:
        places = "; ".join(f"{name} python={python}" for name, python in found.items())
        return f"these have it, as lines of the list: {places}"
    return (
        f"{bootstrap_words('', version)}   makes an environment with it on every node; a"
        " requirements.txt does as well\n  or name a Python that has it: --python /path/to/python,"
        " or python=/path in the list"
    )


# -- missing packages ------------------------------------------------------------------------------

# Packages whose name is not that of their module.
INSTALLED_AS = {
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
    "hydra": "hydra-core",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
MODULE = re.compile(r"No module named ['\"]?([A-Za-z_]\w*)")


def is_package_missing(message: str) -> bool:
    """Return True for an error that says that a package is not installed."""
    return "No module named" in message


def bootstrap_words(module: str = "", torch: str = "") -> str:
    """Return the command that makes an environment with this module and torch on all nodes.

    `torch` is the version that nodes have now; its build is that of the index.
    """
    release = torch.partition("+")[0]
    package = INSTALLED_AS.get(module, module.replace("_", "-"))
    words = [f"torch=={release}" if release else "torch", "numpy", package]
    return shlex.join(["orchestrator", "bootstrap", *filter(None, dict.fromkeys(words))])


def how_to_get_package(message: str, *, everywhere: bool) -> str:
    """Return what to do about a missing module, by the message of Python's error.

    Not `everywhere`: a rank lacks it, and the job was over before others could look for it.
    """
    match = MODULE.search(message)
    module = match[1] if match else ""
    who = "no node has it" if everywhere else f"{module or 'it'} is missing there, if nowhere else"
    return (
        f"{who}: `{bootstrap_words(module)}`, with what else the program imports, makes the same"
        " environment on all nodes (--activate bootstrap); or install it there for the Python that"
        " the job runs (--python chooses another), or say where it is with --env PYTHONPATH=DIR"
    )
