"""Help texts without types that tell users nothing: ``<bool>`` of flags, ``<Target>`` of queues."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


def _without_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
        elif param.name in ("queue", "queues"):
            # The name of the argument says what it is.
            param.display_type_rich = _no_type
    return params


def _no_type(ctx: Any) -> None:
    """Return no type. typer passes the context by its name."""


class HelpfulCommand(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, ``--help`` among them."""
        return _without_types(super().get_params(ctx))


class HelpfulGroup(TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, ``--help`` among them."""
        return _without_types(super().get_params(ctx))
