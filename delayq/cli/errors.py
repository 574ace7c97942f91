"""The error of a command that cannot continue."""

from __future__ import annotations


class CommandFailed(Exception):
    """The command cannot be carried out.

    Its message goes to stderr as one line, and the exit status is 2.
    """
