"""Checkpoints: the saved progress of a handler, from which the next attempt goes on.

A checkpoint is stored as one text: ``number;length;sleeps``, a newline, the state, and the results
of steps. The number rises with each save. The length is that of the state; nothing if none was
saved. The sleeps are, for each state since which there were some, its mark, ``=``, and the moments
at which they end, in microseconds, with commas between them, and a space before the next state.
A result has the lengths of its step's name and of itself in front, each followed by a colon, then
the name. The state and the results are as the queue's codec makes them. Before all that is how far
the handler was when it reported that last: see ``lua/include/checkpoint.lua``.
"""

from __future__ import annotations

import asyncio
import re
from hashlib import blake2b
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, NamedTuple

from delayq._checks import describe_value
from delayq._functions import is_async
from delayq._reliable.failures import Interrupted
from delayq.codecs.json import result_codec
from delayq.codecs.protocol import decode, own_attribute
from delayq.errors import BadInput, DecodeError, EncodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from delayq._reliable.message_context import MessageContext
    from delayq._reliable.replies import Claim
    from delayq.codecs.protocol import Codec
    from delayq.errors import LeaseLost

_HEAD = re.compile(rb"([0-9]{1,16});([0-9]{0,9});([0-9a-f=, ]*)\n")
_REPORT = re.compile(rb"p([0-9]{1,6}):")
_LENGTHS = re.compile(rb"([0-9]{1,4}):([0-9]{1,9}):")
# The most bytes of a step's name.
_MAX_NAME = 512
# How many states a checkpoint remembers whose sleeps are over.
_MAX_STATES = 100


class Saved(NamedTuple):
    """The content of a checkpoint.

    Attributes:
        number: Number of calls that were to save it. On the server, the highest number stays.
        state: The encoded state; None if none was saved.
        steps: The encoded result of each step, by name.
        sleeps: When the sleeps since each state end, in microseconds, by the mark of the state.
    """

    number: int = 0
    state: bytes | None = None
    steps: Mapping[str, bytes] = {}
    sleeps: Mapping[str, tuple[int, ...]] = {}

    @property
    def sleep_ends_us(self) -> int | None:
        """When the last sleep ends, in microseconds; None if there was none."""
        return max((ends[-1] for ends in self.sleeps.values()), default=None)

    def __repr__(self) -> str:
        # States may be private, and tracebacks are logged.
        return f"<Saved {self.number}, {len(self.steps)} steps>"


def pack(saved: Saved) -> bytes:
    """Return the form in which a checkpoint is stored."""
    length = "" if saved.state is None else len(saved.state)
    sleeps = " ".join(f"{mark}={','.join(map(str, ends))}" for mark, ends in saved.sleeps.items())
    parts = [f"{saved.number};{length};{sleeps}\n".encode(), saved.state or b""]
    for text, result in saved.steps.items():
        name = text.encode()
        parts.append(b"%d:%d:%b%b" % (len(name), len(result), name, result))
    return b"".join(parts)


def split_report(stored: bytes) -> tuple[bytes, bytes]:
    """Return the report of how far the handler is, and the checkpoint; each may be empty."""
    length = _REPORT.match(stored)
    if length is None:
        return b"", stored
    behind = length.end() + int(length[1])
    return stored[length.end() : behind], stored[behind:]


def unpack(checkpoint: bytes) -> Saved:
    """Return the content of a checkpoint.

    Raises:
        ValueError: It is damaged.
    """
    checkpoint = split_report(checkpoint)[1]
    if not checkpoint:
        return Saved()
    head = _HEAD.match(checkpoint)
    if head is None:
        raise ValueError("the checkpoint has no head")
    at = head.end() + int(head[2] or 0)
    state = checkpoint[head.end() : at] if head[2] else None
    sleeps: dict[str, tuple[int, ...]] = {}
    for text in head[3].decode().split():
        mark, _, ends = text.partition("=")
        sleeps[mark] = tuple(map(int, ends.split(",")))
    steps: dict[str, bytes] = {}
    while at < len(checkpoint):
        lengths = _LENGTHS.match(checkpoint, at)
        if lengths is None:
            raise ValueError("a step of the checkpoint cannot be read")
        behind_name = lengths.end() + int(lengths[1])
        at = behind_name + int(lengths[2])
        steps[checkpoint[lengths.end() : behind_name].decode()] = checkpoint[behind_name:at]
    if at != len(checkpoint):
        raise ValueError("the checkpoint ends too early")
    return Saved(int(head[1]), state, steps, sleeps)


