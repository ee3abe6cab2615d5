"""Hooks of mkdocs for the site: pages made from the code, and links.

`commands.md` is every command with its options, as click knows them. `api.md` is every public name
with its signature and docstring, read from the source, so that no torch is needed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "scripts/examples"
sys.path.insert(0, str(ROOT))

import click  # noqa: E402

import orchestrator  # noqa: E402
from orchestrator.cli.main import cli  # noqa: E402

DISTRIBUTED = "orchestrator.distributed"
COMMON, ANCHOR = "Options of most commands", "options-of-most-commands"
# An option of this many commands stands once on the page.
MANY = 8
# What people search for, and the page that answers it in other words.
ALSO = {
    "python_api.md": "jupyter, ipython, notebook",
    "guide/nodes.md": "exclude a node, ignore a node, drain, GPU use, GPU utilization",
    "guide/views.md": "GPU use, GPU utilization, nvidia-smi",
    "guide/network.md": "NCCL_SOCKET_IFNAME, network interface",
    "guide/environments.md": "use conda, use venv, use modules",
    "guide/failures.md": "resume a job, resume after a failure",
    "trainer.md": "resume a training",
}
# An option and its meaning.
Row = tuple[str, str]


def on_config(config: Any) -> Any:
    """State the version, and the repository if it has an address."""
    (address,) = re.findall(r'^ADDRESS = "(.*)"$', (ROOT / "setup.py").read_text(), re.M)
    where = "" if address else " · the repository has no public address yet"
    config.copyright = f"version {orchestrator.__version__}{where}"
    config.repo_url = address or None
    return config


def on_files(files: Files, config: Any) -> Files:
    style = Path(__file__).with_name("site.css").read_text(encoding="utf-8")
    for name, text in (("commands.md", commands()), ("api.md", api()), ("site.css", style)):
        files.append(File.generated(config, name, content=text))
    for path in sorted(EXAMPLES.rglob("*")):
        if path.suffix in (".py", ".yaml") or path.name == "LICENSE":
            name = f"examples/{path.relative_to(EXAMPLES)}"
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn what GitHub and the tests read into what mkdocs does.

    A fence may name its file (```python train.py), or say that it is not run (```sh elsewhere).
    A link out of docs/ leads to a file of the clone. The site has the examples; others become text.
    A how-to page or a recipe is one screen, so it has no table of contents beside it.
    """
    if page.file.src_uri.startswith(("guide/", "recipes/")):
        page.meta["hide"] = ["toc"]
    markdown = re.sub(r"^(```\w+) (\S+\.\w+)$", r'\1 title="\2"', markdown, flags=re.M)
    markdown = re.sub(r"^(```\w+) (?!title=).*$", r"\1", markdown, flags=re.M)
    up = re.escape("../" * page.file.src_uri.count("/"))
    programs = rf"\(({up})\.\./scripts/(examples/[^)]*\.(?:py|yaml))\)"
    markdown = re.sub(programs, r"(\1\2)", markdown)
    markdown = re.sub(rf"\[([^\]]+)\]\({up}\.\./[^)]*\)", r"\1", markdown)
    also = ALSO.get(page.file.src_uri)
    return f"{markdown}\n\nSearched as: {also}.\n{{ .also }}\n" if also else markdown


def commands() -> str:
    """Return the page of all commands, from the definitions that parse them."""
    lines = ["# Commands", "", "Made from the definitions of the commands: what `--help` says.", ""]
    lines += ["`master_launch` is `orchestrator launch`, and `emergency_stop` is", ""]
    lines[-2] += " `orchestrator emergency-stop`."
    common = [row for row, count in Counter(options()).items() if count >= MANY]
    lines += [f"## {COMMON}", "", *table("option", common)]
    for heading, names in cli.headings.items():
        lines += [f"## {heading}", ""]
        for name in names:
            lines += command(f"orchestrator {name}", cli.commands[name], 3, common)
    return "\n".join(lines)


def options(group: click.Group = cli) -> Iterator[Row]:
    """Yield the options of all commands, those that several have again and again."""
    for what in group.commands.values():
        if isinstance(what, click.Group):
            yield from options(what)
        yield from (row for _, row in rows(what, click.Context(what)))


def rows(what: click.Command, context: click.Context) -> Iterator[tuple[str, Row]]:
    """Yield the options of a command, each with the name of its group."""
    for parameter in what.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and record[1] and "--help" not in record[0]:
            yield getattr(parameter, "group", "Options"), record


def table(title: str, records: Iterable[Row]) -> Iterator[str]:
    yield from (f"| {title.lower()} | |", "|---|---|")
    for option, meaning in records:
        yield f"| <code>{cell(option)}</code> | {cell(meaning)} |"
    yield ""


def command(name: str, what: click.Command, level: int, common: Sequence[Row]) -> Iterator[str]:
    context = click.Context(what, info_name=name)
    yield from (f"{'#' * level} {name.removeprefix('orchestrator ')}", "")
    yield from ("```", " ".join([name, *what.collect_usage_pieces(context)]), "```", "")
    yield from (re.sub(r"\n[ \t]+", "\n", what.help or "").replace("\b", ""), "")
    if isinstance(what, click.Group):
        for inner in what.commands:
            yield from command(f"{name} {inner}", what.commands[inner], level + 1, common)
        return
    groups: dict[str, list[Row]] = {}
    shared: list[Row] = []
    for group, row in rows(what, context):
        (shared if row in common else groups.setdefault(group, [])).append(row)
    for group, own in groups.items():
        yield from table(group, own)
    names = ", ".join(f"<code>{cell(option.split()[0])}</code>" for option, _ in shared)
    yield from (f"Of the [{COMMON.lower()}](#{ANCHOR}): {names}." if names else "", "")


def cell(text: str) -> str:
    escaped = text.replace("<", "&lt;")
    return re.sub(r"[|*`_]", lambda sign: f"&#{ord(sign[0])};", re.sub(r"\s+", " ", escaped))


def api() -> str:
    """Return the page of all public names, in the order of their modules."""
    lines = ["# Classes and functions", "", "Made from the docstrings.", ""]
    for name, module in sorted(orchestrator.LATER.items()):
        lines += [f"## orchestrator.{name}", "", *described(module, name)]
    path = ROOT / "orchestrator/distributed.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for name, module in sorted(imported(tree).items()):
        lines += [f"## {DISTRIBUTED}.{name}", "", *described(module, name)]
    return "\n".join(lines)


def imported(tree: ast.Module) -> dict[str, str]:
    """Return the names that a module passes on, and where each is defined."""
    return {
        alias.name: node.module or ""
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("orchestrator")
        for alias in node.names
    }


def described(module: str, name: str) -> Iterator[str]:
    path = ROOT / f"{module.replace('.', '/')}.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if getattr(node, "name", "") == name:
            yield from entry(node, name)
            for inner in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    yield from (f"### {name}.{inner.name}", "", *entry(inner, inner.name))


def entry(node: Any, name: str) -> Iterator[str]:
    function = node
    if isinstance(node, ast.ClassDef):
        made = [one for one in node.body if getattr(one, "name", "") == "__init__"]
        function = made[0] if made else None
    if function is not None:
        arguments = ast.unparse(function.args).removeprefix("self, ").removeprefix("self")
        returns = (
            f" -> {ast.unparse(function.returns)}" if function is node and node.returns else ""
        )
        yield from ("```python", f"{name}({arguments}){returns}", "```", "")
    yield from (ast.get_docstring(node) or "", "")
