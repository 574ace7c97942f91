"""The delayed queue in Redisson's layout: handle, offers, transfer of due messages, leases."""
