"""`orchestrator init`: choose machines, test each login, write the node list, check it.

The list is written once, when every login works. An end before that leaves nothing behind.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import EXIT_DONE, NodeError, OrchestratorError, UsageError
from orchestrator.common.hosts import join_names
from orchestrator.common.program import typed_command
from orchestrator.common.text import plural
from orchestrator.config.launch import LaunchArguments, Where, said_by_shell
from orchestrator.head.commands.machines import nodes as commands
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.environments import command as environments
from orchestrator.head.init import machines, offers
from orchestrator.head.init.machines import SeenMachine
from orchestrator.head.nodes.node_list import Node, parse_nodes, read_nodes
from orchestrator.head.screen import failures, output
from orchestrator.head.screen.events import say
from orchestrator.head.start.nodes import ListedNodes, Nodes, reach_given_nodes
from orchestrator.head.start.request import LaunchRequest, resolve_request

UNASKED = "name the machines: orchestrator init gpu1 gpu2 --yes"
PACKAGES = ("torch", "numpy")


def make_node_list(arguments: LaunchArguments, hosts: Sequence[str], *, yes: bool) -> int:
    """Make the node list of these hosts, or of those that the user chooses on the terminal."""
    path = arguments.where.node_list
    asks = sys.stdin.isatty() and not yes
    if not may_write(path, asks):
        say(f"{output.short_path(path)} stays as it is: `orchestrator doctor` checks its machines")
        return EXIT_DONE
    config = SshConfig(arguments.where.ssh_config)
    request = resolve_request(arguments)
    wanted = parse_nodes("\n".join(hosts), "the command line") if hosts else choose(config, asks)
    given = {key: value for key, value in arguments.launch.items() if key in machines.OPTIONS}
    wanted = tuple(replace(node, **given) for node in wanted)
    seen = reach(request, config, wanted, asks)
    output.write_out(machines.MACHINES.text(seen, output.terminal_of()))
    files.replace_file(path, machines.text_of(seen), 0o644)
    say(
        f"wrote {output.short_path(path)}: {plural(len(seen), 'machine')}, {seen[0].node.name}"
        " first"
    )
    give_torch(arguments, seen, asks)
    code = commands.run_doctor(arguments, full=False, hints=True)
    say(f"{'when that is mended' if code else 'now'} type: {launch_line(arguments.where)}")
    return code


def may_write(path: Path, asks: bool) -> bool:
    """Return False if the user keeps the list that there is; raise if none can be written."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written", "name another file: --nodes FILE")
    if not path.exists():
        return True
    if not asks:
        raise UsageError(
            f"{path} already exists, and is not overwritten",
            "`orchestrator nodes` shows its machines; --nodes FILE names another list",
        )
    try:
        what = f"lists {plural(len(read_nodes(path)), 'machine')}"
    except UsageError:
        what = "already exists"
    return output.user_agrees(f"{output.short_path(path)} {what}. Write a new one in its place?")


# -- the machines ---------------------------------------------------------------------------------


def choose(config: SshConfig, asks: bool) -> tuple[Node, ...]:
    """Show the machines that ssh knows, and return those that the user names."""
    if not asks:
        raise UsageError("no machine was named", UNASKED)
    known = offers.find_offers(config)
    rows = [[f"{number}", one.name, one.source] for number, one in enumerate(known, 1)]
    if rows:
        output.write_out("Machines that your ssh knows:\n")
        output.write_out(output.format_table(rows, right=[0], indent=2) + "\n")
    output.write_out(
        f"Which of them train, the master first? {'Numbers or names' if rows else 'Names'}, such"
        f" as: {'1-2 ' * (len(rows) > 1)}gpu[01-04] ada@10.0.0.7:2222\n"
    )
    while True:
        answer = ask(">")
        try:
            if answer:
                return offers.chosen_nodes(answer, known)
        except UsageError as error:
            output.complain(f"{error}")


def ask(question: str) -> str:
    """Return the user's answer; an input that has ended is an error, as no question is answered."""
    answer = output.read_answer(question)
    if answer is None:
        raise UsageError("the input has ended: nothing was written", UNASKED)
    return answer


