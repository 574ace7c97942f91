"""Workers, which handle messages with functions that listen to reliable queues.

See :class:`Worker`.
"""

from delayq.worker._handling import CallNext
from delayq.worker._health import HealthServer
from delayq.worker._worker import Worker

__all__ = ["CallNext", "HealthServer", "Worker"]
