package shop;

/** A class of fields. */
public class Item {
    public int count;
    public String name;
}