def reach(
    request: LaunchRequest, config: SshConfig, wanted: Sequence[Node], asks: bool
) -> list[SeenMachine]:
    """Log in to the machines until each lets us in, and return what they are."""
    while True:
        strict = request.config.launch.strict_host_keys
        nodes = reach_given_nodes(request, ListedNodes(tuple(wanted), config.file, strict), wanted)
        try:
            if nodes.lost:
                wanted = mend(config, nodes, wanted, asks)
                continue
            pairs = zip(nodes.reached, wanted, strict=True)
            better = [machines.node_with_torch(reached.facts, node) for reached, node in pairs]
            if better == list(wanted):
                return machines.reached_machines(request, nodes, wanted)
            changed = [new.name for new, old in zip(better, wanted, strict=True) if new != old]
            say(f"another Python on {join_names(changed)} has torch: the list names it")
            wanted = better
        finally:
            for one in nodes.reached:
                one.channel.connection.close()


def mend(config: SshConfig, nodes: Nodes, wanted: Sequence[Node], asks: bool) -> list[Node]:
    """Return the machines to try next: the user has mended, replaced or dropped those lost."""
    if not asks:
        then = "; nothing was written"
        raise NodeError(failures.failure_table(nodes.lost, len(wanted), then))
    say(f"{len(nodes.reached)} of {plural(len(wanted), 'machine')} let us in")
    instead = {node.name: repaired(config, node, error) for node, error in nodes.lost}
    left = [each for node in wanted for each in instead.get(node.name, (node,))]
    if not left:
        raise UsageError("no machine is left: nothing was written", UNASKED)
    return left


def repaired(config: SshConfig, node: Node, error: OrchestratorError) -> tuple[Node, ...]:
    """Ask what to do about a machine that does not let us in; return what to try in its place."""
    output.complain(f"\n{node.name}: {error}")
    copies = "ssh-copy-id" in error.fix
    key = "c copies your key there by ssh-copy-id, " * copies
    while True:
        answer = ask(f"Enter tries again, {key}- leaves it out, user@host:port replaces it:")
        if answer == "-":
            return ()
        if copies and answer == "c":
            copy_key(config, node)
        if not answer or answer == "c":
            return (node,)
        try:
            found = parse_nodes(answer, "the answer")
        except UsageError as wrong:
            output.complain(f"{wrong}")
        else:
            return tuple(replace(node, host=n.host, user=n.user, port=n.port) for n in found)


def copy_key(config: SshConfig, node: Node) -> None:
    """Let the user's ssh-copy-id ask for the password; make a key first if there is none."""
    there = config.of_node(node)
    # ssh-copy-id keeps a file of its own there while it runs.
    (Path.home() / ".ssh").mkdir(mode=0o700, exist_ok=True)
    public = [key.with_name(f"{key.name}.pub") for key in there.keys]
    mine = next((key for key in public if key.is_file()), None)
    copy = ["ssh-copy-id", "-p", str(there.port), *(["-i", str(mine)] if mine else [])]
    copy += [*(["-F", str(config.file)] if config.file else []), f"{there.user}@{node.host}"]
    has_key = mine is not None or os.environ.get("SSH_AUTH_SOCK")
    for command in [copy] if has_key else [["ssh-keygen", "-t", "ed25519"], copy]:
        output.complain(f"$ {shlex.join(command)}")
        try:
            subprocess.run(command, check=False)
        except OSError as error:
            output.complain(f"{command[0]}: {error.strerror}")


# -- what comes after the list --------------------------------------------------------------------


def give_torch(arguments: LaunchArguments, seen: Sequence[SeenMachine], asks: bool) -> None:
    """Bootstrap the machines where torch is missing, if the user agrees."""
    lacking = [one.node.name for one in seen if not one.facts.torch]
    command = shlex.join([*typed_command("orchestrator"), "bootstrap", *PACKAGES])
    if not lacking:
        return
    say(f"there is no torch on {join_names(lacking)}: `{command}` makes an environment with it")
    if not asks or output.user_agrees("Make it now? It downloads some gigabytes, here."):
        environments.bootstrap_nodes(arguments, PACKAGES, name="", find_links=(), index=True)


def launch_line(where: Where) -> str:
    """Return the command that launches a script of this directory on the new list."""
    words = typed_command("master_launch")
    for name in ("nodes", "ssh_config"):
        value = getattr(where, name)
        if value is not None and said_by_shell(Where, name) is None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    scripts = sorted(path.name for path in Path.cwd().glob("*.py"))
    script = scripts[0] if len(scripts) == 1 else "train.py"
    return shlex.join([*words, script])
