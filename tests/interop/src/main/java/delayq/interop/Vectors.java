package delayq.interop;

import java.io.IOException;
import java.io.PrintStream;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.Date;
import java.util.HashMap;
import java.util.HashSet;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.LinkedList;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.UUID;
import java.util.concurrent.ConcurrentHashMap;

/**
 * What Redisson's codecs make of Java values: lines {@code codec | value | text | hex}.
 *
 * <p>Without arguments: what {@code tests/data/redisson_codec_vectors_more.txt} holds, below its header. With a seed and a count: so many random
 * scalars. A scalar is told as its class and text that says it exactly, a container by a name that the tests know.
 */
public final class Vectors {
    public enum Colour { RED, GREEN }

    /** Each kind of field: primitive, boxed, final, not final, and declared as less than it is. */
    public static class Pojo {
        public String name = "né\uD83D\uDE00";
        public int small = -1;
        public long large = 5_000_000_000L;
        public Long boxed = 5L;
        public double real = 1e-5;
        public boolean yes = true;
        public Integer missing;
        public byte[] blob = {1, 2};
        public Date when = new Date(-1);
        public BigDecimal price = new BigDecimal("1.50");
        public UUID uuid = new UUID(1, 2);
        public Colour colour = Colour.GREEN;
        public Object anything = 7L;
        public Object anyColour = Colour.RED;
        public Object anyBlob = new byte[] {3};
        public List<Object> items = new ArrayList<>(List.of("a", 1, 2L));
        public Map<String, Object> map = new HashMap<>(Map.of("k", 1L));
        public String Capital = "first";
    }

    private static final PrintStream OUT = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    private static final Set<String> PRINTED = new HashSet<>();
    private static final String[] TREES = {"JsonJackson", "TypedJson", "Kryo5"};

    private Vectors() {}

    public static void main(String[] arguments) throws IOException {
        if (arguments.length > 0) {
            random(new Random(Long.parseLong(arguments[0])), Integer.parseInt(arguments[1]));
        } else {
            scalars();
            containers();
            single();
        }
        OUT.flush();
    }

    private static void scalars() throws IOException {
        scalar(null, true, false);
        for (int value : new int[] {0, 1, -1, 31, 32, 63, 64, -64, -65, 8191, 8192, 65535, 1 << 20, Integer.MAX_VALUE, Integer.MIN_VALUE}) {
            scalar(value, (long) value);
        }
        for (int bits = 31; bits < 63; bits += 4) {
            scalar(1L << bits, (1L << bits) - 1, -(1L << bits), -(1L << bits) - 1);
        }
        scalar(Long.MAX_VALUE, Long.MIN_VALUE, Long.MAX_VALUE - 1, 1L << 53, 1L << 55, 1L << 56, -(1L << 55), -(1L << 56));
        for (String value : new String[] {"0", "1", "-1", "127", "128", "-128", "-129", "255", "256", "32768",
                "9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809",
                "18446744073709551616", "123456789012345678901234567890", "-123456789012345678901234567890"}) {
            scalar(new BigInteger(value));
        }
        scalar(BigInteger.TEN.pow(300).negate());
        // Of these Java 17 and 25 write the same digits: before JDK 19, Double.toString made some doubles longer than needed.
        for (double value : new double[] {0.0, -0.0, 1.0, -1.0, 0.1, 0.5, 1.5, 2.5, 100.0, 123.456, -19.99, 1e-3, 1.5e-3, 0.00999, 9.99e-4,
                1e-4, 1e-5, -1.25e-7, 999999.0, 1e6, 9999999.0, 9999999.5, 1e7, 1.25e7, 123456789.125, 1e10, 1e15, 1e16, 1e17, 1e21, 1e22,
                1.5e300, 4503599627370496.5, 9007199254740992.0, 9007199254740994.0, 3.141592653589793, 2.718281828459045, 0.3333333333333333,
                1e-300, Double.MIN_VALUE, Double.MIN_NORMAL, Double.MAX_VALUE, -Double.MAX_VALUE,
                Double.NaN, Double.POSITIVE_INFINITY, Double.NEGATIVE_INFINITY}) {
            scalar(value);
        }
        for (float value : new float[] {0f, -0f, 1f, 1.5f, 0.1f, 16777216f, 1e-3f, 1e7f, 1e10f, 3.1415927f, Float.MIN_VALUE, Float.MAX_VALUE,
                Float.NaN, Float.POSITIVE_INFINITY, Float.NEGATIVE_INFINITY}) {
            scalar(value);
        }
        scalar((short) 0, (short) -1, (short) 300, Short.MAX_VALUE, Short.MIN_VALUE);
        scalar((byte) 0, (byte) -1, (byte) 5, Byte.MAX_VALUE, Byte.MIN_VALUE);
        scalar('a', 'é', '\0', '"', '€', '\uD83D', '\uFFFF');
        for (String value : new String[] {"", "h", "hi", "hello", "\0", "a\0", "héllo", "h\u007f", "\u0080", "€uro", "\u07ff\u0800\uffff",
                "\u0000\u0001\u0002\b\t\n\u000b\f\r\u000e\u001f\u007f", "say \"hi\"", "back\\slash", "a/b", "\u2028\u2029", "\uFEFFbom",
                "\uD83D\uDE00", "x\uD83D\uDE00y", "\uD834\uDD1E\uDBFF\uDFFF", "\uD83D", "\uDE00", "a\uD83D", "\uDE00\uD83D", "5", "null", "[]", "<&>'"}) {
            scalar(value);
        }
        for (int length : new int[] {2, 31, 32, 33, 62, 63, 64, 65, 200}) {
            scalar("x".repeat(length));
        }
        for (int length : new int[] {2, 32, 33, 62, 63, 64}) {
            scalar("é".repeat(length), "\uD83D\uDE00".repeat(length), "x".repeat(length - 1) + "€");
        }
        for (int length : new int[] {0, 1, 2, 3, 4, 62, 63, 64, 126, 127, 300}) {
            var bytes = new byte[length];
            new Random(length).nextBytes(bytes);
            scalar((Object) bytes);
        }
        for (long value : new long[] {0, 1, -1, 127, 128, -5, 999, 1700000000000L, 1700000000123L, 253402300799999L, 253402300800000L,
                -62135596800000L, -62135596800001L, -86400000L, Long.MAX_VALUE, Long.MIN_VALUE}) {
            scalar(new Date(value));
        }
        for (String value : new String[] {"0", "0.0", "0.00", "0E+5", "1", "-1", "10", "100", "1E+1", "1E+3", "1.5", "1.50", "-1.5", "1.23E+5",
                "1E-10", "1.5E-7", "12345678901234567890.123456789", "-12345678901234567890.5", "19.99", "127", "128", "-128.1", "1E+100", "1E-100"}) {
            scalar(new BigDecimal(value));
        }
        scalar(new UUID(0, 0), new UUID(-1, -1), new UUID(0x0102030405060708L, 0x090a0b0c0d0e0f10L), new UUID(1L << 63, 1));
    }

