"""The format in which a reliable queue stores a message under its id, and in which messages travel
to the server. Pure.

A body is ``enqueued+delay``, limits, a space and headers, a newline, its followers, then the
payload. The first field is the time of the offer by the server's clock, written by ``offer.lua``:
16 digits of microseconds, and further ones that count quarters of a microsecond, by which the
messages of one call differ, or those that were offered for one moment. The delay is in
microseconds, such as ``36e8`` for an hour; 0 is left out. The limits are ``x`` and the number of
attempts, ``t`` and how long a handler may take, in microseconds, ``f`` and the bytes that its
followers take, ``b`` and its batch, then ``g`` and the message's group, quoted as in a URL; each is
left out unless the message has its own. The headers are JSON on one line, or left out with the
space. The followers are as :func:`pack` builds them, and the payload is as the codec made it.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


# The most digits of a time, and the most characters of a delay, in a plain body.
_TIME_DIGITS, _DELAY_DIGITS = 25, 20
# A number with more digits is not a time, and takes a long time to parse.
_TIMES = re.compile(
    rb"([0-9]{1,16})([0-9]{0,9})(?:\+([0-9]{1,20})(?:e(1?[0-9]))?)?"
    rb"(?:x([0-9]{1,16}))?(?:t([0-9]{1,16}))?(?:f([0-9]{1,9}))?"
    rb"(?:b([0-9]{1,24}))?(?:g([^ \n]{1,1536}))?[ \n]"
)
_GROUP = re.compile(rb"(?:x[0-9]+)?(?:t[0-9]+)?(?:f[0-9]+)?(?:b[0-9]+)?g([^ \n]+)")
_BEFORE_BATCH = re.compile(rb"\A(?:x[0-9]+)?(?:t[0-9]+)?(?:f[0-9]+)?")
# Matches a body from whose message something may follow: it has followers, or a batch. Possessive,
# because most bodies have neither, and going back through their times would take longer than
# reading them. A method of the pattern, because each message would pay for a function around it.
may_lead_on = re.compile(rb"[0-9+ext]*+[fb][0-9]").match
# A follower, up to its content: the lengths of its id and of its content, the id, and its options.
_LENGTHS = re.compile(rb"([0-9]{1,4}):([0-9]{1,9}):")
_OPTIONS = re.compile(rb"([0-9]) (@?[0-9e]{1,20}) ([0-9]{1,20}) ([0-9]{1,20}) ([a-z]+) ")


class _PlainFields(NamedTuple):
    id: str
    when: int | str
    content: bytes


class PlainMessage(_PlainFields):
    """A message with a generated id and the default options, on its way to the server: most
    messages.

    The fields are the arguments that ``offer_new.lua`` takes for it, in order.

    Attributes:
        id: The message's id; empty until the message is sent.
        when: The delay, as :func:`format_delay` writes it; or ``@`` and the moment, as in
            :data:`delayq._durations.DueTime`.
        content: Headers and payload, as :func:`content` builds them.
        id_generated: True. It has no ``group`` and no followers: see :class:`OptionsMessage`.
    """

    __slots__ = ()

    id_generated: bool = True
    group: str | None = None
    follower_names: tuple[str, ...] = ()

    def with_id(self, id: str) -> PlainMessage:  # noqa: A002
        """Return the message with this id."""
        return plain_message((id, self.when, self.content))

    @property
    def arguments(self) -> tuple[str | bytes | int, ...]:
        """The arguments that ``offer.lua`` takes for it."""
        return self.id, 0, self.when, 0, 0, "raise", self.content

    def __repr__(self) -> str:
        return f"<PlainMessage {self.id!r}, {len(self.content)} bytes>"


# Builds one from its fields, in half of the time that its class takes.
plain_message: Callable[[tuple[str, int | str, bytes]], PlainMessage] = partial(
    tuple.__new__, PlainMessage
)


class OptionsMessage(NamedTuple):
    """Any message on its way to the server: first the arguments that ``offer.lua`` takes for it, in
    order.

    Attributes:
        id: The message's id; empty until the message is sent, if it is generated.
        priority: 0 to 9.
        when: As in a :class:`PlainMessage`.
        ttl_us: Time to live, in microseconds; 0 for no limit.
        unique_us: For how long the id counts as taken, whatever becomes of the message, in
            microseconds; 0 for as long as the message lives.
        on_duplicate: How to treat an id that is taken: ``raise``, ``ignore`` or ``replace``.
        content: Its own limits, headers and payload, as :func:`content` builds them.
        id_generated: Whether delayq generates the id.
        group: The message's group, if it has one.
        follower_names: The groups of its followers, and the ids of those without one: all of them
            lie in its partition.
    """

    id: str
    priority: int
    when: int | str
    ttl_us: int
    unique_us: int
    on_duplicate: str
    content: bytes
    id_generated: bool
    group: str | None
    follower_names: tuple[str, ...] = ()

    def with_id(self, id: str) -> OptionsMessage:  # noqa: A002
        """Return the message with this id."""
        return self._replace(id=id)

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names whose partition the message and its followers lie in."""
        name = self.group or self.id
        return (name, *self.follower_names) if name else self.follower_names

    @property
    def arguments(self) -> tuple[str | bytes | int, ...]:
        """The arguments that ``offer.lua`` takes for it."""
        return self[:7]

    def __repr__(self) -> str:
        return f"<OptionsMessage {self.id!r}, {len(self.content)} bytes>"


