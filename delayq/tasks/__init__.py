"""Functions that are called through a reliable queue.

See :class:`Tasks`. Importing this package loads neither a client nor asyncio.
"""

from delayq._functions import INJECTED
from delayq.tasks._calls import Call
from delayq.tasks._tasks import BoundTask, Task, Tasks

__all__ = ["INJECTED", "BoundTask", "Call", "Task", "Tasks"]
