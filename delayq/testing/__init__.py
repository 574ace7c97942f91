"""For tests of what is delayed: time that a test moves, instead of sleeping.

::

    async with running() as client:                    # a private server, gone with the test
        orders = client.reliable_queue("orders")
        await orders.offer("order-42", delay=1800)
        await advance(client, timedelta(minutes=30))   # it is due now
        [message] = await orders.claim()

The server is a real one, so everything is as it is in production. Its clock cannot be set; what is stored is moved back
instead, which comes to the same: after :func:`advance` everything is due that would be due by then, leases have ended, times
to live have passed, ids that were remembered are forgotten, and whoever waits for messages gets them at once. Moments that
the server tells (``due_at``, ``enqueued_at``, ``died_at``, ``next_at``) are moved back with the rest.

- :func:`running`, a client on a private server; :mod:`delayq.testing.pytest_plugin` has it as fixtures.
- :func:`advance` and :class:`Clock` move time; :func:`settled` waits until the workers have done what there was.
- :class:`ManualClock` and :class:`ManualLoop` are for :class:`~delayq.HashedWheelTimer`, and need no server.
"""

from delayq.testing.manual import ManualClock, ManualHandle, ManualLoop
from delayq.testing.time_travel import Clock, advance, running, settled

__all__ = ["Clock", "ManualClock", "ManualHandle", "ManualLoop", "advance", "running", "settled"]
