"""The results of a command on many nodes, as a script reads them."""

from orchestrator.head.commands.machines.exec import Stream, as_json
from orchestrator.head.exec.execution import ExecOutcome
from orchestrator.head.nodes.node_list import Node, NumberedNode


def test_as_json_has_same_keys_for_every_node() -> None:
    node = NumberedNode(0, Node("n"))
    stream = Stream()
    stream.write(b"hi\xff\n")
    reached = as_json(ExecOutcome(node, 0), {(0, False): stream})
    assert (reached["stdout"], reached["stdout_bytes"]) == ("hi\N{REPLACEMENT CHARACTER}\n", 4)
    lost = as_json(ExecOutcome(node, problem="it is down", lost=True), {})
    assert (lost["stdout"], lost["stdout_bytes"], lost["stderr_bytes"]) == ("", 0, 0)
    assert list(lost) == list(reached)
