"""The pages that describe the code are held to it."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from orchestrator.cli.help import read_topics
from orchestrator.cli.main import cli

ROOT = Path(__file__).parents[1]
HOUSE = (ROOT / "docs/decisions/house.md").read_text(encoding="utf-8")

DESIGN = (ROOT / "docs/design.md").read_text(encoding="utf-8")


def table(title: str) -> list[list[str]]:
    """The rows of the table under a heading, without its two head lines."""
    section = HOUSE.partition(f"## {title}")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_change_table_names_existing_paths() -> None:
    rows = table("Where do I change ...")
    paths = [path for row in rows for cell in row for path in re.findall(r"`([\w/.]+)`", cell)]
    paths = [path for path in paths if "/" in path]
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_walks_of_design_name_existing_paths() -> None:
    """A launch, a log line, an end and a recovery: at most ten lines each, of paths that exist."""
    walks = re.findall(r"^## The way of (.*?)(?=^## )", DESIGN, re.M | re.S)
    assert [walk.split("\n")[0] for walk in walks] == [
        *("a launch", "a log line", "an end", "a recovery")
    ]
    for walk in walks:
        paths = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py|[a-z_]+(?:/[a-z_]+)+)`", walk)
        assert len(paths) > 5
        assert [path for path in paths if not (ROOT / "orchestrator" / path).exists()] == []
        assert len(re.findall(r"^\d+\. ", walk, re.M)) <= 10


def test_every_room_is_in_change_table() -> None:
    """A newcomer finds each folder of the package by something that is changed there."""
    text = " ".join(cell for row in table("Where do I change ...") for cell in row)
    rooms = {path.parent.relative_to(ROOT).parts[1] for path in ROOT.glob("orchestrator/*/*.py")}
    assert {room for room in rooms if f"orchestrator/{room}" not in text} <= {"local_cluster"}


def test_trees_in_docs_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts/house_tree.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_messages_name_existing_pages_and_topics() -> None:
    wrong = []
    known = {"agents", *read_topics(), *cli.commands}
    for path in sorted((ROOT / "orchestrator").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for page, anchor in re.findall(r"(docs/[\w/-]+\.md)(?:#([\w-]+))?", text):
            there = (ROOT / page).exists() and (not anchor or anchor in anchors(ROOT / page))
            wrong += [] if there else [f"{path.relative_to(ROOT)}: {page}#{anchor}"]
        for topic in re.findall(r"orchestrator help ([a-z][\w-]*)", text):
            wrong += [] if topic in known else [f"{path.relative_to(ROOT)}: help {topic}"]
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


def test_links_find_their_page_and_heading() -> None:
    wrong = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/*.md")]:
        text = page.read_text(encoding="utf-8")
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", text):
            target = page.parent / link if link else page
            found = target.exists()
            if not found or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                wrong.append(f"{page.relative_to(ROOT)}: {link}#{anchor}")
    assert wrong == []


# Names of files in docstrings and comments that are the user's, or another package's.
NOT_OURS = {
    "train.py",
    "script.py",
    "os.py",
    "json.py",
    "version.py",
    "test_rank.py",
    "resource.py",
}


def remarks(path: Path) -> Iterator[str]:
    """The docstrings and comments of a file that names files."""
    text = path.read_text(encoding="utf-8")
    if not re.search(r"[a-z_]\.py\b", text):
        return  # no file is named in it: most are done with here
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def stale_pointers(path: Path, text: str) -> list[str]:
    """The files that a remark names and that are nowhere it could mean."""
    named = re.findall(r"(?<![\w./~$<-])[a-z_]+(?:/[a-z_]+)*\.py\b", text)
    places = (ROOT, ROOT / "orchestrator", path.parent)
    return [
        name
        for name in named
        if name not in NOT_OURS and not any((place / name).exists() for place in places)
    ]


def test_docstrings_name_existing_files() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "orchestrator").rglob("*.py"))
        for text in remarks(path)
        for name in stale_pointers(path, text)
    ]
    assert wrong == []


def test_stale_pointer_is_detected() -> None:
    path = ROOT / "orchestrator/node/main.py"
    assert stale_pointers(path, "See node/gone.py and main.py, and errors.py.") == [
        *("node/gone.py", "errors.py")
    ]


# -- the words of the pages for users -------------------------------------------------------------

USERS = [
    *(ROOT / name for name in ("README.md", "docs/index.md", "docs/start.md", "docs/guide.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("docs/guide/*.md")),
    *sorted(ROOT.glob("docs/reference/*.md")),
    *sorted(ROOT.glob("docs/coming-from/*.md")),
    *sorted(ROOT.glob("docs/recipes/*.md")),
]
# That page is for contributors.
USERS = sorted({*USERS} - {ROOT / "docs/protocol.md"})


DECISIONS = sorted(ROOT.glob("docs/decisions/*.md"))


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page, its list items and the cells of its tables; code is one word."""
    text = re.sub(r"^```.*?^```$|^<!--.*?-->$", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]+`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=#)|\n(?=\|)", text):
        for cell in part.split("|") if part.startswith("|") else [part]:
            for found in re.split(
                r"(?<=[.!?])\s+(?=[A-Z\"`*(\[])|(?<=:)\n", " ".join(cell.split())
            ):
                if words := re.sub(r"^[-*#\d. ]+", "", found):
                    yield words


