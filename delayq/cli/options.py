"""Options that many commands share, the parsing of their values, and their help."""

from __future__ import annotations

import json
import os
import re
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer

from delayq import codecs
from delayq.admin.catalog import KINDS, FoundQueue
from delayq.admin.delayed import DelayedInspector
from delayq.admin.payloads import KEYS_VARIABLE, PayloadCipher
from delayq.admin.reliable import ReliableInspector
from delayq.admin.wording import describe_limit, read_duration, read_limit
from delayq.cli._typer import delayed_names, queue_names, reliable_names, url_before
from delayq.cli.output import CommandFailed, NoQueue, span
from delayq.client import URL_VARIABLE
from delayq.codecs import BytesCodec
from delayq.errors import BadInput, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq import Client, DelayedQueue, ReliableQueue
    from delayq._reliable.limits import Limit
    from delayq._reliable.store import ReliableStore
    from delayq.codecs import Codec


def _or_given_first(context: typer.Context, value: str | None) -> str | None:
    """Return the address before the command if none comes after it."""
    source: Any = context.get_parameter_source("url")
    if source is not None and source.name == "COMMANDLINE":
        return value
    return url_before(context) or value


_URL: dict[str, Any] = {"metavar": "URL", "callback": _or_given_first}
Url = Annotated[
    str | None,
    typer.Option(
        "--url", envvar=URL_VARIABLE, help="The server. Defaults to a private one.", **_URL
    ),
]
# For `delayq` itself, and for its groups of commands.
UrlBefore = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="The server; also after the command.")
]
# For `configure`, where it matters whether the variable or the option names the server.
UrlOrWorkers = Annotated[
    str | None,
    typer.Option(
        "--url",
        help=f"The server. Defaults to ${URL_VARIABLE}, or a private one. With --from, for a"
        " Worker() without an address.",
        **_URL,
    ),
]
# For commands that make no sense on an empty private server.
RequiredUrl = Annotated[
    str | None, typer.Option("--url", envvar=URL_VARIABLE, help="The server.", **_URL)
]
# For commands that find the variable themselves.
WorkerUrl = Annotated[
    str | None,
    typer.Option(
        help=f"The server, for a Worker() without an address. Defaults to ${URL_VARIABLE}.", **_URL
    ),
]
DemoUrl = Annotated[
    str | None,
    typer.Option(help="The server to use. Defaults to a private embedded one.", **_URL),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


class LogLevels(StrEnum):
    """From which level on a command prints what is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevel = Annotated[
    LogLevels,
    typer.Option(
        "--log-level", help="Print what is logged from this level on; debug: each message."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation prompt.")]
MaxRows = Annotated[int, typer.Option(min=1, max=10_000, help="Show at most this many.")]
Offset = Annotated[int, typer.Option(min=0, help="Skip this many.")]
Delay = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION", help="Due this long from now: 90 (seconds), 1.5s, 30m, 2h, 1d12h."
    ),
]
At = Annotated[
    str | None,
    typer.Option(
        metavar="MOMENT",
        help=(
            "Due at this date or time: 2030-01-31, 2030-01-31T12:00 (both in your timezone),"
            " 2030-01-31T12:00+01:00, '2030-01-31 12:00 Europe/Berlin'."
        ),
    ),
]

CODECS = {
    "json": "JsonCodec",
    "string": "StringCodec",
    "bytes": "BytesCodec",
    "long": "LongCodec",
    "integer": "IntegerCodec",
    "typed-json": "TypedJsonJacksonCodec",
    "json-jackson": "JsonJacksonCodec",
    "kryo5": "Kryo5Codec",
}
"""The codecs that ``--codec`` can choose."""

CodecName = Annotated[
    str,
    typer.Option(
        "--codec",
        metavar="NAME",
        help=(
            f"How values are encoded: {', '.join(CODECS)}. Encrypted ones are shown if their keys"
            f" are in ${KEYS_VARIABLE}."
        ),
    ),
]

_DAY = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})([Zz]|[+-][0-9]{2}:?[0-9]{2})")
_NAMED_ZONE = re.compile(r"(.*[0-9])\s+([A-Za-z][A-Za-z0-9_+/-]*)")

Id = Annotated[str, typer.Argument(metavar="ID", help="The message's id.")]


class Target(FoundQueue):
    """A queue that a command acts on."""

    @classmethod
    def parse(cls, text: str) -> Target:
        """Return the queue that an argument names: a reliable one, unless it says ``delayed:``."""
        kind, colon, name = text.partition(":")
        if colon and kind in KINDS:
            return cls(kind, name)
        return cls("reliable", text)

    @classmethod
    def parse_delayed(cls, text: str) -> Target:
        """Return the delayed queue that an argument names. Raises CommandFailed for another."""
        kind, colon, name = text.partition(":")
        if colon and kind == "reliable":
            raise CommandFailed(f"this command is for delayed queues, unlike {text!r}")
        return cls("delayed", name if colon and kind == "delayed" else text)

    @property
    def is_reliable(self) -> bool:
        return self.kind == "reliable"

    def reliable(self, client: Client, doing: str = "do this") -> ReliableQueue[bytes]:
        """Return the reliable queue. Raises CommandFailed for a delayed one.

        Its values are bytes, so that one that cannot be decoded can still be shown. Its settings
        let no message die, because the number of attempts that its workers allow is not known here.
        """
        self.check_reliable(doing)
        return client.reliable_queue(self.name, codec=BytesCodec(), max_attempts=None)

    async def existing(self, client: Client, doing: str = "do this") -> ReliableQueue[bytes]:
        """Return the reliable queue, as ``reliable`` does. A wrong name must not make one.

        Raises:
            NoQueue: It has never been used.
        """
        reliable_queue = self.reliable(client, doing)
        await self.check_existence(client)
        return reliable_queue

    async def check_existence(self, client: Client) -> None:
        """Raise NoQueue for a reliable queue that has never been used, if the user may know."""
        if not self.is_reliable or await ReliableInspector.of(client, self.name).exists():
            return
        hint = "delayq queues lists those that there are"
        if await DelayedInspector.of(client, self.name).next_due_at() is not None:
            delayed = FoundQueue("delayed", self.name).argument
            hint = f"to name the delayed queue of that name, write {delayed}"
        raise NoQueue(f"there is no reliable queue {self.name!r}: {hint}")

    async def stores(self, client: Client) -> Sequence[ReliableStore]:
        """Return the data of the partitions of the reliable queue.

        Raises:
            ServerUnavailable: The queue is being moved to another number of partitions.
        """
        return await ReliableInspector.of(client, self.name).all_stores(at_rest=True)

    def check_reliable(self, doing: str) -> None:
        """Raise CommandFailed for a delayed queue."""
        if not self.is_reliable:
            raise CommandFailed(
                f"a delayed queue cannot {doing}; a reliable one is named without delayed:"
            )

    def delayed(self, client: Client) -> DelayedQueue[bytes]:
        """Return the delayed queue, of bytes."""
        return client.delayed_queue(self.name, codec=BytesCodec())


Queue = Annotated[
    Target,
    typer.Argument(
        metavar="QUEUE",
        parser=Target.parse,
        autocompletion=queue_names,
        help="NAME or reliable:NAME for a reliable queue, delayed:NAME for a delayed one.",
    ),
]
Queues = Annotated[
    list[Target] | None,
    typer.Argument(
        metavar="[QUEUE]...",
        parser=Target.parse,
        autocompletion=queue_names,
        help="NAME or reliable:NAME for a reliable queue, delayed:NAME for a delayed one.",
    ),
]
# For commands that only one kind of queue has.
ReliableOnly = Annotated[
    Target,
    typer.Argument(
        metavar="QUEUE",
        parser=Target.parse,
        autocompletion=reliable_names,
        help="The name of a reliable queue.",
    ),
]
ReliableOrAll = Annotated[
    Target | None,
    typer.Argument(
        metavar="[QUEUE]",
        parser=Target.parse,
        autocompletion=reliable_names,
        show_default=False,
        help="The name of a reliable queue. All of them if left out.",
    ),
]
DelayedOnly = Annotated[
    Target,
    typer.Argument(
        metavar="QUEUE",
        parser=Target.parse_delayed,
        autocompletion=delayed_names,
        help="The name of a delayed queue, as stored on the server.",
    ),
]


def codec_of(name: str) -> Codec[Any]:
    """Return the codec of that name. Raises CommandFailed."""
    if name not in CODECS:
        raise CommandFailed(f"--codec must be one of {', '.join(CODECS)}, not {name!r}")
    codec: Codec[Any] = getattr(codecs, CODECS[name])()
    return codec


def payload_cipher() -> PayloadCipher:
    """Return a cipher with the keys in the environment. Raises CommandFailed."""
    try:
        return PayloadCipher(os.environ.get(KEYS_VARIABLE) or None)
    except (BadInput, ConfigurationError) as error:
        raise CommandFailed(f"${KEYS_VARIABLE}: {error}") from error


class QueueCodec:
    """Reads the payloads of a queue, also encrypted ones if the environment has their keys, and
    writes encrypted ones.
    """

    def __init__(self, name: str, queue: Target) -> None:
        """``name`` is that of the codec. Raises CommandFailed."""
        self._codec = codec_of(name)
        self._queue = queue.name
        self._cipher = payload_cipher()

    def encode(self, value: Any, /) -> bytes:
        """Encode and encrypt a value."""
        if not self._cipher.has_keys:
            raise CommandFailed(f"--encrypt needs keys: set ${KEYS_VARIABLE} to ID=BASE64")
        return self._cipher.encrypt(self._codec.encode(value), self._queue)

    def decode(self, payload: bytes, /) -> Any:
        return self._codec.decode(self._cipher.decrypt(payload, self._queue))


def duration(text: str | None, option: str = "--delay") -> float | None:
    """Return the seconds in ``90``, ``1.5s`` or ``1h30m``. Raises CommandFailed."""
    if text is None:
        return None
    try:
        return read_duration(text, option)
    except BadInput as error:
        raise CommandFailed(str(error)) from error


def instant(text: str | None) -> datetime | None:
    """Parse a moment. Without a timezone, it is in this machine's. Raises CommandFailed."""
    if text is None:
        return None
    local, zone = text.strip(), None
    if named := _NAMED_ZONE.fullmatch(local):
        local, zone = named[1], _zone_of(named[2])
    elif whole_day := _DAY.fullmatch(local):
        # Python takes the timezone of a date for a time, or refuses it.
        local = f"{whole_day[1]}T00:00{whole_day[2]}"
    try:
        at = datetime.fromisoformat(local)
    except ValueError:
        raise CommandFailed(
            "--at must be a date or a time such as 2030-01-31, 2030-01-31T12:00,"
            f" 2030-01-31T12:00+01:00 or '2030-01-31 12:00 Europe/Berlin', not {text!r}"
        ) from None
    if at.utcoffset() is not None:
        if zone is not None:
            raise CommandFailed(f"--at has two timezones: {text!r}")
        return at
    return _resolve_local(at, zone)


def _zone_of(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, ZoneInfoNotFoundError):
        raise CommandFailed(
            f"--at has an unknown timezone: {name}; write one such as Europe/Berlin, or +01:00"
        ) from None


def _resolve_local(at: datetime, zone: ZoneInfo | None) -> datetime:
    """Return a local time in a zone, or in this machine's. Raises CommandFailed unless the clocks
    show it exactly once.
    """
    try:
        first, second = (
            at.replace(fold=fold).astimezone()
            if zone is None
            else at.replace(tzinfo=zone, fold=fold)
            for fold in (0, 1)
        )
        earlier, later = sorted((first.astimezone(UTC), second.astimezone(UTC)))
        back = earlier.astimezone(zone).replace(tzinfo=None)
    except (OverflowError, ValueError, OSError):
        raise CommandFailed(f"--at is too far away: {at.isoformat()}") from None
    if earlier == later:
        return first
    region = "here" if zone is None else f"in {zone}"
    if back != at:
        raise CommandFailed(
            f"--at does not exist {region}: the clocks are put forward past {at.isoformat()}"
        )
    offsets = " or ".join(moment.strftime("%z") for moment in (first, second))
    raise CommandFailed(
        f"--at happens twice {region}, because the clocks are put back: add {offsets} to"
        f" {at.isoformat()}"
    )


def headers_of(pairs: list[str] | None) -> dict[str, str] | None:
    """Parse headers, each given as ``name=value``. Raises CommandFailed."""
    if not pairs:
        return None
    headers = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise CommandFailed("--header must be NAME=VALUE")
        headers[name] = value
    return headers


def value_of(text: str, *, as_text: bool, codec: str) -> Any:
    """Return the value to offer; ``-`` reads it from standard input. Raises CommandFailed."""
    if codec == "bytes":
        # Used as they are, because bytes need not be text.
        return sys.stdin.buffer.read() if text == "-" else os.fsencode(text)
    if text == "-":
        try:
            text = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError:
            raise CommandFailed(
                "the value is not text; to offer bytes, add --codec bytes"
            ) from None
    if as_text or codec == "string":
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        # The reason does not quote the value, which may be private.
        cause = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise CommandFailed(
            f"the value is not JSON ({cause}); to offer plain text, add --text"
        ) from None
    except RecursionError:
        raise CommandFailed("the value is not JSON (nested too deeply)") from None


LIMIT_METAVAR = "N|N/PERIOD|none"

QueueLimit = Annotated[
    str | None,
    typer.Option(
        "--limit",
        metavar=LIMIT_METAVAR,
        help="How many messages run at a time, or start within a period: 5, 100/s, 5,100/10m.",
    ),
]
GroupLimit = Annotated[
    str | None,
    typer.Option(
        "--group-limit",
        metavar=LIMIT_METAVAR,
        help="The same for each group without a limit of its own; also: ordered.",
    ),
]


def limit_of(text: str, option: str) -> Limit | None:
    """Return the limit that a text describes.

    Raises:
        CommandFailed: It describes none, or an impossible one.
    """
    try:
        return read_limit(text, option)
    except BadInput as error:
        raise CommandFailed(str(error)) from error


def limit_text(limit: Limit | None) -> str:
    """Return a limit in words, such as ``5 at a time, 100 in 10 min``."""
    return describe_limit(limit, span)
