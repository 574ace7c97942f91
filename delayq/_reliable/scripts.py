"""The scripts of a reliable queue, and how to run them in one partition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delayq._redis.scripts import Script

if TYPE_CHECKING:
    from delayq._redis.client import RedisClient
    from delayq._reliable.keys import ReliableKeys

OFFER = Script("reliable/offer")
OFFER_NEW = Script("reliable/offer_new")
CLAIM = Script("reliable/claim")
ACK = Script("reliable/ack")
NACK = Script("reliable/nack")
RELEASE = Script("reliable/release")
RELEASE_CALL = Script("reliable/release_call")
EXTEND = Script("reliable/extend")
SAVE = Script("reliable/save")
BURY = Script("reliable/bury")
BURY_WAITING = Script("reliable/bury_waiting")
CANCEL = Script("reliable/cancel")
FREE_SLOTS = Script("reliable/free_slots")
RESCHEDULE = Script("reliable/reschedule")
GET = Script("reliable/get")
LIST = Script("reliable/list")
STATS = Script("reliable/stats")
EVICTED = Script("reliable/evicted")
MEND = Script("reliable/mend")
SUMMON = Script("reliable/summon")
PURGE = Script("reliable/purge")
REDRIVE = Script("reliable/redrive")
DROP_DEAD = Script("reliable/drop_dead")
TRIM_DEAD = Script("reliable/trim_dead")
FINISH = Script("reliable/finish")
ACK_THEN = Script("reliable/ack_then")
JOIN_BATCH = Script("reliable/join_batch")
SEAL_BATCH = Script("reliable/seal_batch")
CANCEL_MEMBERS = Script("reliable/cancel_members")
LIST_MEMBERS = Script("reliable/list_members")
BATCH_STATUS = Script("reliable/batch_status")
UNFINISHED = Script("reliable/unfinished")
READ_RECORDS = Script("reliable/read_records")
OUTCOME = Script("reliable/outcome")
AWAIT = Script("reliable/await")
WATCH = Script("reliable/watch")
PROGRESS = Script("reliable/progress")
RESUME = Script("reliable/resume")
SCHEDULE = Script("reliable/schedule")
UNSCHEDULE = Script("reliable/unschedule")
PAUSE_SCHEDULE = Script("reliable/pause_schedule")
RESUME_SCHEDULE = Script("reliable/resume_schedule")
OCCUR = Script("reliable/occur")
RECUR = Script("reliable/recur")
REFILL = Script("reliable/refill")
CONFIGURE = Script("reliable/configure")
RENUMBER = Script("reliable/renumber")
VACATE = Script("reliable/vacate")
REPARTITION = Script("reliable/repartition")
COPY_SETTINGS = Script("reliable/copy_settings")
SET_GROUP = Script("reliable/set_group")
LIST_GROUPS = Script("reliable/list_groups")
TALLY = Script("reliable/tally")
ACTIVITY = Script("reliable/activity")
REGISTER = Script("reliable/register")
LIST_WORKERS = Script("reliable/list_workers")


Part = str | bytes | int

PAGE = 100
"""How many messages one script reads or drops: a script blocks the whole server while it runs."""


class ScriptRunner:
    """Runs the scripts of one partition. The stores are made of this.

    Attributes:
        client: Runs the calls.
        keys: The partition's keys.
    """

    def __init__(self, client: RedisClient, keys: ReliableKeys) -> None:
        self.client: RedisClient = client
        self.keys: ReliableKeys = keys

    async def run(self, script: Script, *args: Part) -> Any:
        """Run a script, and return its reply."""
        return await self.client.run(script, self.keys.of_script(script), args)
