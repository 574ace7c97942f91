package delayq.interop;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
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
import org.redisson.client.RedisException;
import org.redisson.client.codec.ByteArrayCodec;
import org.redisson.client.codec.Codec;
import org.redisson.client.codec.IntegerCodec;
import org.redisson.client.codec.LongCodec;
import org.redisson.client.codec.StringCodec;
import org.redisson.codec.JsonJacksonCodec;
import org.redisson.codec.Kryo5Codec;
import org.redisson.codec.TypedJsonJacksonCodec;
import org.redisson.config.BaseConfig;
import org.redisson.config.Config;

/**
 * Redisson as the tests drive it: one JSON request per line on stdin, JSON answers on stdout.
 *
 * <p>A request is {@code {"id": 1, "do": "offer", "queue": "q", ...}}. What it takes is told at once, {@code {"id": 1,
 * "took": value, "at": ms}}, so that we may be killed at any time; then comes its answer, {@code {"id": 1, "result": ...}} or
 * {@code {"id": 1, "error": "..."}}. Requests run side by side: a take may wait while offers go on. How values stand in these
 * lines is said in {@link Values}.
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
        var peer = new Peer(Redisson.create(config(args)));
        var threads = Executors.newCachedThreadPool();
        tell(Map.of("id", 0, "result", "ready"));
        var requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (var line = requests.readLine(); line != null; line = requests.readLine()) {
            var request = JSON.readTree(line);
            threads.execute(() -> peer.serve(request));
        }
        // Whoever started us is gone. Waiting takes would hold up an orderly end.
        Runtime.getRuntime().halt(0);
    }

    /** One address is a server, several are nodes of a cluster. A user and its password may come first. */
    private static Config config(String[] args) {
        var config = new Config();
        var addresses = Arrays.stream(args).filter(arg -> arg.startsWith("redis://")).toArray(String[]::new);
        BaseConfig<?> servers;
        if (addresses.length == 1) {
            servers = config.useSingleServer().setAddress(addresses[0]);
        } else {
            servers = config.useClusterServers().addNodeAddress(addresses).setScanInterval(500);
        }
        // A pause of the machine is not to make it repeat a call that was carried out.
        servers.setTimeout(10_000);
        if (!args[0].startsWith("redis://")) {
            servers.setUsername(args[0]);
            servers.setPassword(args[1]);
        }
        return config;
    }

    private void serve(JsonNode request) {
        var answer = new HashMap<String, Object>();
        answer.put("id", request.get("id").asInt());
        try {
            answer.put("result", Values.toJson(run(request)));
        } catch (Exception | LinkageError error) {
            answer.put("error", error.toString());
        }
        tell(answer);
    }

    private static void tell(Map<String, Object> answer) {
        try {
            var line = (JSON.writeValueAsString(answer) + "\n").getBytes(StandardCharsets.UTF_8);
            synchronized (System.out) {
                System.out.write(line);
                System.out.flush();
            }
        } catch (IOException error) {
            throw new IllegalStateException(error);
        }
    }

    private Object run(JsonNode request) throws Exception {
        var name = request.get("queue").asText();
        var what = request.get("do").asText();
        if (what.equals("open")) {
            queues.put(name, new Queue(name, request.get("codec").asText(), request.get("attached").asBoolean()));
            return null;
        }
        var queue = queues.get(name);
        return switch (what) {
            case "offer" -> queue.offer(request.get("messages"));
            case "take" -> queue.take(request.get("id").asInt(), request.get("count").asInt());
            case "consume" -> queue.consume(request.get("id").asInt(), request.get("pause").asLong());
            case "stop" -> queue.stopped = true;
            case "size" -> queue.delayed.size();
            case "readAll" -> queue.delayed.readAll();
            case "contains" -> queue.delayed.contains(Values.fromJson(request.get("value")));
            case "remove" -> queue.delayed.remove(Values.fromJson(request.get("value")));
            case "poll" -> queue.delayed.poll();
            case "expire" -> queue.delayed.expire(Duration.ofMillis(request.get("ms").asLong()));
            case "clearExpire" -> queue.delayed.clearExpire();
            case "delete" -> queue.delayed.delete();
            case "detach" -> queue.detach();
            case "ready.size" -> queue.ready.size();
            case "ready.readAll" -> queue.ready.readAll();
            case "ready.peek" -> queue.ready.peek();
            case "ready.pass" -> queue.pass(queues.get(request.get("other").asText()), request.get("count").asInt());
            case "ready.drainTo" -> queue.drainTo(request.get("most").asInt());
            case "ready.pollFromAny" ->
                    queue.ready.pollFromAny(1, TimeUnit.SECONDS, request.get("other").asText());
            case "ready.pollLastAndOfferFirstTo" ->
                    queue.ready.pollLastAndOfferFirstTo(request.get("other").asText());
            default -> throw new IllegalArgumentException("what is " + what + "?");
        };
    }

    private final class Queue {
        private final RBlockingQueue<Object> ready;
        private final RDelayedQueue<Object> delayed;
        private volatile boolean stopped;

        /** Only an attached client subscribes to the channel and moves what comes due. */
        Queue(String name, String codec, boolean attached) {
            ready = redisson.getBlockingQueue(name, codec(codec));
            delayed = attached ? redisson.getDelayedQueue(ready) : null;
        }

        /** Offer [[value, delay in ms], ...], and tell when each was on its way: none is due earlier than that plus its delay. */
        List<Object> offer(JsonNode messages) throws Exception {
            var times = new ArrayList<Object>();
            var offers = new ArrayList<Future<Void>>();
            for (var message : messages) {
                var value = Values.fromJson(message.get(0));
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

        Object take(int id, int count) throws InterruptedException {
            for (var left = count; left > 0; left--) {
                took(id, ready.take());
            }
            return null;
        }

        /** Take until told to stop, with so many ms for each, and whatever fails. An interrupted take would lose what it just takes. */
        Object consume(int id, long pause) throws InterruptedException {
            while (!stopped) {
                try {
                    var value = ready.poll(1, TimeUnit.SECONDS);
                    if (value != null) {
                        took(id, value);
                        Thread.sleep(pause);
                    }
                } catch (RedisException connection) {
                    // As a consumer does that goes on for years.
                    Thread.sleep(10);
                }
            }
            return null;
        }

        /** A value, and when it came, by this machine's clock. */
        private void took(int id, Object value) {
            var at = System.currentTimeMillis();
            var line = new HashMap<String, Object>();
            line.put("id", id);
            line.put("took", Values.toJson(value));
            line.put("at", at);
            tell(line);
        }

        /** Take so many, of whatever class, and push each to another queue. Tell what became of each: null, or the error. */
        List<Object> pass(Queue other, int count) throws InterruptedException {
            var errors = new ArrayList<Object>();
            for (var left = count; left > 0; left--) {
                try {
                    other.ready.add(ready.take());
                    errors.add(null);
                } catch (RuntimeException error) {
                    errors.add(error.toString());
                }
            }
            return errors;
        }

        List<Object> drainTo(int most) {
            var drained = new ArrayList<Object>();
            ready.drainTo(drained, most);
            return drained;
        }

        Object detach() {
            if (delayed != null) {
                delayed.destroy();
            }
            return null;
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
