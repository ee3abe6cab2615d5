"""The texts that expressions of a source stand for, as far as they can be seen without running it.

A name counts where it is bound once in its scope; an option of the command line has the value that
was typed, else its default.
"""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

DEEPEST = 25  # of an expression, and of names that stand for others
MOST_STEPS = 20_000  # for the expressions of one file
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
SAME_TEXT = ("Path", "PurePath", "PosixPath", "str", "abspath", "realpath", "normpath", "fspath")
SAME_METHOD = ("resolve", "absolute", "as_posix", "rstrip", "strip")
HOLDERS = ("args", "opt", "opts", "options", "flags", "FLAGS", "params", "hparams", "cfg", "config")


@dataclass(frozen=True)
class Text:
    """Holds what an expression stands for; not `whole` where more follows that is not known."""

    text: str
    whole: bool = True


@dataclass
class Scope:
    """A module, a function or a class: the names that it binds, and the expressions of each."""

    node: ast.AST
    outer: Scope | None
    bound: dict[str, list[ast.expr | None]] = field(default_factory=dict)
    calls: list[tuple[ast.Call, bool]] = field(default_factory=list)  # and whether it is guarded

    def value(self, name: str) -> tuple[ast.expr, Scope] | None:
        """Return the only expression that a name is bound to, and where that is.

        Of one that is made longer later (`place = place / name`) it is the first.
        """
        scope: Scope | None = self
        while scope is not None:
            if name in scope.bound:
                values = [value for value in scope.bound[name] if value is not None]
                if not values or len(values) < len(scope.bound[name]):
                    return None
                first, *others = sorted(values, key=lambda value: value.lineno)
                return (first, scope) if all(extends(more, name) for more in others) else None
            scope = scope.outer
        return None


Options = dict[str, ast.expr | None]  # dest -> its default; None: not known


class Values:
    """Resolves the expressions of one file of a program."""

    def __init__(self, file: str, options: Options, typed: Mapping[str, str]) -> None:
        self.file, self.options, self.typed = file, options, typed
        self.steps = 0

    def of(self, value: ast.expr | None, scope: Scope, depth: int = 0) -> Text | None:
        self.steps += 1
        if value is None or depth > DEEPEST or self.steps > MOST_STEPS:
            return None
        deeper = depth + 1
        if isinstance(value, ast.Constant):
            return Text(value.value) if isinstance(value.value, str) else None
        if isinstance(value, ast.Name):
            return self.of_name(value.id, scope, deeper)
        if isinstance(value, ast.Attribute):
            return self.of_attribute(value, scope, deeper)
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Div):
            parts = [self.of(part, scope, deeper) for part in (value.left, value.right)]
            return joined(parts, "/" if isinstance(value.op, ast.Div) else "")
        if isinstance(value, ast.JoinedStr):
            pieces = [p.value if isinstance(p, ast.FormattedValue) else p for p in value.values]
            return joined([self.of(piece, scope, deeper) for piece in pieces], "")
        if isinstance(value, ast.Call):
            return self.of_call(value, scope, deeper)
        return None

    def of_name(self, name: str, scope: Scope, depth: int) -> Text | None:
        if name == "__file__":
            return Text(self.file)
        only = scope.value(name)
        if only is None:
            return None
        if name in self.typed and only[1].outer is None:  # as nanoGPT's configurator takes them
            return Text(self.typed[name])
        text = self.of(only[0], only[1], depth)
        longer = len(only[1].bound[name]) > 1
        return Text(posixpath.join(text.text, ""), whole=False) if text and longer else text

    def of_attribute(self, value: ast.Attribute, scope: Scope, depth: int) -> Text | None:
        holder = value.value
        if value.attr == "parent":
            inner = self.of(holder, scope, depth)
            return Text(posixpath.dirname(inner.text)) if inner is not None else None
        name = holder.id if isinstance(holder, ast.Name) else getattr(holder, "attr", "")
        if value.attr not in self.options or not (name in HOLDERS or parsed(name, scope)):
            return None
        if value.attr in self.typed:
            return Text(self.typed[value.attr])
        default = self.options[value.attr]
        return self.of(default, scope, depth) if default and is_plain(default) else None

    def of_call(self, call: ast.Call, scope: Scope, depth: int) -> Text | None:
        name = last_name(call.func)
        arguments = [self.of(argument, scope, depth) for argument in call.args[:9]]
        if isinstance(call.func, ast.Attribute) and name in SAME_METHOD:
            return self.of(call.func.value, scope, depth)
        if name in ("join", "joinpath"):
            if name == "joinpath" and isinstance(call.func, ast.Attribute):
                return joined([self.of(call.func.value, scope, depth), *arguments], "/")
            of_os = (dotted(call.func) or "").endswith("path.join")
            return joined(arguments, "/") if of_os else None
        if name in SAME_TEXT and len(arguments) > 1:
            return joined(arguments, "/")
        if name == "dirname" and arguments and arguments[0]:
            return Text(posixpath.dirname(arguments[0].text))
        if name == "expanduser" and isinstance(call.func, ast.Attribute):
            return arguments[0] if arguments else self.of(call.func.value, scope, depth)
        if name in ("getcwd", "cwd"):
            return Text(".")
        if name == "home" and last_name(getattr(call.func, "value", call)) == "Path":
            return Text("~")
        if (dotted(call.func) or "").endswith(("environ.get", "getenv")):
            return arguments[1] if len(arguments) > 1 else None  # where it is not set
        return arguments[0] if name in SAME_TEXT and arguments else None