NewMessage = PlainMessage | OptionsMessage


class Body(NamedTuple):
    """The parts of a body.

    Attributes:
        enqueued_us: The server's time of the offer, in microseconds.
        headers: Text by name.
        payload: The encoded value.
        max_attempts: The message's own limit of attempts, if it has one.
        timeout_us: How long a handler may take, in microseconds, if the message says so.
        group: The message's group, if it has one.
        followers: The messages that its acknowledgement stores, in order.
        batch: The batch that it belongs to, or follows from, if any.
    """

    enqueued_us: int
    headers: dict[str, str]
    payload: bytes
    max_attempts: int | None
    timeout_us: int | None
    group: str | None = None
    followers: tuple[OptionsMessage, ...] = ()
    batch: str | None = None

    def __repr__(self) -> str:
        # Headers and payloads may be private, and tracebacks are logged.
        return f"<Body, {len(self.payload)} bytes>"


def format_delay(delay_us: int) -> int | str:
    """Return a delay in microseconds as a body has it: a short text if it is a whole number of
    milliseconds.
    """
    if not delay_us or delay_us % 1000:
        return delay_us
    digits = str(delay_us)
    short = digits.rstrip("0")
    return f"{short}e{len(digits) - len(short)}"


def content(
    headers: Mapping[str, str] | None,
    payload: bytes,
    max_attempts: int | None = None,
    timeout_us: int | None = None,
    group: str | None = None,
    followers: bytes = b"",
) -> bytes:
    """Return the part of a body that the client sends: everything but the times."""
    limits = b"" if max_attempts is None else b"x%d" % max_attempts
    if timeout_us is not None:
        limits += b"t%d" % timeout_us
    if followers:
        limits += b"f%d" % len(followers)
    if group is not None:
        limits += b"g" + quote(group, safe="").encode()
    # ASCII without newlines, because the first newline ends the headers.
    line = b" " + json.dumps(dict(headers), separators=(",", ":")).encode() if headers else b""
    return limits + line + b"\n" + followers + payload


def with_batch(content: bytes, batch: str) -> bytes:
    """Return what :func:`content` has built, with the batch that the message belongs to."""
    return _BEFORE_BATCH.sub(rb"\g<0>b%b" % batch.encode(), content, count=1)


def group_in(content: bytes) -> str | None:
    """Return the group of a message from what :func:`content` has built; None if it has none."""
    match = _GROUP.match(content)
    return None if match is None else unquote(match[1].decode())


def batch_in(body: bytes) -> str | None:
    """Return the batch that a body names; None if it names none, or cannot be read."""
    times = _TIMES.match(body)
    return None if times is None or times[8] is None else times[8].decode()


def parse(body: bytes) -> Body:
    """Split a body into its parts.

    Raises:
        ValueError: It is not a body.
    """
    line, newline, payload = body.partition(b"\n")
    if not newline:
        raise ValueError("the body has no newline")
    times = _TIMES.match(body)
    if times is None:
        raise ValueError("the body has no time")
    headers = line[times.end() :]
    size = int(times[7] or 0)
    if size > len(payload):
        raise ValueError("the body ends within its followers")
    return Body(
        int(times[1]),
        _object(headers) if headers else {},
        payload[size:],
        None if times[5] is None else int(times[5]),
        None if times[6] is None else int(times[6]),
        None if times[9] is None else unquote(times[9].decode(errors="replace")),
        tuple(unpack(payload[:size])) if size else (),
        None if times[8] is None else times[8].decode(),
    )