    private static void containers() throws IOException {
        container("empty ArrayList", new ArrayList<>());
        container("ArrayList", new ArrayList<>(List.of("a", 1, 2L, 1.5, true)));
        container("ArrayList of nulls", new ArrayList<>(Arrays.asList(null, "a", null)));
        container("ArrayList of everything", new ArrayList<>(Arrays.asList(
                1, 5_000_000_000L, 7L, BigInteger.TEN, 1.5, Double.NaN, Double.NEGATIVE_INFINITY, 2.5f, (short) 3, (byte) 4, 'c', "s", true, null,
                new byte[] {1, 2}, new Date(5), new BigDecimal("1.50"), new UUID(1, 2), Colour.RED)));
        container("nested lists", new ArrayList<>(List.of(new ArrayList<>(List.of(new ArrayList<>(), new ArrayList<>(List.of(1)))))));
        container("LinkedList", new LinkedList<>(List.of("a", 1)));
        container("ArrayDeque", new ArrayDeque<>(List.of("a", 1)));
        container("LinkedHashSet", new LinkedHashSet<>(List.of("b", "a", 3L)));
        container("TreeSet", new TreeSet<>(List.of("b", "a")));
        container("List.of", List.of("a"));
        container("List.of two", List.of("a", "b"));
        container("List.of three", List.of(1, 2L, "c"));
        container("Arrays.asList", Arrays.asList("a", 2L));
        container("emptyList", Collections.emptyList());
        container("singletonList", Collections.singletonList("a"));
        container("String[]", new String[] {"a", null, "b"});
        container("String[] of two", new String[] {"java.util.Date", "b"});
        container("Object[]", new Object[] {"a", 1, 2L, 5_000_000_000L});
        container("int[]", new int[] {1, -2});
        container("long[]", new long[] {1, 5_000_000_000L});
        container("double[]", new double[] {1.5, 1e10, Double.NaN});
        container("Long[]", new Long[] {1L, null});
        container("list of arrays", new ArrayList<>(List.of(new int[] {1}, new String[] {"a", "b"}, new long[] {5_000_000_000L})));
        container("empty HashMap", new HashMap<>());
        container("HashMap", new HashMap<>(Map.of("k", 1L)));
        container("TreeMap", new TreeMap<>(Map.of("b", 1, "a", 5_000_000_000L)));
        container("ConcurrentHashMap", new ConcurrentHashMap<>(Map.of("k", 1L)));
        container("Map.of", Map.of("k", List.of(1L)));
        container("emptyMap", Collections.emptyMap());
        container("singletonMap", Collections.singletonMap("k", 1L));
        container("LinkedHashMap", map("id", 1, "name", "é\uD83D\uDE00", "price", 19.99, "paid", true, "large", 5_000_000_000L, "at", new Date(0)));
        container("map with nulls", map("a", null, "b", 1, "c", null, "", "empty"));
        container("map with a class key", map("b", 1, "@class", "x"));
        container("map with int keys", new TreeMap<>(Map.of(1, "a", 2, "b")));
        container("deep map", map("lines", new ArrayList<>(List.of(map("n", 1), map("n", 2L))), "empty", new LinkedHashMap<>(), "list", new ArrayList<>(),
                "blob", new byte[] {1}, "colour", Colour.GREEN, "strings", new ArrayList<>(List.of("a", "b"))));
        container("Pojo", new Pojo());
        container("list of Pojo", new ArrayList<>(List.of(new Pojo())));
        container("enum", Colour.RED);
    }

