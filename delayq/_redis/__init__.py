"""Everything that speaks to the server. Nothing outside this package imports ``redis``."""
