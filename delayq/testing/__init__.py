"""Support for testing delayed messages: tests move time instead of sleeping.

::

    async with running() as client:                    # a private server, gone with the test
        orders = client.reliable_queue("orders")
        await orders.offer("order-42", delay=1800)
        await advance(client, timedelta(minutes=30))   # it is due now
        [message] = await orders.claim()

The server is a real one, so everything works as in production. Its clock cannot be set, so stored
moments are moved back instead, which has the same effect: after :func:`advance`, every message is
due that would be due by then, leases have ended, times to live have passed, remembered ids are
forgotten, and consumers that wait for messages get them at once. Moments that the server reports
(``due_at``, ``enqueued_at``, ``died_at``, ``next_at``) are moved back with the rest.

- :func:`running`: a client on a private server; :mod:`delayq.testing.pytest_plugin`: fixtures.
- :func:`advance` and :class:`Clock` move time; :func:`settled` waits until work is finished.
- :func:`eager` runs tasks where they are offered, and :func:`recorded` records them instead.
- :class:`ManualClock` and :class:`ManualLoop` are for :class:`~delayq.HashedWheelTimer`, and need
  no server.
"""

from delayq.testing.manual import ManualClock, ManualHandle, ManualLoop
from delayq.testing.tasks import eager, recorded
from delayq.testing.time_travel import Clock, advance, running, settled

__all__ = [
    "Clock",
    "ManualClock",
    "ManualHandle",
    "ManualLoop",
    "advance",
    "eager",
    "recorded",
    "running",
    "settled",
]
