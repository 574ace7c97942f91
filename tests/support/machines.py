"""What the state machines have in common that compare a reliable queue with a model."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import Mock

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from redis.asyncio import Redis

import delayq
from tests.support.reliable import tries
from tests.support.reliable_store import HOUR, Store

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping

    from delayq._engine.suspects import Suspects
    from tests.support.reliable import Jobs

M = TypeVar("M", bound="QueueMachine")


class QueueMachine(RuleBasedStateMachine):
    """Drives queues. :func:`opened` adds what is slow to create."""

    runner: asyncio.Runner
    queues: Mapping[str, Jobs]
    stores: Mapping[str, Store]
    suspects: Suspects[Any]
    raw: Any

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        # Not runner.run(), which spends more time on signal handlers than on most operations.
        return self.runner.get_loop().run_until_complete(work)

    async def forget_the_last_example(self) -> None:
        await self.raw.flushall()
        if (suspect := self.suspects.suspect) is not None:
            self.suspects.remove((suspect,))


@contextmanager
def opened(
    machine: type[M], url: str, queues: Mapping[str, Mapping[str, Any]], **options: Any
) -> Iterator[type[M]]:
    """Make a machine for one server: all examples share a loop, a client and its queues.

    Args:
        machine: Its class.
        url: The server's address.
        queues: The options of each queue, by its name.
        options: Those of all queues.
    """
    runner = asyncio.Runner()
    client = delayq.connect(url, resync_interval=HOUR)
    raw = Redis.from_url(url, socket_timeout=60)

    class Machine(machine):  # type: ignore[misc, valid-type]  # the class is a parameter
        pass

    runner.run(client.__aenter__())

    async def open_queues() -> dict[str, Jobs]:
        return {name: client.reliable_queue(name, **options, **own) for name, own in queues.items()}

    Machine.runner, Machine.raw, Machine.queues = runner, raw, runner.run(open_queues())
    Machine.stores = {name: Store(raw, name) for name in queues}
    Machine.suspects = next(iter(Machine.queues.values()))._open.services.suspects
    # Otherwise, what a claim brings would depend on the speed of the machine.
    Machine.suspects.others_wait_for = 0
    # So no message is ever alone here.
    Machine.suspects.add([Mock(ends_us=1 << 62)], None)
    yield Machine
    runner.run(client.aclose())
    runner.run(raw.aclose())
    runner.close()


def run_machine(machine: type[QueueMachine], examples: int, *, usually: int, steps: int) -> None:
    """Try random examples of these many steps: ``usually`` in ``make test``, and ``examples`` with
    the hypothesis profile ``full``.
    """
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=tries(examples, usually=usually),
            stateful_step_count=steps,
            suppress_health_check=list(HealthCheck),
        ),
    )
