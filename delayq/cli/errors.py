"""The error of a command that cannot continue."""

from __future__ import annotations


class CommandFailed(Exception):
    """The command cannot be carried out: one line on stderr, and exit status 2."""

    status = 2


class NoQueue(CommandFailed):
    """There is no such queue: one line on stderr, and exit status 1."""

    status = 1