def parsed(name: str, scope: Scope) -> bool:
    """Tell whether a name is what argparse returns, whatever it is called."""
    only = scope.value(name)
    call = only[0] if only else None
    return isinstance(call, ast.Call) and last_name(call.func) == "parse_args"


def is_plain(value: ast.expr) -> bool:
    """Tell whether an expression means the same in every file: `Path("../outputs")` does."""
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    return names <= {*SAME_TEXT, "os", "pathlib", "osp"}


def extends(value: ast.expr | None, name: str) -> bool:
    """Tell whether an expression is a path below the one that this name has."""
    left = value.left if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) else None
    return isinstance(left, ast.Name) and left.id == name


def joined(parts: Sequence[Text | None], between: str) -> Text | None:
    """Put texts together, as far as they are known from the beginning on."""
    text, known = "", False
    for part in parts:
        if part is None:
            return Text(text + between if text else "", whole=False) if known and text else None
        if between:
            text = posixpath.join(text, part.text) if known else part.text
        else:
            text += part.text
        known = True
        if not part.whole:
            return Text(text, whole=False)
    return Text(text) if known else None


def last_name(function: ast.expr) -> str:
    return getattr(function, "id", getattr(function, "attr", ""))


def dotted(function: ast.expr) -> str | None:
    """Return a.b.c of an attribute of a name; None for any other expression."""
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    return ".".join([function.id, *reversed(parts)]) if isinstance(function, ast.Name) else None


# -- scopes -------------------------------------------------------------------------------------


def scopes(tree: ast.Module, asks: frozenset[str]) -> list[Scope]:
    """Return the module and all that is nested in it; `asks` are functions that ask for a path."""
    found: list[Scope] = []
    todo: list[tuple[ast.AST, Scope | None]] = [(tree, None)]
    while todo:
        node, outer = todo.pop()
        scope = Scope(node, outer)
        found.append(scope)
        for name in parameters(node):
            scope.bound.setdefault(name, []).append(None)
        inside: list[tuple[ast.AST, bool]] = [
            (child, False) for child in ast.iter_child_nodes(node)
        ]
        while inside:
            child, guarded = inside.pop()
            if isinstance(child, ast.Call):
                scope.calls.append((child, guarded))
            if isinstance(child, FUNCTIONS):
                # A class is passed over by the functions in it.
                todo.append((child, outer if isinstance(node, ast.ClassDef) else scope))
                continue
            bind(scope, child)
            inside += inner_nodes(child, asks, guarded=guarded)
    forget_globals(found)
    return found


