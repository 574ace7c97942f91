"""The reliable queue: its handle, messages, claims, acknowledgements, dead letters and
schedules.
"""
