"""`master_launch` and `orchestrator plan`: start a job, or print what it would be."""

from __future__ import annotations

import json

from orchestrator.config.launch import LaunchArguments
from orchestrator.errors import EXIT_DONE, UsageError
from orchestrator.head.commands import follow
from orchestrator.head.launch import launch as launching
from orchestrator.head.launch import nodes
from orchestrator.head.launch.planning import make_plan
from orchestrator.head.launch.request import resolve
from orchestrator.head.plan import dry_run, explain
from orchestrator.head.screen.output import say, tell


def launch(arguments: LaunchArguments) -> int:
    if arguments.dry_run:
        return show_plan(arguments, as_json=arguments.as_json)
    if arguments.as_json:
        raise UsageError("--json goes with --dry-run", "the running job is described in job.json")
    launched = launching.launch(resolve(arguments), say)
    if not arguments.detach:
        return follow.follow_launched(launched, arguments.view)
    say(f"{launched.record.job} runs on {len(launched.record.nodes)} nodes")
    say(f"follow it again: orchestrator attach {launched.experiment.name}")
    return EXIT_DONE


def show_plan(arguments: LaunchArguments, *, as_json: bool, explained: bool = False) -> int:
    """Reach the nodes and print what they would run; start nothing."""
    request = resolve(arguments)
    everybody = nodes.reach_all(request, needed=True)
    name = f"{request.config.launch.name}_dry-run"
    where = str(request.where.experiments.absolute() / name)
    made = make_plan(request, everybody.reached, everybody.spares, name, where)
    if as_json:
        tell(json.dumps(dry_run.to_json(made), indent=1))
    else:
        tell(explain.to_text(made) if explained else dry_run.to_text(made))
    return EXIT_DONE
