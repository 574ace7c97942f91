"""The ``delayq`` command. It needs the extra ``cli``; nothing outside this package imports it."""
