"""The script that serves the queues of both kinds."""

from __future__ import annotations

from delayq._redis.scripts import Script

RESYNC = Script("resync", ("key...",), ("kind...",), repeatable=True)
