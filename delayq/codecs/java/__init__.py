"""Codecs that write the same bytes as Redisson's, and Java's types that Python lacks."""
