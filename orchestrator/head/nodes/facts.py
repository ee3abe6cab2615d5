"""The results of a node's probe, in the form that the plan uses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestrator.common.errors import CheckFailed
from orchestrator.common.hosts import join_names
from orchestrator.head.nodes.node_list import Node
from orchestrator.protocol.facts import Interface
from orchestrator.protocol.message import decode_value, encode_value
from orchestrator.protocol.requests.machine import Probed


class Facts(Probed):
    """The facts that a node reported, and the offset of its clock."""

    # The node's clock minus the head's, in seconds.
    clock_offset: float = 0.0

    @property
    def target_kind(self) -> str:
        return self.target.kind

    @property
    def target_name(self) -> str:
        return self.target.name

    def to_json(self) -> dict[str, Any]:
        data = encode_value(self, nones=True)
        del data["target"]
        return {**data, "target_kind": self.target_kind, "target_name": self.target_name}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Facts:
        """Return the facts that to_json() wrote."""
        target = {"kind": data.get("target_kind"), "name": data.get("target_name")}
        return decode_value(cls, {**data, "target": target, "time": 0.0}, newer=True)

    def interface(self, name: str) -> Interface | None:
        return next((interface for interface in self.interfaces if interface.name == name), None)

    @property
    def machine(self) -> tuple[str, int]:
        """Return the identity of the network stack: boot and network namespace."""
        return self.boot, self.network

    def same_machine(self, other: Facts) -> bool:
        """Return True if two nodes are the same network stack under two names."""
        return bool(self.boot) and self.machine == other.machine


# -- probed node --------------------------------------------------------------------------------
# A node of the list with the facts that were probed when it was reached.

# The newest environment of `orchestrator bootstrap`.
NEWEST = "/environments/newest/bin/python"
# A path that needs no quotes in a shell or a node list.
PLAIN = re.compile(r"~?(/[\w.+-]+)+")
# Bridges of containers and VMs, which may have the same addresses on every machine.
OWN_BRIDGES = ("docker", "virbr", "br-", "cni", "podman", "lxcbr", "flannel", "veth")

N = TypeVar("N")
V = TypeVar("V")


@dataclass(frozen=True)
class ProbedNode:
    """A node, its facts, and the IP address by which the head reached it ("" via a jump host)."""

    node: Node
    facts: Facts
    reached: str
    # The program that reached it and the reason, for `plan --explain`.
    way: str = ""

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def ifname(self) -> str | None:
        """Return the interface that the user chose in the node list."""
        return self.node.ifname


def version_release(version: str) -> tuple[int, ...] | None:
    """Return the first two numbers of a version: (2, 13) for 2.13.0+cu130."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else None


def node_names(nodes: Sequence[ProbedNode]) -> str:
    return join_names([node.name for node in nodes])


def nodes_by_value(values: Iterable[tuple[N, V]]) -> dict[V, list[N]]:
    """Return {value: nodes} from pairs of a node (or its name) and a value."""
    found: dict[V, list[N]] = {}
    for node, value in values:
        found.setdefault(value, []).append(node)
    return found


def lines_by_node(words: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each distinct text, with its nodes, from pairs of a name and a text."""
    for each, where in nodes_by_value(words).items():
        if each:
            yield f"{join_names(where)}: {each}"


def no_torch(nodes: Sequence[ProbedNode]) -> CheckFailed:
    """Return the error that names the nodes whose Python has no torch, with a fix."""
    without = [node for node in nodes if not node.facts.torch]
    lacking = nodes_by_value((node.name, node.facts.python) for node in without)
    version = next((node.facts.torch for node in nodes if node.facts.torch), "")
    return CheckFailed(
        "there is no torch on: "
        + ", ".join(f"{join_names(where)} ({python})" for python, where in lacking.items()),
        how_to_get_torch({node.name: node.facts for node in without}, version),
    )


def how_to_get_torch(without: Mapping[str, Facts], version: str) -> str:
    """Return the fix for nodes whose Python has no torch.

    `version` is the torch of the other nodes, or "".
    """
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
    """Return True if an error message says that a package is not installed."""
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
    """Return the fix for a missing module, from the message of Python's error.

    If not `everywhere`, one rank lacks it, and the job ended before the other nodes were checked.
    """
    match = MODULE.search(message)
    module = match[1] if match else ""
    who = "no node has it" if everywhere else f"{module or 'it'} is missing there, if nowhere else"
    return (
        f"{who}: `{bootstrap_words(module)}`, with what else the program imports, makes the same"
        " environment on all nodes (--activate bootstrap); or install it there for the Python that"
        " the job runs (--python chooses another), or say where it is with --env PYTHONPATH=DIR"
    )
