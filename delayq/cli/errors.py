"""What a command raises when it cannot go on."""

from __future__ import annotations


class CommandFailed(Exception):
    """The command cannot be carried out. The message goes to stderr as one line, and the exit status is 2."""
