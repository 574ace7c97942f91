"""The fields that log records carry besides their text, for logging as JSON."""

from __future__ import annotations


def about(
    queue: str, message: str | None = None, attempt: int | None = None
) -> dict[str, str | int]:
    """Return the ``extra`` of a record: ``queue``, and ``message_id`` and ``attempt`` if known.

    Never a payload.
    """
    facts: dict[str, str | int] = {"queue": queue}
    if message is not None:
        facts["message_id"] = message
    if attempt is not None:
        facts["attempt"] = attempt
    return facts