    /** What the codecs for one type write of it. */
    private static void single() throws IOException {
        for (long value : new long[] {0, 1, -1, 10, 99, Long.MAX_VALUE, Long.MIN_VALUE}) {
            print("Long", told(value), value);
        }
        for (int value : new int[] {0, 1, -1, 10, 99, Integer.MAX_VALUE, Integer.MIN_VALUE}) {
            print("Integer", told(value), value);
        }
        for (String value : new String[] {"", "hi", "héllo", "\uD83D\uDE00", "\"\\\n\0"}) {
            print("String", told(value), value);
        }
        print("Bytes", told(new byte[0]), new byte[0]);
        print("Bytes", told(new byte[] {0, 1, -1}), new byte[] {0, 1, -1});
    }

    private static void random(Random random, int count) throws IOException {
        for (int i = 0; i < count; i++) {
            scalar(switch (i % 10) {
                case 0 -> random.nextInt() >> random.nextInt(32);
                case 1 -> random.nextLong() >> random.nextInt(64);
                case 2 -> new BigInteger(1 + random.nextInt(200), random).negate();
                case 3 -> Double.longBitsToDouble(random.nextLong());
                case 4 -> random.nextInt(1_000_000) / 100.0;
                case 5 -> string(random);
                case 6 -> new Date(random.nextLong() >> (16 + random.nextInt(40)));
                case 7 -> new BigDecimal(new BigInteger(1 + random.nextInt(100), random), random.nextInt(40) - 10);
                case 8 -> new UUID(random.nextLong(), random.nextLong());
                default -> (Object) HexFormat.of().parseHex("c3".repeat(random.nextInt(150)));
            });
        }
    }

    private static String string(Random random) {
        var text = new StringBuilder();
        for (int left = random.nextInt(70); left > 0; left--) {
            text.append((char) random.nextInt(switch (random.nextInt(8)) {
                case 0 -> 0x10000;
                case 1 -> 0x20;
                case 2 -> 0x800;
                default -> 0x80;
            }));
        }
        return text.toString();
    }

    private static Map<String, Object> map(Object... entries) {
        var map = new LinkedHashMap<String, Object>();
        for (int i = 0; i < entries.length; i += 2) {
            map.put((String) entries[i], entries[i + 1]);
        }
        return map;
    }

    private static void scalar(Object... values) throws IOException {
        for (var value : values) {
            for (var codec : TREES) {
                print(codec, told(value), value);
            }
        }
    }

    private static void container(String name, Object value) throws IOException {
        for (var codec : TREES) {
            print(codec, "= " + name, value);
        }
    }

    private static void print(String codec, String told, Object value) throws IOException {
        var hex = Codecs.encode(codec, value);
        var text = new String(HexFormat.of().parseHex(hex), StandardCharsets.UTF_8);
        var shown = codec.equals("Kryo5") || text.length() > 200 ? "" : text.replaceAll("[^ -~]", ".");
        if (PRINTED.add(codec + told)) {
            OUT.println(String.join(" | ", codec, told, shown, hex));
        }
    }

    /** A scalar's class and value. */
    private static String told(Object value) {
        if (value == null) {
            return "null";
        }
        var kind = value.getClass().getSimpleName();
        if (value instanceof String || value instanceof Character) {
            return kind + " " + quoted(value.toString());
        }
        if (value instanceof byte[] bytes) {
            return kind + " " + HexFormat.of().formatHex(bytes);
        }
        return kind + " " + (value instanceof Date date ? date.getTime() : value);
    }

    /** A JSON string in ASCII, without the bar that separates our columns. */
    private static String quoted(String text) {
        var quoted = new StringBuilder("\"");
        for (char unit : text.toCharArray()) {
            boolean plain = unit >= ' ' && unit <= '~' && "\"\\|".indexOf(unit) < 0;
            quoted.append(plain ? Character.toString(unit) : String.format("\\u%04x", (int) unit));
        }
        return quoted.append('"').toString();
    }
}
