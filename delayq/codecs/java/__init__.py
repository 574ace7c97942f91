"""Codecs that write the same bytes as Redisson's, and Java's types where Python has none of its
own.
"""
