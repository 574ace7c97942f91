"""The error of a command that cannot continue."""

from __future__ import annotations


class CommandFailed(Exception):
    """The command cannot be carried out: one line on stderr, and exit status 2."""
