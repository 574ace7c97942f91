"""``delayq worker``: processes that run a :class:`delayq.Worker`, and who looks after them."""
