"""The delayed queue in Redisson's layout: its handle, offers, transfer of due messages, and
leases.
"""
