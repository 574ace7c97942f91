"""The text stored of an error beside a message: one line that names it, and its traceback. Pure."""

from __future__ import annotations

import traceback

# The most that is stored of each, characters. The end of a traceback says the most.
_LINE_MOST = 500
_TEXT_MOST = 8000
# The number of errors in a group that its line names.
_NAMED = 5


def describe(error: BaseException) -> str:
    """Return the type of an error and the first line of its message; for a group, also the errors
    in it.
    """
    return _describe(error)[:_LINE_MOST]


def pack_error(error: BaseException | str | None) -> str:
    """Return the text to store of an error: its line, a newline, and its traceback or whole text; a
    single line by itself.
    """
    if error is None:
        return ""
    if isinstance(error, str):
        if "\n" not in error:
            return kept_text(error)
        line, text = _line_of(error)[:_LINE_MOST], error
    else:
        line, text = describe(error), "".join(traceback.format_exception(error)).rstrip("\n")
    return f"{_clean(line)}\n{kept_text(text)}"


def kept_text(text: str) -> str:
    """Return the part of a text that is stored: its end."""
    return _clean(text[-_TEXT_MOST:])


def unpack_error(stored: str) -> tuple[str, str]:
    """Return the line and the traceback from the result of :func:`pack_error`."""
    line, newline, text = stored.partition("\n")
    if line.startswith("Traceback"):
        # Stored by another program.
        return _line_of(stored), stored
    return line, text if newline else stored


def _describe(error: BaseException) -> str:
    kind = type(error).__qualname__
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    # A SyntaxError begins with the place.
    line = (
        next((line for line in lines if line.partition(":")[0].endswith(kind)), None)
        or _first_line("\n".join(lines))
        or kind
    )
    if isinstance(error, BaseExceptionGroup):
        inner = [_describe(one) for one in error.exceptions[:_NAMED]]
        more = ", ..." if len(error.exceptions) > _NAMED else ""
        line = f"{line}: {', '.join(inner)}{more}"
    return line


def _line_of(text: str) -> str:
    """Return the line that says the most: the first, or the error's line in the result of
    ``traceback.format_exc()``.
    """
    lines = text.splitlines()
    headers = [place for place, line in enumerate(lines) if line.startswith("Traceback")]
    after = lines[headers[-1] + 1 :] if headers else []
    # Indented lines are the calls.
    return next((line for line in after if line[:1].strip()), None) or _first_line(text)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _clean(text: str) -> str:
    # Characters that UTF-8 cannot encode would fail the call that retries or buries the message.
    return text.encode(errors="replace").decode()
