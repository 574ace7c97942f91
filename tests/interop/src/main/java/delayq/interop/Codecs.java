package delayq.interop;

import io.netty.buffer.ByteBuf;
import io.netty.buffer.ByteBufUtil;
import io.netty.buffer.Unpooled;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.TreeMap;
import org.redisson.client.codec.ByteArrayCodec;
import org.redisson.client.codec.Codec;
import org.redisson.client.codec.IntegerCodec;
import org.redisson.client.codec.LongCodec;
import org.redisson.client.codec.StringCodec;
import org.redisson.codec.JsonJacksonCodec;
import org.redisson.codec.Kryo5Codec;
import org.redisson.codec.TypedJsonJacksonCodec;

/**
 * Redisson's codecs without a server.
 *
 * <p>Reads lines {@code codec hex}, decodes the bytes and encodes what came out; answers {@code class hex}, or {@code ! error}.
 */
public final class Codecs {
    static final Map<String, Codec> BY_NAME = new TreeMap<>(Map.of(
            "JsonJackson", new JsonJacksonCodec(),
            "TypedJson", new TypedJsonJacksonCodec(Object.class),
            "Kryo5", new Kryo5Codec(),
            "String", StringCodec.INSTANCE,
            "Long", LongCodec.INSTANCE,
            "Integer", IntegerCodec.INSTANCE,
            "Bytes", ByteArrayCodec.INSTANCE));

    private Codecs() {}

    public static void main(String[] arguments) throws IOException {
        var in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        var out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        for (var line = in.readLine(); line != null; line = in.readLine()) {
            out.println(answer(line.split(" ", -1)));
        }
        out.flush();
    }

    private static String answer(String[] line) {
        try {
            var payload = Unpooled.wrappedBuffer(ByteBufUtil.decodeHexDump(line[1]));
            var value = BY_NAME.get(line[0]).getValueDecoder().decode(payload, null);
            return (value == null ? "null" : value.getClass().getName()) + " " + encode(line[0], value);
        } catch (Exception | StackOverflowError error) {
            return "! " + error.toString().lines().findFirst().orElse("");
        }
    }

    static String encode(String codec, Object value) throws IOException {
        ByteBuf payload = BY_NAME.get(codec).getValueEncoder().encode(value);
        try {
            return ByteBufUtil.hexDump(payload);
        } finally {
            payload.release();
        }
    }
}
