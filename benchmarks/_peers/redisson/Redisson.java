import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.time.Instant;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.redisson.api.RBlockingQueue;
import org.redisson.api.RDelayedQueue;
import org.redisson.client.codec.StringCodec;
import org.redisson.config.Config;

/** Redisson's RDelayedQueue, driven like adapter.py: take() takes messages one by one, or up to 100 at "best". */
public final class Redisson {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final int BULK = 1000;

    public static void main(String[] args) throws Exception {
        var config = new Config();
        config.setCodec(StringCodec.INSTANCE).useSingleServer().setAddress(args[1]);
        var client = org.redisson.Redisson.create(config);
        RBlockingQueue<String> ready = client.getBlockingQueue("benchmark");
        RDelayedQueue<String> queue = client.getDelayedQueue(ready);
        if (args[0].equals("offer")) {
            offer(queue);
        } else {
            handle(ready, args[2].equals("best"), new FileOutputStream(args[3], true));
        }
    }

    private static double now() {
        var now = Instant.now();
        return now.getEpochSecond() + now.getNano() / 1e9;
    }

    private static String payload(double due) throws Exception {
        return JSON.writeValueAsString(java.util.Map.of("due", due, "text", "x".repeat(62)));
    }

    private static long delay(double due) {
        return Math.max(1, (long) Math.ceil((due - now()) * 1000));
    }

    private static void offer(RDelayedQueue<String> queue) throws Exception {
        System.out.println("{\"is_async\": true}");
        var input = new BufferedReader(new InputStreamReader(System.in));
        for (var line = input.readLine(); line != null; line = input.readLine()) {
            var request = JSON.readTree(line);
            var count = request.get("count").asInt();
            var first = now() + request.get("after").asDouble();
            var dues = new double[count];
            for (var place = 0; place < count; place++) {
                dues[place] = first + request.get("spread").asDouble() * (0.6180339887 * place % 1);
            }
            var inFlight = request.get("bulk").asBoolean() ? BULK : request.get("in_flight").asInt();
            var started = System.nanoTime();
            if (inFlight > 1) {
                for (var at = 0; at < count; at += inFlight) {
                    List<CompletableFuture<Void>> calls = new ArrayList<>();
                    for (var place = at; place < Math.min(count, at + inFlight); place++) {
                        var due = dues[place];
                        calls.add(queue.offerAsync(payload(due), delay(due), TimeUnit.MILLISECONDS).toCompletableFuture());
                    }
                    CompletableFuture.allOf(calls.toArray(new CompletableFuture[0])).get();
                }
            } else {
                for (var due : dues) {
                    queue.offer(payload(due), delay(due), TimeUnit.MILLISECONDS);
                }
            }
            var seconds = (System.nanoTime() - started) / 1e9;
            System.out.println("{\"seconds\": " + seconds + ", \"first\": " + first + "}");
        }
        Runtime.getRuntime().halt(0);
    }

    private static void handle(RBlockingQueue<String> ready, boolean best, FileOutputStream output) throws Exception {
        var kept = new ArrayList<Double>();
        var writer = new Thread(() -> write(kept, output));
        writer.setDaemon(true);
        writer.start();
        new Thread(Redisson::endWithTheDriver).start();
        while (true) {
            note(ready.take(), kept);
            if (best) {
                for (var more = ready.poll(100); !more.isEmpty(); more = ready.poll(100)) {
                    for (var message : more) {
                        note(message, kept);
                    }
                }
            }
        }
    }

    private static void endWithTheDriver() {
        try {
            System.in.read();
        } catch (java.io.IOException error) {
            // Treated like the end of the input.
        }
        Runtime.getRuntime().halt(0);
    }

    private static void note(String message, List<Double> kept) throws Exception {
        var due = JSON.readTree(message).get("due").asDouble();
        synchronized (kept) {
            kept.add(now());
            kept.add(due);
        }
    }

    private static void write(List<Double> kept, FileOutputStream output) {
        try {
            while (true) {
                Thread.sleep(30);
                ByteBuffer bytes;
                synchronized (kept) {
                    bytes = ByteBuffer.allocate(kept.size() * 8).order(ByteOrder.LITTLE_ENDIAN);
                    kept.forEach(bytes::putDouble);
                    kept.clear();
                }
                output.write(bytes.array());
            }
        } catch (Exception error) {
            throw new IllegalStateException(error);
        }
    }
}
