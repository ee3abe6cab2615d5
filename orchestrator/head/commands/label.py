"""`orchestrator label`: note what an experiment was for, and tag it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from orchestrator.common.errors import EXIT_DONE
from orchestrator.config.launch import Where
from orchestrator.head.screen import output
from orchestrator.head.screen.output import Terminal
from orchestrator.records import experiments, labels
from orchestrator.records.labels import Label


def label(
    where: Where,
    wanted: str | None,
    *,
    note: str | None,
    tags: Sequence[str],
    without: Sequence[str],
    as_json: bool,
) -> int:
    """Change what is said of an experiment; without a change, show it."""
    experiment = experiments.known(where.experiments, wanted, trusted=where.trust_record)
    record = experiment.read_record()
    if note is None and not tags and not without:
        found = labels.of(experiment, record)
    else:
        found = labels.change(experiment, record, note=note, tags=tags, without=without)
    data = {"experiment": experiment.name, **asdict(found)}
    output.result(data, partial(to_text, experiment.name, found), as_json=as_json, color=None)
    return EXIT_DONE


def to_text(name: str, found: Label, terminal: Terminal) -> str:
    tags = ", ".join(found.tags) or "none"
    return f"{name}\n  note: {found.note or 'none'}\n  tags: {tags}"
