package shop;

import com.fasterxml.jackson.annotation.JsonInclude;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.sql.Timestamp;
import java.util.ArrayList;
import java.util.Collection;
import java.util.Currency;
import java.util.Date;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.LinkedList;
import java.util.List;
import java.util.Map;
import java.util.Queue;
import java.util.Set;
import java.util.SortedMap;
import java.util.SortedSet;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.UUID;
import java.util.concurrent.atomic.AtomicLong;

/**
 * A field for each declaration in the table of docs/codecs.md, named like it: whatever is no letter or digit is an underscore.
 *
 * <p>Only what a payload sets is written again.
 */
@JsonInclude(JsonInclude.Include.NON_DEFAULT)
public class Declared {
    public int f_int;
    public Integer f_Integer;
    public short f_short;
    public Short f_Short;
    public byte f_byte;
    public Byte f_Byte;
    public long f_long;
    public Long f_Long;
    public double f_double;
    public Double f_Double;
    public float f_float;
    public Float f_Float;
    public boolean f_boolean;
    public Boolean f_Boolean;
    public char f_char;
    public Character f_Character;
    public String f_String;
    public BigDecimal f_BigDecimal;
    public BigInteger f_BigInteger;
    public AtomicLong f_AtomicLong;
    public Number f_Number;
    public Object f_Object;
    public Date f_Date;
    public Timestamp f_Timestamp;
    public UUID f_UUID;
    public Currency f_Currency;
    public byte[] f_byte__;
    public char[] f_char__;
    public int[] f_int__;
    public long[] f_long__;
    public double[] f_double__;
    public Integer[] f_Integer__;
    public String[] f_String__;
    public Status[] f_Status__;
    public Long[] f_Long__;
    public BigDecimal[] f_BigDecimal__;
    public Object[] f_Object__;
    public List<String> f_List_String_;
    public Collection<String> f_Collection_String_;
    public ArrayList<String> f_ArrayList_String_;
    public List<Long> f_List_Long_;
    public List<BigDecimal> f_List_BigDecimal_;
    public List<Status> f_List_Status_;
    public List<Step> f_List_Step_;
    public List<Item> f_List_Item_;
    public LinkedList<String> f_LinkedList_String_;
    public Queue<String> f_Queue_String_;
    public Set<String> f_Set_String_;
    public HashSet<String> f_HashSet_String_;
    public LinkedHashSet<String> f_LinkedHashSet_String_;
    public TreeSet<String> f_TreeSet_String_;
    public SortedSet<String> f_SortedSet_String_;
    public Map<String, Integer> f_Map_String__Integer_;
    public HashMap<String, Integer> f_HashMap_String__Integer_;
    public LinkedHashMap<String, Integer> f_LinkedHashMap_String__Integer_;
    public Map<String, Long> f_Map_String__Long_;
    public TreeMap<String, Integer> f_TreeMap_String__Integer_;
    public SortedMap<String, Integer> f_SortedMap_String__Integer_;
    public Map<Integer, String> f_Map_Integer__String_;
    public Status f_Status;
    public Step f_Step;
    public Item f_Item;
    public Point f_Point;
}
