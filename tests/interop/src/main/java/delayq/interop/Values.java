package delayq.interop;

import com.fasterxml.jackson.databind.JsonNode;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Date;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;

/**
 * Java values in the lines between the tests and us, each of its own class.
 *
 * <p>null, Boolean, Integer, finite Double and String stand for themselves, an ArrayList for an array. Anything else is an
 * object of one entry, the kind and the content: {@code {"long": 5}}.
 */
final class Values {
    private Values() {}

    static Object fromJson(JsonNode json) {
        if (json.isArray()) {
            var list = new ArrayList<Object>();
            json.forEach(item -> list.add(fromJson(item)));
            return list;
        }
        if (!json.isObject()) {
            return switch (json.getNodeType()) {
                case NULL -> null;
                case BOOLEAN -> json.booleanValue();
                case STRING -> json.textValue();
                default -> {
                    if (json.isIntegralNumber() && !json.isInt()) {
                        throw new IllegalArgumentException("no Integer: " + json);
                    }
                    yield json.isInt() ? (Object) json.intValue() : (Object) json.doubleValue();
                }
            };
        }
        var kind = json.fieldNames().next();
        var content = json.get(kind);
        return switch (kind) {
            case "long" -> content.longValue();
            case "integer" -> new BigInteger(content.textValue());
            case "double" -> Double.valueOf(content.textValue());
            case "float" -> Float.valueOf(content.textValue());
            case "decimal" -> new BigDecimal(content.textValue());
            case "date" -> new Date(content.longValue());
            case "uuid" -> UUID.fromString(content.textValue());
            case "bytes" -> Base64.getDecoder().decode(content.textValue());
            case "map" -> map(new LinkedHashMap<>(), content);
            case "hash map" -> map(new HashMap<>(), content);
            case "order" -> order(content);
            default -> throw new IllegalArgumentException("what is " + kind + "?");
        };
    }

    private static Map<String, Object> map(Map<String, Object> map, JsonNode content) {
        content.fields().forEachRemaining(entry -> map.put(entry.getKey(), fromJson(entry.getValue())));
        return map;
    }

    @SuppressWarnings("unchecked")
    private static Order order(JsonNode content) {
        var order = new Order();
        order.id = (Long) fromJson(content.get("id"));
        order.text = (String) fromJson(content.get("text"));
        order.price = (Double) fromJson(content.get("price"));
        order.paid = (Boolean) fromJson(content.get("paid"));
        order.total = (BigDecimal) fromJson(content.get("total"));
        order.placed = (Date) fromJson(content.get("placed"));
        order.tags = (List<String>) fromJson(content.get("tags"));
        order.rank = (Integer) fromJson(content.get("rank"));
        return order;
    }

    static Object toJson(Object value) {
        if (value == null) {
            return null;
        }
        return switch (value.getClass().getName()) {
            case "java.lang.Boolean", "java.lang.Integer", "java.lang.String" -> value;
            case "java.lang.Double" -> Double.isFinite((Double) value) ? value : Map.of("double", value.toString());
            case "java.lang.Long" -> Map.of("long", value);
            case "java.math.BigInteger" -> Map.of("integer", value.toString());
            case "java.lang.Float" -> Map.of("float", value.toString());
            case "java.math.BigDecimal" -> Map.of("decimal", value.toString());
            case "java.util.Date" -> Map.of("date", ((Date) value).getTime());
            case "java.util.UUID" -> Map.of("uuid", value.toString());
            case "[B" -> Map.of("bytes", Base64.getEncoder().encodeToString((byte[]) value));
            case "java.util.ArrayList" -> ((List<?>) value).stream().map(Values::toJson).toList();
            case "java.util.LinkedHashMap" -> Map.of("map", entries((Map<?, ?>) value));
            case "java.util.HashMap" -> Map.of("hash map", entries((Map<?, ?>) value));
            case "delayq.interop.Order" -> Map.of("order", fields((Order) value));
            default -> throw new IllegalArgumentException("no name for " + value.getClass());
        };
    }

    private static Map<String, Object> entries(Map<?, ?> map) {
        var entries = new LinkedHashMap<String, Object>();
        map.forEach((key, value) -> entries.put((String) key, toJson(value)));
        return entries;
    }

    private static Map<String, Object> fields(Order order) {
        var fields = new LinkedHashMap<String, Object>();
        fields.put("id", toJson(order.id));
        fields.put("text", toJson(order.text));
        fields.put("price", toJson(order.price));
        fields.put("paid", toJson(order.paid));
        fields.put("total", toJson(order.total));
        fields.put("placed", toJson(order.placed));
        fields.put("tags", toJson(order.tags));
        fields.put("rank", toJson(order.rank));
        return fields;
    }
}
