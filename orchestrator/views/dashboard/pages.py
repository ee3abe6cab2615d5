"""The pages: the live parts of an experiment's, made as the report makes them, and what is around.

The HTML is in web/, and every value is escaped. No page has a script of its own, as its policy
allows only the files of this server.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.records.experiment import Experiment
from orchestrator.views.dashboard.listing import fingerprint
from orchestrator.views.report import page, story
from orchestrator.views.templates import templates_in

WEB = Path(__file__).parent / "web"
TEMPLATES = templates_in(WEB)

Compared = Callable[[Sequence[Experiment]], Mapping[str, Mapping[str, Sequence[Any]]]]


def html(name: str, **values: Any) -> str:
    """Return a whole page."""
    return TEMPLATES.get_template(f"{name}.html").render(kind=name, **values)


@dataclass
class Page:
    """One experiment, or several side by side; it is read again only when a file has changed."""

    experiments: Sequence[Experiment]
    compared: Compared
    seen: list[Any] = field(default_factory=list)

    def render(self) -> bytes | None:
        """Return the parts of the page as JSON, packed; None: they are what they were."""
        now = [fingerprint(experiment) for experiment in self.experiments]
        if now == self.seen:
            return None
        text = json.dumps(self.parts(), separators=(",", ":"), allow_nan=False)
        self.seen = now
        return gzip.compress(text.encode(), 3, mtime=0)

    def parts(self) -> dict[str, Any]:
        several = len(self.experiments) > 1
        stories = [
            story.read_story(experiment, len(self.experiments) - 1, logs=False)
            for experiment in self.experiments
        ]
        pictures = page.pictures(stories)
        differences = self.compared(self.experiments) if several else {}
        details = (page.part("details", experiment, several) for experiment in stories)
        return {
            "cause": next((found.node for one in stories if (found := page.cause(one))), None),
            "over": all(experiment.record.over for experiment in stories),
            "heading": page.part("runs", stories) if several else page.part("heading", stories[0]),
            "drawn": page.part("drawn", pictures, several),
            "details": page.part("compared", stories, differences) + "".join(details),
            "data": pictures.to_json(),
        }
