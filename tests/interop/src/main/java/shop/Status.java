package shop;

/** An enum whose constants have no bodies: its class is final. */
public enum Status {
    NEW,
    SENT
}
