package delayq.interop;

import java.math.BigDecimal;
import java.util.Date;
import java.util.List;

/** A class as users have them. */
public class Order {
    public long id;
    public String text;
    public double price;
    public boolean paid;
    public BigDecimal total;
    public Date placed;
    public List<String> tags;
    /** Null where it is not said. */
    public Integer rank;
}
