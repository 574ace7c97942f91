"""Writes ``delayq/sync/__init__.pyi``: ``make stubs``.

The synchronous classes get most of their methods at run time, from the asynchronous ones. The stub
shows them to type checkers and editors, with the first sentences of their docstrings.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, get_overloads

from delayq import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STUB = Path(sync.__file__).with_suffix(".pyi")
_WIDTH = 100


def stub() -> str:
    """Return the text of the stub."""
    # The module that each name in an annotation comes from.
    homes = {"T": "delayq._generics"}
    definitions = [
        line for name in sync.__all__ for line in (*_definition(getattr(sync, name), homes), "")
    ]
    return "\n".join(
        [
            '"""Written by ``make stubs``: the methods are those of the asynchronous classes."""',
            "",
            "import builtins",
            *sorted(f"from {home} import {name}" for name, home in homes.items()),
            "",
            f"__all__ = {sync.__all__}",
            "",
            *definitions,
        ]
    )


def _definition(defined: Any, homes: dict[str, str]) -> Iterator[str]:
    if not inspect.isclass(defined):
        yield from _function(defined, homes, "")
        return
    if Generic in defined.__mro__:
        homes["Generic"] = "typing"
        yield f"class {defined.__name__}(Generic[T]):"
    else:
        yield f"class {defined.__name__}:"
    yield from _docstring(defined, "    ")
    for name, annotation in inspect.get_annotations(defined).items():
        yield f"    {name}: {annotation}"
    for base in defined.__mro__[:-1]:
        for name, member in vars(base).items():
            if base is Generic or (name.startswith("_") and name not in {"__enter__", "__exit__"}):
                continue
            if isinstance(member, property) and member.fget is not None:
                yield "    @property"
                yield from _function(member.fget, homes, "    ")
            elif inspect.isfunction(member):
                yield from _function(member, homes, "    ")


def _function(function: Callable[..., Any], homes: dict[str, str], indent: str) -> Iterator[str]:
    original = getattr(function, "signed_as", function)
    overloads = get_overloads(original)
    for number, form in enumerate(overloads or [original]):
        node, source = _parsed(form)
        if overloads:
            homes["overload"] = "typing"
            yield f"{indent}@overload"
        is_async = isinstance(node, ast.AsyncFunctionDef) and function is original
        start = f"{indent}{'async ' * is_async}def {node.name}"
        returned = _text(source, node.returns)
        if returned.startswith("AsyncIterator["):
            homes["Iterator"] = "collections.abc"
            returned = returned.removeprefix("Async")
        yield from _signature(start, [*_parameters(source, node.args)], f" -> {returned}:")
        documented = number == 0 and function.__doc__
        yield from _docstring(function, f"{indent}    ") if documented else [f"{indent}    ..."]
        _import_names(node, form.__module__, homes)


def _parsed(function: Callable[..., Any]) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]:
    source = textwrap.dedent(inspect.getsource(function))
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return node, source


def _parameters(source: str, arguments: ast.arguments) -> Iterator[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    defaults = [*[None] * missing, *arguments.defaults]
    for number, (argument, default) in enumerate(zip(positional, defaults, strict=True), 1):
        yield _parameter(source, argument, default)
        if number == len(arguments.posonlyargs):
            yield "/"
    if arguments.vararg:
        yield f"*{_parameter(source, arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(source, argument, default)
    if arguments.kwarg:
        yield f"**{_parameter(source, arguments.kwarg)}"


def _parameter(source: str, argument: ast.arg, default: ast.expr | None = None) -> str:
    text = argument.arg
    if argument.annotation is not None:
        text += f": {_text(source, argument.annotation)}"
    if default is None:
        return text
    return f"{text} = {_text(source, default) if isinstance(default, ast.Constant) else '...'}"


def _text(source: str, node: ast.expr | None) -> str:
    assert node is not None, source
    text = " ".join((ast.get_source_segment(source, node) or "").split())
    # Some of the classes have a method of that name.
    return re.sub(r"\blist\[", "builtins.list[", text)


def _import_names(
    function: ast.FunctionDef | ast.AsyncFunctionDef, module: str, homes: dict[str, str]
) -> None:
    """Note where each name in the annotations of a function comes from."""
    arguments = [node for node in ast.walk(function.args) if isinstance(node, ast.arg)]
    annotations = [function.returns, *(argument.annotation for argument in arguments)]
    names = {
        node.id
        for annotation in filter(None, annotations)
        for node in ast.walk(annotation)
        if isinstance(node, ast.Name)
    }
    for name in names.difference(sync.__all__, vars(builtins)):
        home, original = _imports(module).get(name, (module, name))
        homes.setdefault(name if name == original else f"{original} as {name}", home)


@cache
def _imports(module: str) -> dict[str, tuple[str, str]]:
    """Return the module and the name there of each name that a module imports from others."""
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module])))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _signature(start: str, parameters: list[str], end: str) -> Iterator[str]:
    line = f"{start}({', '.join(parameters)}){end}"
    if len(line) <= _WIDTH:
        yield line
        return
    indent = start[: len(start) - len(start.lstrip())]
    yield f"{start}("
    for parameter in parameters:
        yield f"{indent}    {parameter},"
    yield f"{indent}){end}"


def _docstring(documented: Any, indent: str) -> Iterator[str]:
    summary = " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())
    if len(line := f'{indent}"""{summary}"""') <= _WIDTH:
        yield line
        return
    yield from textwrap.wrap(
        f'"""{summary}', _WIDTH, initial_indent=indent, subsequent_indent=indent
    )
    yield f'{indent}"""'


if __name__ == "__main__":
    STUB.write_text(stub(), "utf-8")
