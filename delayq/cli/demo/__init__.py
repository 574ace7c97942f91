"""``delayq demo``: watch delayed messages arrive, and count.

::

    producer process ── offers ──▶ server ── when due ──▶ consumer process
        │ number, delay, due time                number, arrival │
        └───────────▶ this process: matches, shows, sums up ◀────┘

Its decisions are in :mod:`~delayq.cli.demo.figures`, which is pure. The two processes
(:mod:`~delayq.cli.demo.children`) report to this one in JSON lines, and end when it does.
"""
