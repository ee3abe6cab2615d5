"""What the commands share: options, the naming of the nearest word, completion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from orchestrator.errors import nearest

DEFAULT_CONFIG = "config/multi_node/distributed_two_nodes.yaml"
DEFAULT_HOOK = "scripts/multi_node/config_node.sh"


class Group(click.Group):
    """A group that names the nearest command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            known = self.list_commands(ctx)
            raise click.UsageError(f"no command {args[0]!r}{nearest(args[0], known)}")
        return super().resolve_command(ctx, args)


def experiment_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """For the shell's completion."""
    root = ctx.params.get("experiments") or Path("experiments")
    found = [path.parent.name for path in Path(root).glob("*/job.json")]
    return sorted(name for name in found if name.startswith(incomplete))


NODE_LIST = click.option(
    "--nodes",
    type=click.Path(path_type=Path),
    default="node_ip_list.txt",
    show_default=True,
    help="The node list; its first node is the master.",
)


def shared(
    function: Callable[..., Any], node_list: Callable[..., Any] = NODE_LIST
) -> Callable[..., Any]:
    """--nodes, --ssh-config, --experiments: the same for every command."""
    path = click.Path(path_type=Path)
    for option in (
        click.option(
            "--experiments",
            type=path,
            default="experiments",
            show_default=True,
            help="Directory of all experiments.",
        ),
        click.option(
            "--ssh-config",
            type=path,
            default=None,
            help="An ssh_config file to use instead of yours.",
        ),
        node_list,
    ):
        function = option(function)
    return function
