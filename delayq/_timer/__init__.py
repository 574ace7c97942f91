"""The timer: a hashed wheel, and the event loop that drives it."""
