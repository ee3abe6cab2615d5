"""`orchestrator help`: the topics of docs/troubleshooting.md, the guide, and a search in both.

The page is the only table: a topic is a heading of the third level, and the words of the messages
that it explains stand first in its paragraphs, as code before a colon.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import EXIT_DONE, UsageError, did_you_mean
from orchestrator.common.text import align_columns

AGENTS = Path(__file__).with_name("agents.md")
# A link to docs/troubleshooting.md; a wheel contains the file itself.
PAGE = Path(__file__).with_name("troubleshooting.md")
# A link to docs/guide.
GUIDE = Path(__file__).with_name("guide")
MOST_FOUND = 6
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
def read_topics() -> dict[str, Topic]:
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
    for topic in read_topics().values():
        for words in topic.messages:
            fixed = [re.escape(piece.strip()) for piece in OPEN.split(words)]
            if match := re.search(r"[^\n]*?".join(fixed), message):
                explained.setdefault(match.start(), topic.name)
    return explained[min(explained)] if explained else ""


@functools.cache
def read_pages() -> dict[str, str]:
    """Return the page for agents, and those of the guide by names such as guide/environments."""
    files = {
        "agents": AGENTS,
        **{f"guide/{file.stem}": file for file in sorted(GUIDE.glob("*.md"))},
    }
    return {name: file.read_text(encoding="utf-8") for name, file in files.items()}


def search_topics(words: Sequence[str], options: Mapping[str, str]) -> str:
    """Return the topics, pages and options that have most of these words, the best first."""
    long = [word for word in words if len(word) > 3]
    # A word of the text may go on: sweep finds sweeps.
    wanted = [rf"\b{re.escape(word.lower().strip('?.,'))}" for word in long or words]
    texts = {
        name: f"{topic.title}\n{topic.text}" for name, topic in read_topics().items()
    } | read_pages()

    def score(text: str) -> tuple[int, int]:
        title, _, rest = text.lower().partition("\n")
        found = [(len(re.findall(w, title)), len(re.findall(w, rest))) for w in wanted]
        return sum(map(any, found)), sum(20 * named + count for named, count in found)

    best = sorted(texts, key=lambda name: score(texts[name]), reverse=True)[:MOST_FOUND]
    rows = [
        (f"orchestrator help {name}", texts[name].partition("\n")[0].lstrip("# "))
        for name in best
        if any(score(texts[name]))
    ]
    flags = sorted(options, key=lambda name: score(f"{name}\n{options[name]}"), reverse=True)
    rows += [
        (f"  {name}", options[name].partition(" [default")[0])
        for name in flags[:MOST_FOUND]
        if score(f"{name}\n{options[name]}")[0] == len(wanted)
    ]
    return "\n".join(align_columns(rows))


def list_topics() -> str:
    parts: dict[str, list[str]] = {}
    for topic in read_topics().values():
        parts.setdefault(topic.part, []).append(topic.name)
    parts["Pages"] = list(read_pages())
    blocks = ["\n  ".join([f"{part}:", *names]) for part, names in parts.items()]
    last = "Type: orchestrator help TOPIC or WORD..., or orchestrator COMMAND --help"
    return "\n\n".join([*blocks, last])


def explain_topic(words: Sequence[str], options: Mapping[str, str]) -> str:
    """Return a topic or a page by its name, else what a search for the words finds."""
    name = " ".join(words)
    topic, page = (
        read_topics().get(name),
        read_pages().get(name) or read_pages().get(f"guide/{name}"),
    )
    if topic is None and page is None:
        found = search_topics(words, options)
        if not found:
            known = did_you_mean(name, [*read_topics(), *read_pages()])
            raise UsageError(f"no topic {name!r}{known}", "orchestrator help   lists them")
        return f"{name!r} is no topic; it stands in:\n\n{found}"
    text = f"{topic.title}\n\n{topic.text}" if topic else page or ""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text).rstrip()


def show_text(text: str) -> int:
    from orchestrator.head.screen import output

    output.write_out(f"{text}\n")
    return EXIT_DONE