def inner_nodes(
    node: ast.AST, asks: frozenset[str], *, guarded: bool
) -> list[tuple[ast.AST, bool]]:
    """Return the parts of a node, and whether the program goes on where they fail."""
    if isinstance(node, ast.Try):
        rest = [*node.handlers, *node.orelse, *node.finalbody]
        return [*((part, True) for part in node.body), *((part, guarded) for part in rest)]
    guarded = guarded or (isinstance(node, ast.If) and asks_first(node.test, asks))
    return [(part, guarded) for part in ast.iter_child_nodes(node)]


def asks_first(test: ast.expr, asks: frozenset[str]) -> bool:
    return any(
        isinstance(node, ast.Call) and last_name(node.func) in asks for node in ast.walk(test)
    )


def parameters(node: ast.AST) -> Iterator[str]:
    arguments = getattr(node, "args", None)
    if isinstance(arguments, ast.arguments):
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        yield from (argument.arg for argument in every)
        yield from (last.arg for last in (arguments.vararg, arguments.kwarg) if last)


def bind(scope: Scope, node: ast.AST) -> None:
    """Note what a statement binds: an expression, or None where it is none that can be seen."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                scope.bound.setdefault(target.id, []).append(node.value)
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        scope.bound.setdefault(node.target.id, []).append(node.value)
    elif isinstance(node, ast.AugAssign | ast.NamedExpr) and isinstance(node.target, ast.Name):
        scope.bound.setdefault(node.target.id, []).append(None)
    elif isinstance(node, ast.Tuple | ast.List) and isinstance(node.ctx, ast.Store):
        for name in (element for element in node.elts if isinstance(element, ast.Name)):
            scope.bound.setdefault(name.id, []).append(None)
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        for name in (inner for inner in ast.walk(node.target) if isinstance(inner, ast.Name)):
            scope.bound.setdefault(name.id, []).append(None)
    elif isinstance(node, ast.Global):
        for name_ in node.names:
            scope.bound.setdefault(name_, []).append(None)


def forget_globals(found: Iterable[Scope]) -> None:
    """A name that a function makes its own of the module's is not known there either."""
    module, *inner = found
    for scope in inner:
        for node in ast.iter_child_nodes(scope.node):
            for name in node.names if isinstance(node, ast.Global) else ():
                module.bound.setdefault(name, []).append(None)


# -- options ------------------------------------------------------------------------------------


def options_of(tree: ast.Module, *, any_typed: bool) -> Options:
    """Return the options that a file defines by argparse, click or a dataclass, with defaults.

    Where something is typed, the default of an option without dashes may not be what counts.
    """
    found: Options = {}

    def add(name: str, default: ast.expr | None) -> None:
        same = name not in found or ast.dump(found[name] or default or ast.Pass()) == (
            ast.dump(default or ast.Pass())
        )
        found[name] = default if same else None

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and last_name(node.func) in ("add_argument", "option"):
            words = [a.value for a in node.args if isinstance(a, ast.Constant)]
            flags = [word for word in words if isinstance(word, str)]
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            dest = keywords.get("dest")
            long = next(
                (flag for flag in flags if flag.startswith("--")), flags[0] if flags else ""
            )
            name = dest.value if isinstance(dest, ast.Constant) else long
            if isinstance(name, str):
                counts = (flags[:1] and flags[0].startswith("-")) or not any_typed
                add(as_dest(name), keywords.get("default") if counts else None)
        elif isinstance(node, ast.ClassDef) and any(
            "dataclass" in (dotted(d.func if isinstance(d, ast.Call) else d) or "")
            for d in node.decorator_list
        ):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    add(line.target.id, line.value)
    for node in ast.walk(tree):  # args.data = ... : its default is not what is opened
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.update({node.attr: None} if node.attr in found else {})
    return found


def as_dest(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def typed_options(arguments: Sequence[str]) -> dict[str, str]:
    """Return the values of options as they were typed; of a word alone nothing is known."""
    typed = {}
    for word, after in zip(arguments, [*arguments[1:], "--"], strict=False):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and equals:
            typed[as_dest(flag)] = value
        elif flag.startswith("-") and not after.startswith("-"):
            typed[as_dest(flag)] = after
    return typed
