"""The ``delayq`` command. Needs the extra ``cli``; nothing outside this package imports it."""
