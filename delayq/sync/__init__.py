"""Queues for code that is not asynchronous: Flask, Django's synchronous views, scripts, notebooks.

::

    with delayq.sync.connect("redis://127.0.0.1:6379/0") as client:
        client.reliable_queue("mails").offer({"to": "ada"}, delay=30)

The clients and queues here have the methods of the asynchronous ones that offer, look and
administer, with the same names, arguments and errors. To handle messages, use
:class:`delayq.Worker`, which also calls functions that are not asynchronous.
"""

from delayq.sync._client import Client, connect
from delayq.sync._queues import (
    Batch,
    DeadLetters,
    DelayedQueue,
    Groups,
    Pending,
    Ready,
    Receipt,
    ReliableQueue,
)

__all__ = [
    "Batch",
    "Client",
    "DeadLetters",
    "DelayedQueue",
    "Groups",
    "Pending",
    "Ready",
    "Receipt",
    "ReliableQueue",
    "connect",
]
