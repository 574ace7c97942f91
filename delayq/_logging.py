"""Log records about queues, which carry fields besides their text, for logging as JSON."""

from __future__ import annotations

import logging

_log = logging.getLogger("delayq")


def about(
    queue: str, message: str | None = None, attempt: int | None = None, task: str | None = None
) -> dict[str, str | int]:
    """Return the ``extra`` of a record: ``queue``, and ``message_id``, ``attempt`` and ``task`` if
    known.

    Never a payload.
    """
    facts: dict[str, str | int] = {"queue": queue}
    if message is not None:
        facts["message_id"] = message
    if attempt is not None:
        facts["attempt"] = attempt
    if task is not None:
        facts["task"] = task
    return facts


def log(
    level: int,
    queue: str,
    text: str,
    *args: object,
    message: str | None = None,
    attempt: int | None = None,
    task: str | None = None,
    error: BaseException | None = None,
) -> None:
    """Log ``text``, behind the queue's name, with these fields and the traceback of ``error``."""
    extra = about(queue, message, attempt, task)
    _log.log(level, f"queue %r: {text}", queue, *args, exc_info=error, extra=extra, stacklevel=2)
