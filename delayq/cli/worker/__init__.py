"""``delayq worker``: processes that run a :class:`delayq.Worker`, and their supervisor."""
