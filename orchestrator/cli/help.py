"""`orchestrator help`: the topics of docs/troubleshooting.md, and the topic of a message.

The page is the only table: a topic is a heading of the third level, and the words of the messages
that it explains stand first in its paragraphs, as code before a colon.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import EXIT_DONE, UsageError, nearest

AGENTS = Path(__file__).with_name("agents.md")
# A link to docs/troubleshooting.md; a wheel contains the file itself.
PAGE = Path(__file__).with_name("troubleshooting.md")
MESSAGES = re.compile(r"^(`[^`]+`(?:, `[^`]+`)*)[^`:\n]*:", re.MULTILINE)
# What stands for something else in the words of a message: dots, a name in capitals, a number.
OPEN = re.compile(r"\.\.\.|\b[A-Z]{3,}\b(?!_)|\b\d+\b|\bN\b")


@dataclass(frozen=True)
class Topic:
    """A section of the page."""

    name: str
    title: str
    part: str
    text: str

    @property
    def messages(self) -> list[str]:
        """Return the words of the messages that it explains."""
        return [
            word for group in MESSAGES.findall(self.text) for word in re.findall("`(.+?)`", group)
        ]


@functools.cache
def topics() -> dict[str, Topic]:
    found = {}
    for part in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading, *sections = re.split(r"^### ", part, flags=re.MULTILINE)
        for section in sections:
            title, _, text = section.partition("\n")
            name = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            found[name] = Topic(name, title, heading.partition("\n")[0], text.strip())
    return found


def topic_of(message: str) -> str:
    """Return the topic that explains the earliest known phrase in a message, or ""."""
    # The keys are positions in the message.
    explained: dict[int, str] = {}
    for topic in topics().values():
        for words in topic.messages:
            fixed = [re.escape(piece.strip()) for piece in OPEN.split(words)]
            if match := re.search(r"[^\n]*?".join(fixed), message):
                explained.setdefault(match.start(), topic.name)
    return explained[min(explained)] if explained else ""


def listed() -> str:
    lines = []
    for topic in topics().values():
        heading = f"{topic.part}:"
        if heading not in lines:
            lines += ["", heading]
        lines.append(f"  {topic.name}")
    return "\n".join(
        [
            *lines[1:],
            "  agents",
            "",
            "Type: orchestrator help TOPIC, or orchestrator COMMAND --help",
        ]
    )


def explained(name: str) -> str:
    if name == "agents":
        return AGENTS.read_text(encoding="utf-8").rstrip()
    topic = topics().get(name)
    if topic is None:
        known = nearest(name, topics())
        raise UsageError(f"no topic {name!r}{known}", "orchestrator help   lists them")
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", topic.text)
    return f"{topic.title}\n\n{plain}"


def show(text: str) -> int:
    from orchestrator.head.screen import output

    output.write_out(f"{text}\n")
    return EXIT_DONE