class Checkpoint:
    """The checkpoint of one message, in one run of its handler.

    It is read when it is first used.
    """

    def __init__(
        self,
        claim: Claim,
        context: MessageContext[Any],
        require_lease: Callable[[], None],
        on_lost: Callable[[], LeaseLost],
    ) -> None:
        """Args:
        claim: The facts known about the message.
        context: The properties that it shares with others.
        require_lease: Raises an error if the lease is known to be over.
        on_lost: Called if a call finds that the lease is over; returns the error to raise.
        """
        self._claim = claim
        self._context = context
        self._require_lease = require_lease
        self._on_lost = on_lost
        self._saved: Saved | None = None
        # Calls that write follow each other, because each one writes the whole.
        self._writing = asyncio.Lock()
        # Names of the steps that this run has begun.
        self._step_names: set[str] = set()
        # Number of sleeps of this run that are over, by the mark of the state.
        self._slept: dict[str, int] = {}

    async def load(self, default: object) -> Any:
        """Return the state, as :meth:`Message.load` does."""
        state = (await self._read()).state
        return default if state is None else self._decode(state)

    async def save(self, state: object) -> None:
        """Store the state, as :meth:`Message.save` does."""
        self._require_lease()
        await self._write("the state", state=self._encode(state, "the state"))
        self._end_if_stopping()

    async def step(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the result of a step, as :meth:`Message.step` does."""
        self._require_lease()
        _check_name(name)
        saved = await self._read()
        self._end_if_stopping()
        if name in self._step_names:
            raise BadInput(
                f"the step {name!r} was called before in this run of the handler: give each step a"
                " name of its own"
            )
        self._step_names.add(name)
        try:
            result = saved.steps.get(name)
            if result is None:
                subject = f"the result of the step {name!r}"
                result = self._encode(await _call(function, args, kwargs), subject)
                await self._write(subject, step=(name, result))
        except BaseException:
            # The handler may try it again.
            self._step_names.discard(name)
            raise
        return self._decode(result)

    async def sleep(self, delay_us: int) -> int:
        """Return how many microseconds remain of the next sleep of this run: it begins now, unless
        an earlier run has begun it.
        """
        self._require_lease()
        saved = await self._read()
        mark = _mark(saved.state, result_codec(self._context.codec))
        ends, number = saved.sleeps.get(mark, ()), self._slept.get(mark, 0)
        if number == len(ends):
            ends = (*ends, await self._now_us() + delay_us)
            earlier = [*saved.sleeps.items()][-_MAX_STATES:]
            await self._write("the moment to sleep to", sleeps={**dict(earlier), mark: ends})
            remaining = delay_us
        elif ends[number] <= self._claim.due_us:
            # The server has not handed the message out before.
            remaining = 0
        else:
            remaining = max(0, ends[number] - await self._now_us())
        if not remaining:
            self._slept[mark] = number + 1
            self._end_if_stopping()
        return remaining

    def _end_if_stopping(self) -> None:
        if self._context.consumer.is_stopping():
            raise Interrupted

    async def _now_us(self) -> int:
        store = self._context.partition.store
        return await store.client.time_us(store.keys.leased)

    async def _read(self) -> Saved:
        if self._saved is None:
            stored = await self._context.partition.store.checkpoint(self._claim.id)
            # Concurrent calls may have read it, and written since.
            if self._saved is None:
                self._saved = Saved() if stored is None else self._unpack(stored)
        return self._saved

    def _unpack(self, checkpoint: bytes) -> Saved:
        try:
            return unpack(checkpoint)
        except ValueError as error:
            failure = DecodeError("Checkpoint", checkpoint, str(error))
            failure.queue, failure.id = self._context.partition.name, self._id
        raise failure

    async def _write(
        self,
        subject: str,
        *,
        state: bytes | None = None,
        step: tuple[str, bytes] | None = None,
        sleeps: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Store the checkpoint with this change.

        Args:
            subject: The name of the change, for errors.
            state: The new state.
            step: The name of a step, and its result.
            sleeps: All sleeps.
        """
        async with self._writing:
            saved = await self._read()
            number = saved.number + 1
            # Even if this call fails, the server may still carry it out: the next one has to come
            # behind it.
            self._saved = saved._replace(number=number)
            changed = Saved(
                number,
                saved.state if state is None else state,
                saved.steps if step is None else {**saved.steps, step[0]: step[1]},
                saved.sleeps if sleeps is None else sleeps,
            )
            packed = pack(changed)
            self._context.encoder.check_size(packed, f"the checkpoint with {subject}")
            if not await self._context.partition.store.save(self._claim, packed):
                raise self._on_lost()
            self._saved = changed

    def _encode(self, value: object, subject: str) -> bytes:
        try:
            return self._context.encoder.result(value, subject)
        except (EncodeError, BadInput):
            raise
        except Exception as error:
            # The text of a foreign error may quote the value, which may be private.
            raise EncodeError(
                f"{subject} cannot be kept: its codec raised {type(error).__name__}"
            ) from error

    def _decode(self, payload: bytes) -> Any:
        codec = result_codec(self._context.codec)
        return decode(codec, payload, self._context.partition.name, self._id)

    @property
    def _id(self) -> str:
        return self._claim.id.decode(errors="replace")


async def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a coroutine function here, and any other in a thread, as a worker calls its handlers."""
    if is_async(function):
        return await function(*args, **kwargs)
    result = await asyncio.to_thread(function, *args, **kwargs)
    # It may have returned a coroutine, as a lambda does.
    return await result if isawaitable(result) else result


def _check_name(name: object) -> None:
    try:
        if isinstance(name, str) and 0 < len(name.encode()) <= _MAX_NAME:
            return
    except UnicodeEncodeError:
        pass
    raise BadInput(
        f"the name of a step must be a str of 1 to {_MAX_NAME} bytes, not {describe_value(name)}"
    )


def _mark(state: bytes | None, codec: Codec[Any]) -> str:
    """Return a few characters that tell a state from others."""
    if state is None:
        return ""
    # A run that starts again saves the same state, and an encrypted one is other bytes then.
    fingerprint: Callable[[bytes], bytes] = own_attribute(codec, "fingerprint", bytes)
    return blake2b(fingerprint(state), digest_size=6).hexdigest()
