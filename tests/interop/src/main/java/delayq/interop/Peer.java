package delayq.interop;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.redisson.Redisson;
import org.redisson.api.RBlockingQueue;
import org.redisson.api.RDelayedQueue;
import org.redisson.api.RedissonClient;
import org.redisson.client.codec.ByteArrayCodec;
import org.redisson.client.codec.Codec;
import org.redisson.client.codec.IntegerCodec;
import org.redisson.client.codec.LongCodec;
import org.redisson.client.codec.StringCodec;
import org.redisson.codec.JsonJacksonCodec;
import org.redisson.codec.Kryo5Codec;
import org.redisson.codec.TypedJsonJacksonCodec;
import org.redisson.config.Config;

/**
 * Redisson as the tests drive it: one JSON request per line on stdin, one JSON answer per line on stdout.
 *
 * <p>A request is {@code {"id": 1, "do": "offer", "queue": "q", ...}}, its answer {@code {"id": 1, "result": ...}} or
 * {@code {"id": 1, "error": "..."}}. Requests run side by side: a take may wait while offers go on.
 */
public final class Peer {
    private static final ObjectMapper JSON = new ObjectMapper();
    // Enough for throughput, and few enough that the last one of them is answered long before Redisson gives it up.
    private static final int OFFERS_ON_THEIR_WAY = 200;

    private final RedissonClient redisson;
    private final Map<String, Queue> queues = new ConcurrentHashMap<>();

    private Peer(RedissonClient redisson) {
        this.redisson = redisson;
    }

    public static void main(String[] args) throws IOException {
        var config = new Config();
        config.useSingleServer().setAddress(args[0]);
        var peer = new Peer(Redisson.create(config));
        var threads = Executors.newCachedThreadPool();
        answer(Map.of("id", 0, "result", "ready"));
        var requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (var line = requests.readLine(); line != null; line = requests.readLine()) {
            var request = JSON.readTree(line);
            threads.execute(() -> peer.serve(request));
        }
        // Whoever started us is gone. Waiting takes would hold up an orderly end.
        Runtime.getRuntime().halt(0);
    }

    private void serve(JsonNode request) {
        var answer = new HashMap<String, Object>();
        answer.put("id", request.get("id").asInt());
        try {
            answer.put("result", run(request));
        } catch (Exception | LinkageError error) {
            answer.put("error", error.toString());
        }
        answer(answer);
    }

    private static synchronized void answer(Map<String, Object> answer) {
        try {
            System.out.println(JSON.writeValueAsString(answer));
        } catch (IOException error) {
            throw new IllegalStateException(error);
        }
    }

    private Object run(JsonNode request) throws Exception {
        var name = request.get("queue").asText();
        if (request.get("do").asText().equals("open")) {
            queues.put(name, new Queue(name, request.get("codec").asText(), request.get("attached").asBoolean()));
            return null;
        }
        var queue = queues.get(name);
        return switch (request.get("do").asText()) {
            case "offer" -> queue.offer(request.get("messages"));
            case "take" -> queue.take(request.get("count").asInt());
            case "consume" -> queue.consume();
            case "stop" -> queue.stopped = true;
            case "size" -> queue.delayed.size();
            case "readAll" -> queue.delayed.readAll();
            case "contains" -> queue.delayed.contains(queue.value(request.get("value")));
            case "remove" -> queue.delayed.remove(queue.value(request.get("value")));
            case "poll" -> queue.delayed.poll();
            case "detach" -> queue.detach();
            default -> throw new IllegalArgumentException("what is " + request.get("do") + "?");
        };
    }

    /** A value, and when it came, by this machine's clock. */
    private record Arrival(Object value, long at) {}

    private final class Queue {
        private final String codec;
        private final RBlockingQueue<Object> ready;
        private final RDelayedQueue<Object> delayed;
        private volatile boolean stopped;

        /** Only an attached client subscribes to the channel and moves what comes due. */
        Queue(String name, String codec, boolean attached) {
            this.codec = codec;
            ready = redisson.getBlockingQueue(name, codec(codec));
            delayed = attached ? redisson.getDelayedQueue(ready) : null;
        }

        /** Offer [[value, delay in ms], ...], and tell when each was on its way: none is due earlier than that plus its delay. */
        List<Long> offer(JsonNode messages) throws Exception {
            var times = new ArrayList<Long>();
            var offers = new ArrayList<Future<Void>>();
            for (var message : messages) {
                var value = value(message.get(0));
                times.add(System.currentTimeMillis());
                offers.add(delayed.offerAsync(value, message.get(1).asLong(), TimeUnit.MILLISECONDS));
                if (offers.size() >= OFFERS_ON_THEIR_WAY) {
                    offers.get(offers.size() - OFFERS_ON_THEIR_WAY).get();
                }
            }
            for (var offer : offers) {
                offer.get();
            }
            return times;
        }

        List<Arrival> take(int count) throws InterruptedException {
            var arrivals = new ArrayList<Arrival>(count);
            while (arrivals.size() < count) {
                var value = ready.take();
                arrivals.add(new Arrival(value, System.currentTimeMillis()));
            }
            return arrivals;
        }

        /** Take until told to stop. An interrupted take would lose what it is just taking. */
        List<Arrival> consume() throws InterruptedException {
            var arrivals = new ArrayList<Arrival>();
            while (!stopped) {
                var value = ready.poll(1, TimeUnit.SECONDS);
                if (value != null) {
                    arrivals.add(new Arrival(value, System.currentTimeMillis()));
                }
            }
            return arrivals;
        }

        Object detach() {
            if (delayed != null) {
                delayed.destroy();
            }
            return null;
        }

        Object value(JsonNode json) throws IOException {
            return switch (codec) {
                case "LongCodec" -> json.asLong();
                case "ByteArrayCodec" -> json.binaryValue();
                default -> JSON.treeToValue(json, Object.class);
            };
        }
    }

    private static Codec codec(String name) {
        return switch (name) {
            case "StringCodec" -> StringCodec.INSTANCE;
            case "LongCodec" -> LongCodec.INSTANCE;
            case "IntegerCodec" -> IntegerCodec.INSTANCE;
            case "ByteArrayCodec" -> ByteArrayCodec.INSTANCE;
            case "TypedJsonJacksonCodec" -> new TypedJsonJacksonCodec(Object.class);
            case "JsonJacksonCodec" -> JsonJacksonCodec.INSTANCE;
            case "Kryo5Codec" -> new Kryo5Codec();
            default -> throw new IllegalArgumentException("no codec " + name);
        };
    }
}
