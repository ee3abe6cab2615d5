"""Fill the page of an experiment, with the report's own readers and HTML."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.records.experiment import Experiment
from orchestrator.views.dashboard.listing import fingerprint
from orchestrator.views.report import page, story

Compared = Callable[[Sequence[Experiment]], Mapping[str, Mapping[str, Sequence[Any]]]]


@dataclass
class Page:
    """One experiment, or several side by side; it is read again only when a file has changed."""

    experiments: Sequence[Experiment]
    compared: Compared
    seen: list[Any] = field(default_factory=list)

    def look(self) -> bytes | None:
        """Return the parts of the page as JSON, packed; None: they are what they were."""
        now = [fingerprint(each) for each in self.experiments]
        if now == self.seen:
            return None
        text = json.dumps(self.parts(), separators=(",", ":"), allow_nan=False)
        self.seen = now
        return gzip.compress(text.encode(), 3, mtime=0)

    def parts(self) -> dict[str, Any]:
        several = len(self.experiments) > 1
        others = len(self.experiments) - 1
        told = [story.tell(each, others, logs=False) for each in self.experiments]
        drawn, data = page.pictures(told)
        differences = self.compared(self.experiments) if several else {}
        details = [
            *page.compared(told, differences),
            *(part for each in told for part in page.details(each, several=several)),
        ]
        return {
            "over": all(each.record.over for each in told),
            "heading": "".join(part for each in told for part in page.heading(each)),
            "drawn": drawn,
            "details": "".join(details),
            "data": data,
        }