def pack(followers: Iterable[OptionsMessage]) -> bytes:
    """Return the form in which followers travel and are stored: see ``include/follow.lua``."""
    packed: list[bytes] = []
    for follower in followers:
        name, content = follower.id.encode(), follower.content
        options = " ".join(map(str, follower[1:6]))
        packed.append(b"%d:%d:%b%b %b" % (len(name), len(content), name, options.encode(), content))
    return b"".join(packed)


def unpack(packed: bytes) -> list[OptionsMessage]:
    """Return the followers that :func:`pack` has packed.

    Raises:
        ValueError: The text is damaged.
    """
    followers: list[OptionsMessage] = []
    at = 0
    while at < len(packed):
        lengths = _LENGTHS.match(packed, at)
        options = lengths and _OPTIONS.match(packed, lengths.end() + int(lengths[1]))
        if not lengths or not options or options.end() + int(lengths[2]) > len(packed):
            raise ValueError("a follower cannot be read")
        name = packed[lengths.end() : options.start()].decode()
        at = options.end() + int(lengths[2])
        text = packed[options.end() : at]
        when = options[2].decode()
        followers.append(
            OptionsMessage(
                name,
                int(options[1]),
                when,
                ttl_us=int(options[3]),
                unique_us=int(options[4]),
                on_duplicate=options[5].decode(),
                content=text,
                id_generated=not name,
                group=group_in(text),
            )
        )
    return followers


def due_us(body: bytes) -> int | None:
    """Return when a message was due that was not rescheduled, in microseconds; None if that is
    unreadable.
    """
    times = _TIMES.match(body)
    return None if times is None else int(times[1]) + int(times[3] or 0) * 10 ** int(times[4] or 0)


def plain_payload(body: bytes) -> bytes | None:
    """Return the payload of a body with neither limits nor headers, in a fraction of the time that
    :func:`parse` takes; None for any other.
    """
    # Without a regular expression, whose match takes longer than all of this.
    times, newline, payload = body.partition(b"\n")
    enqueued, plus, delay = times.partition(b"+")
    if (
        newline
        and enqueued.isdigit()
        and len(enqueued) <= _TIME_DIGITS
        and (not plus or (0 < len(delay) <= _DELAY_DIGITS and not delay.strip(b"0123456789e")))
    ):
        return payload
    return None


def parse_letter(letter: bytes) -> tuple[dict[str, Any], bytes, bytes]:
    """Split a dead letter into the reason why the message died, its body, and its checkpoint, which
    is empty if it has none.

    Raises as :func:`parse` does.
    """
    line, newline, rest = letter.partition(b"\n")
    if not newline:
        raise ValueError("the dead letter has no newline")
    facts = _object(line)
    size = _count(facts.get("checkpoint"))
    return facts, rest[size:], rest[:size]


def body_in(letter: bytes) -> bytes:
    """Return the body in a dead letter; the part behind the first newline if the reason cannot be
    read.
    """
    try:
        return parse_letter(letter)[1]
    except ValueError:
        return letter.partition(b"\n")[2]


class DeathReason(NamedTuple):
    """Why a message died: the part of a dead letter that is not the body."""

    reason: str
    attempt: int
    priority: int
    error: str


def read_reason(letter: bytes) -> DeathReason:
    """Return why a message died as :func:`read_letter` does, without reading the rest."""
    facts: dict[str, Any] = {}
    with suppress(ValueError):
        facts = _object(letter[: letter.index(b"\n")])
    return DeathReason(
        _text(facts.get("reason")) or "unreadable",
        _count(facts.get("attempt")),
        _count(facts.get("priority")),
        _text(facts.get("error")),
    )


def read_letter(letter: bytes) -> tuple[DeathReason, int | None, dict[str, str], bytes]:
    """Return why a message died, the time of its offer, its headers, and its payload.

    Parts that cannot be read get a default, because the letter has to be shown regardless. The time
    is None if there is no body.
    """
    death, body = read_reason(letter), body_in(letter)
    try:
        parts = parse(body)
    except ValueError:
        return death, None, {}, body
    return death, parts.enqueued_us, parts.headers, parts.payload


def _text(value: object) -> str:
    # A lone surrogate is valid in JSON, but cannot be sent on.
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def _count(value: object) -> int:
    return int(value) if isinstance(value, int | float) and 0 <= value < 2**53 else 0


def _object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ``ValueError`` with a message that quotes none of it."""
    try:
        value = json.loads(text.decode(errors="replace"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")  # noqa: TRY004 - of a body, not of an argument
    return value
