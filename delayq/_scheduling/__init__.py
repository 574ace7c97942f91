"""Decides when to act, and on whose behalf. Decisions are plain functions; the tasks around them do the I/O."""
