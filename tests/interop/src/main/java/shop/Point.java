package shop;

/** A record: its class is final. */
public record Point(long x, long y) {}
