"""An environment on a node, from wheels that are here, and what is typed to use it."""

import json

from tests.head.environments.test_requirements import wheel
from tests.launching import Command, Head


def bootstrap(head: Head, *words: str) -> Command:
    links = ("--find-links", str(head.directory), "--no-index")
    cache = str(head.directory / "cache")
    return head.command("orchestrator", "bootstrap", *links, *words, XDG_CACHE_HOME=cache)


def environments(command: Command) -> list[dict[str, object]]:
    text = "\n".join(command.lines)
    nodes: list[dict[str, object]] = json.loads(text[text.index("{\n") : text.rindex("}") + 1])[
        "nodes"
    ]
    return nodes


def test_bootstrap_makes_environment_once(head: Head) -> None:
    head.node_list = head.cluster.write_list(head.cluster.addresses[:1], "one.txt")
    wheel(head.directory, "mine", "1.0")
    (head.directory / "requirements.txt").write_text("mine\n")
    made = bootstrap(head, "--name", "first").ends()
    assert "activate=venv:" in made.text and "--activate bootstrap:first" in made.text
    again = bootstrap(head, "--json").ends()
    nodes = environments(again)
    assert len(nodes) == 1 and not nodes[0]["made"]
    path = str(nodes[0]["path"])
    seen = head.command("orchestrator", "nodes", "--activate", "bootstrap:first", "--json").ends()
    assert seen.text.count(f'"python": "{path}/bin/python"') == 1
    (head.directory / "requirements.txt").write_text("mine==2\n")
    unmet = bootstrap(head).ends(3)
    assert "No matching distribution found for mine==2" in unmet.text
    none = head.command("orchestrator", "nodes", "--activate", "bootstrap:second").ends(4)
    assert "orchestrator bootstrap makes it" in none.text