def test_no_sentence_is_long() -> None:
    lengths = []
    long = []
    for page in USERS:
        for sentence in sentences(page.read_text(encoding="utf-8")):
            words = len(sentence.split())
            if words > 4:  # headings and short cells say nothing of how it reads
                lengths.append(words)
            if words > 40:
                long.append(f"{page.relative_to(ROOT)}: {words} words: {sentence[:90]} ...")
    assert long == []
    assert sum(lengths) / len(lengths) < 18


def test_changelog_version_has_at_most_twenty_lines() -> None:
    """One line a field, not one a change: what is new goes into the line of its field."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = text.split("\n## ")[1:]
    assert len(versions) > 1
    assert {v.split()[0]: n for v in versions if (n := len(v.strip().splitlines()) - 1) > 20} == {}


def test_user_pages_are_short() -> None:
    """30,000 words, without the reference that is generated; a bar of a table is no word."""
    written = [page for page in USERS if page.name != "config.md"]
    words = [word for page in written for word in page.read_text(encoding="utf-8").split()]
    assert sum(bool(re.search(r"\w", word)) for word in words) < 30_000


def test_guide_fits_one_screen() -> None:
    """A guide or a recipe has commands, cases and links to the reference: few words, few lines,
    short code lines.

    The source is measured and not the page: its height depends on the fonts of a machine.
    """
    pages = sorted([*ROOT.glob("docs/guide/*.md"), *ROOT.glob("docs/recipes/*.md")])
    limits = {"words": 350, "lines": 48, "lines of code": 25, "letters in a line of code": 128}
    long = {}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        code = "".join(re.findall(r"^```.*?^```$", text, flags=re.M | re.S)).splitlines(True)
        sizes = {
            "words": sum(bool(re.search(r"\w", word)) for word in text.split()),
            "lines": text.count("\n"),
            "lines of code": sum(line.endswith("\n") for line in code),
            "letters in a line of code": max((len(line.rstrip("\n")) for line in code), default=0),
        }
        long |= {(page.stem, what): n for what, n in sizes.items() if n > limits[what]}
    assert len(pages) > 14 and long == {}


def test_maintainer_pages_are_short() -> None:
    """A decision is what, why, and what was tried with its figure: no story of how it came."""
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in DECISIONS}
    assert words["why.md"] < 6_500 and sum(words.values()) < 11_000, words


def test_pages_avoid_listed_phrases() -> None:
    """Sentences name the actor first, and pages do not describe earlier versions."""
    habits = r"\banew\b|\bis said\b|\bare (said|told)\b|\bso many\b|\bused to be\b|\bsince then\b"
    wrong = [
        f"{page.relative_to(ROOT)}: {found[0]}"
        for page in USERS
        for found in re.finditer(habits, page.read_text(encoding="utf-8"))
    ]
    assert wrong == []
