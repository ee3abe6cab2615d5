"""The process that carries a pool's calls: head/calls/exchange.py, started by api/pool.py."""

from __future__ import annotations

from typing import Any, NoReturn

from orchestrator.head.commands import background
from orchestrator.head.commands.background import Answers, where_of
from orchestrator.head.screen.keyboard import Keys


class Background(background.Background):
    """The end of the pipe in the program that calls."""

    module = __name__


def main(request: dict[str, Any]) -> NoReturn:
    background.serve({"calls": calls}, request, Keys)  # frames come through standard input


def calls(answers: Answers, keys: Keys, where: dict[str, str | bool], experiment: str) -> None:
    from orchestrator.head.calls.exchange import open_calls
    from orchestrator.head.commands.stop import end_job
    from orchestrator.head.status.find_job import adopt_job

    job = adopt_job(where_of(where), experiment)
    exchange = open_calls(job.transport, job.record, answers.out.fileno())
    answers.tell(open=True)
    exchange.run()
    if exchange.alive:  # in a call that does not end
        end_job(where_of(where), experiment, 0.0)
