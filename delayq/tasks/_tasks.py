"""Functions as tasks, and the queue through which they are called."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from datetime import UTC
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from delayq._checks import check_count, describe_value
from delayq._durations import Duration, seconds
from delayq._functions import EMPTY, UNSET, annotation_of, is_generator, name_of
from delayq._generics import P, R_co
from delayq.backoff import check_backoff
from delayq.codecs.json import JsonCodec
from delayq.errors import (
    BadArguments,
    BadInput,
    BadName,
    ConfigurationError,
    DecodeError,
    UnknownTask,
)
from delayq.tasks._calls import Arguments, Call

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping
    from datetime import datetime, tzinfo
    from typing import Unpack

    from delayq._functions import Unset
    from delayq._reliable.batches import Batch
    from delayq._reliable.failures import Reject, RetryAfter, Snooze
    from delayq._reliable.offer import Offer, OfferOptions
    from delayq._reliable.queue import ReliableQueue
    from delayq._reliable.settings import HandleOptions
    from delayq.backoff import Backoff
    from delayq.codecs import Codec, EncryptedCodec
    from delayq.tasks._bindings import AnyClient, Binding

    OnError = Mapping[type[BaseException], Backoff | RetryAfter | Snooze | Reject | type[Reject]]

_JSON = JsonCodec()

F = TypeVar("F", bound="Callable[..., Any]")
R = TypeVar("R")


@dataclass(frozen=True)
class TaskOptions:
    """How a worker handles the calls of one task.

    Attributes:
        max_attempts: The number of attempts after which a call becomes a dead letter; None for no
            limit, UNSET for the queue's.
        backoff: How long a failed call waits for its next attempt; None for the queue's.
        timeout: How long a call may take, in seconds.
        on_error: How to treat errors, by class.
    """

    max_attempts: int | Unset | None
    backoff: Backoff | None
    timeout: float | None
    on_error: OnError | None


class _OwnSignature:
    """A method of a task that shows the parameters that its function takes from a message."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, task: BoundTask[Any] | None, _: object = None) -> Callable[..., Any]:
        if task is None:
            return self._method
        return MethodType(task.arguments.method(self._method), task)


if TYPE_CHECKING:

    def _with_own_signature(method: F) -> F: ...

else:
    _with_own_signature = _OwnSignature


class BoundTask(Generic[P]):
    """A task, and the options with which calls of it are offered."""

    def __init__(
        self, tasks: Tasks, name: str, arguments: Arguments, options: Mapping[str, Any]
    ) -> None:
        self._tasks = tasks
        self.name: str = name
        self.arguments: Arguments = arguments
        self._options: Mapping[str, Any] = options

    def options(self, **options: Unpack[OfferOptions]) -> BoundTask[P]:
        """Return the task with options for its calls: those of :meth:`delayq.ReliableQueue.offer`.

        ::

            await send_mail.options(delay=30, id="mail-7").offer("ada@example.org")

        Raises:
            BadInput: There is no such option.
        """
        from delayq._reliable.offer import OfferOptions  # noqa: PLC0415 - registering a task needs less

        names = OfferOptions.__annotations__
        if unknown := [name for name in options if name not in names]:
            raise BadInput(f"offer() has no option {unknown[0]!r}, only {', '.join(names)}")
        return BoundTask(self._tasks, self.name, self.arguments, {**self._options, **options})

    @_with_own_signature
    async def offer(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Offer a call with these arguments, as :meth:`delayq.ReliableQueue.offer` does.

        Returns:
            The message's id.

        Raises:
            BadArguments: The function does not take these arguments. Nothing was written.
            ConfigurationError: The tasks are not bound to a client.
        """
        call = Call(self.name, self.arguments.bind(args, kwargs))
        return await self._tasks.queue.offer(call, **self._options)

    @_with_own_signature
    def offer_sync(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Offer a call from code that is not async, and wait for it.

        It goes through the client of :mod:`delayq.sync` that the tasks are bound to, or through an
        async client whose event loop runs in another thread: a task that is not async can offer
        further calls like this. Otherwise as :meth:`offer`.
        """
        call = Call(self.name, self.arguments.bind(args, kwargs))
        binding = self._tasks.binding(sync=True)
        return binding.run(lambda queue: queue.offer(call, **self._options))

    @_with_own_signature
    def to_offer(self, *args: P.args, **kwargs: P.kwargs) -> Offer[Call]:
        """Return a call with these arguments, for :meth:`Tasks.offer_many` and
        :meth:`Tasks.schedule`.

        Raises:
            BadArguments: The function does not take these arguments.
            BadInput: ``durability`` is among the options: it is one of ``offer_many``.
        """
        from delayq._reliable.offer import Offer  # noqa: PLC0415 - as above

        if "durability" in self._options:
            raise BadInput("durability is not an option of a single call: pass it to offer_many()")
        call = Call(self.name, self.arguments.bind(args, kwargs), self._tasks)
        return Offer(call, **self._options)


class Task(BoundTask[P], Generic[P, R_co]):
    """A function that workers call when a message says so.

    Create one with :meth:`Tasks.task`. Calling the task itself calls the function here and now.

    Attributes:
        name: The name by which messages refer to it.
        aliases: Other names that are accepted in messages.
        function: The function.
    """

    def __init__(
        self,
        tasks: Tasks,
        function: Callable[P, R_co],
        name: str,
        aliases: tuple[str, ...],
        task_options: TaskOptions,
    ) -> None:
        functools.update_wrapper(self, function)
        super().__init__(tasks, name, Arguments(function), {})
        self.aliases: tuple[str, ...] = aliases
        self.function: Callable[P, R_co] = function
        self.task_options: TaskOptions = task_options
        self._result: Codec[Any] | None = None
        # Each of its messages begins with this.
        self.head: bytes = b'{"task":%b,"args":' % json.dumps(name).encode()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function here and now.

        Raises:
            BadArguments: A parameter that a worker would fill is missing.
        """
        if self.arguments.injected and (missing := self.arguments.missing_injected(args, kwargs)):
            raise BadArguments(
                f"{name_of(self.function)}() is not called by a worker: pass {missing[0]}=..."
            )
        return self.function(*args, **kwargs)

    @overload
    async def result(
        self: Task[..., Coroutine[Any, Any, R]],
        id: str,
        timeout: Duration | None = None,
    ) -> R: ...
    @overload
    async def result(self: Task[..., R], id: str, timeout: Duration | None = None) -> R: ...
    async def result(self, id: str, timeout: Duration | None = None) -> Any:  # noqa: A002
        """Return what the function has returned in a call, once it has.

        ::

            id = await square.offer(12)
            assert await square.result(id, timeout=30) == 144

        The queue must have ``keep`` set. Results are JSON, and have the type of the annotation
        again. Arguments and errors are those of :meth:`delayq.ReliableQueue.result`; and

        Raises:
            ConfigurationError: No codec knows the type that the function returns; or the tasks are
                not bound to a client.
        """
        codec = self._result_codec()
        payload = await self._tasks.queue.result_payload(id, timeout)
        return None if payload is None else codec.decode(payload)

    @overload
    def result_sync(
        self: Task[..., Coroutine[Any, Any, R]],
        id: str,
        timeout: Duration | None = None,
    ) -> R: ...
    @overload
    def result_sync(self: Task[..., R], id: str, timeout: Duration | None = None) -> R: ...
    def result_sync(self, id: str, timeout: Duration | None = None) -> Any:  # noqa: A002
        """Return what :meth:`result` does, from code that is not async, as :meth:`offer_sync`."""
        codec = self._result_codec()
        binding = self._tasks.binding(sync=True)
        payload = binding.run(lambda queue: queue.result_payload(id, timeout))
        return None if payload is None else codec.decode(payload)

    def _result_codec(self) -> Codec[Any]:
        if self._result is None:
            from delayq.codecs import codec_for  # noqa: PLC0415 - not needed without results

            kind = annotation_of(self.function, "return")
            self._result = self._tasks.encrypted(codec_for(Any if kind is EMPTY else kind))
        return self._result

    def __repr__(self) -> str:
        return f"<Task {self.name!r} of queue {self._tasks.name!r}>"


class TaskCodec:
    """Encodes and decodes calls of the tasks of one queue, as JSON objects:
    ``{"task":"send_mail","args":{"to":"ada@example.org","subject":"hi"}}``.

    Arguments are named, and those that were left out are missing.

    Attributes:
        results: The codec of what the tasks return.
    """

    results = _JSON

    def __init__(self, tasks: Mapping[str, Task[Any, Any]]) -> None:
        # By name and alias. There may be more later.
        self._tasks = tasks

    def encode(self, value: Call, /) -> bytes:
        """Encode a call.

        Raises:
            BadArguments: An argument is not of the type that the task's function takes.
            BadInput: It is not a call of one of the tasks.
            EncodeError: JSON has no form for an argument.
        """
        if not isinstance(value, Call):
            raise BadInput(
                f"this queue takes calls of tasks, not {type(value).__name__}: use offer() of a"
                " task, or to_offer() in offer_many([...])"
            )
        task = self._tasks.get(value.task)
        if task is None:
            raise BadInput(
                f"no task of this queue is registered as {value.task!r}; calls that follow each"
                " other, or belong to one batch, are of tasks of one queue"
            )
        return b"%b%b}" % (task.head, task.arguments.encode(value.arguments))

    def decode(self, payload: bytes, /) -> Call:
        """Decode a call. The arguments have the types of the annotations.

        Raises:
            UnknownTask: The task is not among those of the queue.
            BadArguments: The task's function does not take the arguments.
            DecodeError: It is not a call.
        """
        value = _JSON.decode(payload)
        name = value.get("task") if isinstance(value, dict) else None
        if type(name) is not str:
            raise DecodeError(
                "TaskCodec", payload, 'it is not a call of a task, {"task": name, "args": {...}}'
            )
        task = self._tasks.get(name)
        if task is None:
            raise UnknownTask(name, payload)
        return Call(task.name, task.arguments.decode(value.get("args", {})))


class Tasks:
    """Functions that are called through a reliable queue.

    ::

        tasks = delayq.Tasks("mails")

        @tasks.task(max_attempts=5)
        async def send_mail(to: str, subject: str = "hi") -> None: ...

        async with delayq.connect(tasks=[tasks]):
            await send_mail.offer("ada@example.org", subject="later")

    A worker calls the functions once :meth:`delayq.Worker.include` has been called with the tasks.

    Attributes:
        name: The queue's name.
        settings: The queue's settings that were given.
        queue_settings: Those that do not apply to a task.
        by_name: The tasks, by their names and aliases.
        encryption: The codec that was given, which encrypts their calls.
        codec: Encodes and decodes their calls.
    """

    def __init__(
        self,
        queue: str,
        *,
        codec: EncryptedCodec[Any] | None = None,
        **settings: Unpack[HandleOptions],
    ) -> None:
        """Create tasks. This needs no client.

        Args:
            queue: The queue's name.
            codec: Encrypts the calls, which are JSON, and their results. Both producers and workers
                need it.
            **settings: As for :meth:`delayq.Client.reliable_queue`. Both producers and workers use
                them. ``max_attempts`` and ``backoff`` apply to the tasks
                that have none of their own.

        Raises:
            BadName, BadInput: The name, the codec or a setting is invalid.
        """
        if not isinstance(queue, str) or not queue:
            raise BadName(f"a queue's name must be a non-empty str, not {describe_value(queue)}")
        if settings:
            from delayq._reliable import settings as reliable  # noqa: PLC0415 - needed for any

            reliable.check_names("Tasks", settings, reliable.HandleOptions)
            reliable.HandleSettings(**settings).check()
        if codec is not None:
            _check_encryption(codec)
        self.name: str = queue
        self.settings: HandleOptions = settings
        # Each task has its own retries, and other handles must not inherit them.
        self.queue_settings: dict[str, Any] = {
            name: value
            for name, value in settings.items()
            if name not in ("max_attempts", "backoff")
        }
        self.by_name: dict[str, Task[Any, Any]] = {}
        self.encryption: EncryptedCodec[Any] | None = codec
        self.codec: Codec[Call] = self.encrypted(TaskCodec(self.by_name))
        self._bindings: list[tuple[object, Binding]] = []

    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self,
        function: None = None,
        /,
        *,
        name: str | None = None,
        aliases: Iterable[str] = (),
        max_attempts: int | Unset | None = UNSET,
        backoff: Backoff | None = None,
        timeout: Duration | None = None,
        on_error: OnError | None = None,
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...
    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        aliases: Iterable[str] = (),
        max_attempts: int | Unset | None = UNSET,
        backoff: Backoff | None = None,
        timeout: Duration | None = None,
        on_error: OnError | None = None,
    ) -> Any:
        """Register a function as a task.

        A function that is not a coroutine function runs in a thread of the worker. A parameter
        whose default is :data:`delayq.tasks.INJECTED` is filled by the worker, by its type:
        :class:`~delayq.Message`, :class:`~delayq.Client`, :class:`~delayq.Worker`, or that of a
        :meth:`dependency <delayq.Worker.dependency>`.

        Args:
            function: The function, when used without parentheses.
            name: The name by which messages refer to it; the function's own name by default,
                without its module, so that the function can be moved.
            aliases: Former names, under which messages may still wait.
            max_attempts: The number of attempts after which a call becomes a dead letter; None for
                no limit. By default as given to :class:`Tasks`, or 10.
            backoff: How long a failed call waits for its next attempt. By default as given to
                :class:`Tasks`, or 1 s, then twice as long each time, up to 5 minutes.
            timeout: How long a call may take, in seconds or as a timedelta. After that it is
                cancelled, and tried again.
            on_error: How to treat errors, as for :meth:`delayq.Worker.listener`.

        Raises:
            BadInput: A setting is invalid.
            ConfigurationError: There is a task of that name already, or it is not a function.
        """
        task_options = _check_options(
            self.settings.get("max_attempts", UNSET) if max_attempts is UNSET else max_attempts,
            backoff or self.settings.get("backoff"),
            timeout,
            on_error,
        )
        former_names = (aliases,) if isinstance(aliases, str) else tuple(aliases)

        def register(function: Callable[..., Any]) -> Task[..., Any]:
            if not callable(function) or is_generator(function):
                raise ConfigurationError(
                    f"{name_of(function)} cannot be a task: it must be a function, sync or async,"
                    " that does not yield"
                )
            called = getattr(function, "__name__", None) if name is None else name
            task = Task(self, function, _check_name(called), former_names, task_options)
            for alias in (task.name, *map(_check_name, former_names)):
                if alias in self.by_name:
                    owner = name_of(self.by_name[alias].function)
                    raise ConfigurationError(
                        f"queue {self.name!r} already has a task {alias!r}: {owner}; give"
                        f" {name_of(function)} another name"
                    )
            self.by_name.update(dict.fromkeys((task.name, *former_names), task))
            return task

        return register if function is None else register(function)

    def bind(self, client: AnyClient) -> None:
        """Offer through this client from now on, until :meth:`unbind`.

        ``delayq.connect(tasks=[...])`` calls both. The client that was bound last is used.

        Args:
            client: A :class:`delayq.Client` that is open, or a client of :mod:`delayq.sync`.

        Raises:
            ConfigurationError: The type of an argument is not known to any codec.
        """
        from delayq.tasks._bindings import AsyncBinding, SyncBinding  # noqa: PLC0415 - a client has loaded what they need

        for task in self.by_name.values():
            task.arguments.check()
        kind = AsyncBinding if hasattr(client, "__aenter__") else SyncBinding
        self.add_binding(client, kind(client, self.name, self.codec, self.queue_settings))

    def add_binding(self, owner: object, binding: Binding) -> None:
        """Offer through a binding from now on, until :meth:`unbind` gets its owner."""
        self._bindings.append((owner, binding))

    def unbind(self, client: object) -> None:
        """Offer through the client that was bound before. Does nothing if it is not bound."""
        for bound in reversed(self._bindings):
            if bound[0] is client:
                self._bindings.remove(bound)
                return

    @property
    def queue(self) -> ReliableQueue[Call]:
        """The queue, on the client that the tasks are bound to: to cancel, list or count calls.

        Raises:
            ConfigurationError: The tasks are not bound to a client.
            Closed: The client is not open.
        """
        return self.binding().queue()

    async def offer_many(
        self, offers: Iterable[Offer[Call]], *, durability: str | None = None
    ) -> list[str]:
        """Offer many calls in few round trips, also of different tasks.

        ::

            await tasks.offer_many([send_mail.to_offer(address) for address in addresses])

        Arguments, result and errors are those of :meth:`delayq.ReliableQueue.offer_many`.
        """
        return await self.queue.offer_many(offers, durability=durability)

    async def offer_batch(
        self,
        offers: Iterable[Offer[Call]],
        *,
        then: Offer[Call] | None = None,
        on_failure: Offer[Call] | None = None,
        durability: str | None = None,
    ) -> Batch:
        """Offer calls that belong together, and the one that follows when all of them have ended.

        ::

            await tasks.offer_batch(
                [resize.to_offer(name) for name in names], then=publish.to_offer("album")
            )

        Arguments, result and errors are those of :meth:`delayq.ReliableQueue.offer_batch`.
        """
        return await self.queue.offer_batch(
            offers, then=then, on_failure=on_failure, durability=durability
        )

    def offer_many_sync(
        self, offers: Iterable[Offer[Call]], *, durability: str | None = None
    ) -> list[str]:
        """Offer many calls from code that is not async, as :meth:`Task.offer_sync` offers one."""
        calls = [*offers]
        return self.binding(sync=True).run(
            lambda queue: queue.offer_many(calls, durability=durability)
        )

    async def schedule(
        self,
        name: str,
        offer: Offer[Call],
        *,
        cron: str | None = None,
        every: Duration | None = None,
        timezone: str | tzinfo = UTC,
        version: int = 0,
    ) -> datetime:
        """Schedule a recurring call, as :meth:`delayq.ReliableQueue.schedule` does.

        ::

            await tasks.schedule("nightly", report.to_offer("sales"), cron="0 3 * * *")

        Args:
            name: The schedule's name.
            offer: The call, from :meth:`Task.to_offer`, with the options ``headers``, ``priority``,
                ``ttl``, ``max_attempts`` and ``timeout`` at most.
            cron: When the call is due; or ``every``.
            every: The period between calls: seconds or a timedelta.
            timezone: The time zone in which ``cron`` is evaluated.
            version: Among different definitions, the highest version wins.

        Returns:
            When the next call is due, by the server's clock (UTC).
        """
        from delayq._reliable.offer import Offer  # noqa: PLC0415 - as above

        if not isinstance(offer, Offer):
            raise BadInput("pass a call that is not offered yet: task.to_offer(...)")
        decided = (offer.delay, offer.at, offer.id, offer.unique_for)
        if any(option is not None for option in decided) or offer.on_duplicate != "raise":
            raise BadInput("a schedule decides when its calls are due, and their ids")
        if offer.group is not None:
            raise BadInput("a scheduled call cannot have a group")
        if offer.followers:
            raise BadInput("a scheduled call cannot have followers: let it call message.then()")
        return await self.queue.schedule(
            name,
            cron=cron,
            every=every,
            value=offer.value,
            timezone=timezone,
            headers=offer.headers,
            priority=offer.priority,
            ttl=offer.ttl,
            max_attempts=offer.max_attempts,
            timeout=offer.timeout,
            version=version,
        )

    def __repr__(self) -> str:
        names = sorted({task.name for task in self.by_name.values()})
        return f"<Tasks of queue {self.name!r}: {', '.join(names) or 'none'}>"

    def encrypted(self, codec: Codec[Any]) -> Codec[Any]:
        """Return a codec for messages of the queue that encrypts what ``codec`` writes, if there is
        an encryption.
        """
        if self.encryption is None:
            return codec
        return self.encryption.around(codec).for_queue(self.name)

    def binding(self, *, sync: bool = False) -> Binding:
        """Return the binding that is used; for code that is not async if ``sync``.

        Raises:
            ConfigurationError: The tasks are not bound to a client.
        """
        for _, binding in reversed(self._bindings):
            if sync or not binding.is_sync:
                return binding
        raise ConfigurationError(
            f"the tasks of queue {self.name!r} are not bound to a client: open one with"
            f" delayq{'.sync' * sync}.connect(tasks=[...]), or call bind(client)"
        )


def _check_encryption(codec: object) -> None:
    from delayq.codecs import EncryptedCodec  # noqa: PLC0415 - most tasks have none

    if not isinstance(codec, EncryptedCodec) or type(codec.inner) is not JsonCodec:
        raise BadInput(
            "tasks take no codec but EncryptedCodec(keys), without an inner one, not"
            f" {describe_value(codec)}: their calls are JSON"
        )


def _check_options(
    max_attempts: int | Unset | None,
    backoff: Backoff | None,
    timeout: Duration | None,
    on_error: OnError | None,
) -> TaskOptions:
    if max_attempts is not UNSET:
        check_count(max_attempts, "max_attempts", 1)
    if backoff is not None:
        check_backoff(backoff)
    limit = None if timeout is None else seconds(timeout, "timeout")
    if limit == 0:
        raise BadInput("timeout must be more than 0")
    return TaskOptions(max_attempts, backoff, limit, on_error)


def _check_name(name: object) -> str:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise BadInput(
            f"a task needs a name, a str that can be printed, not {describe_value(name)}"
        )
    return name
