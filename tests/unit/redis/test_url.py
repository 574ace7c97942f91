"""Turn the address that a user gives into the parts that make a connection."""

from __future__ import annotations

from typing import Any

import fakeredis
import pytest
from redis.asyncio import (
    Connection,
    Redis,
    RedisCluster,
    Sentinel,
    SSLConnection,
    UnixDomainSocketConnection,
)

import delayq
from delayq._redis.url import (
    Address,
    ClusterAddress,
    SentinelAddress,
    from_client,
    from_url,
    redacted,
)
from tests.support.servers import one_server


def has(address: Address, **options: Any) -> bool:
    """Tell whether an address has these options, among others."""
    return options.items() <= address.options.items()


def test_a_url_names_host_port_database_and_user() -> None:
    for scheme in ("redis", "valkey"):
        address = one_server(f"{scheme}://me:secret@h.test:7000/3?socket_connect_timeout=2")
        assert address.connection_class is Connection
        assert has(address, host="h.test", port=7000, db=3, username="me", password="secret")
        assert has(address, socket_connect_timeout=2)


def test_tls_and_unix_sockets_have_their_own_schemes() -> None:
    assert one_server("rediss://h").connection_class is SSLConnection
    assert one_server("valkeys://h").connection_class is SSLConnection
    assert one_server("unix:///tmp/s").connection_class is UnixDomainSocketConnection
    assert one_server("valkey+unix:///tmp/a%20b").options["path"] == "/tmp/a b"
    for url in ("rediss+cluster://a,b", "valkeys+cluster://a,b", "rediss+sentinel://a,b/s"):
        address = from_url(url)
        assert not isinstance(address, Address)
        servers = (
            address.seeds
            if isinstance(address, ClusterAddress)
            else (address.server, *address.sentinels)
        )
        assert {server.connection_class for server in servers} == {SSLConnection}, url


def test_no_secret_is_shown() -> None:
    url = "redis://me:secret@example.test/0"
    for hidden in (url, "redis://h?password=a@secret", "redis://u:p@secret@h"):
        assert "secret" not in repr(from_url(hidden)), hidden
    assert redacted(url) == "redis://***@example.test/0"
    # What is wrong with an address is shown, as long as it is no secret.
    for wrong in (" redis://a:6379 ", "'redis://a'", "REDIS://a:6379/0", "redis://a b:6379"):
        assert redacted(wrong) == wrong
    assert redacted('"Redis://me:pw@a"') == '"Redis://***@a"'


NO_CLUSTER = ("", "a,", "a:0", "a:x", "a/1", "::1", "a?socket_timeout=x")


UNREADABLE = """
redis://user:secret redis://:secret/0 redis://h:secret/0 redis://u:se/secret@h/0
redis://u:se?secret@h/0 redis://u:se#secret@h/0 redis://u:0,secret redis://u:0,secret:1/0
redis://h/secret redis:secret@h redis://h/0/secret redis+cluster://u:0,secret
redis+cluster://u:1,secret/5 redis+sentinel://u:1,secret redis+sentinel://u:1,secret/service/x
u:0,secret redis://h/0?db=secret redis://h/0?wrong=secret redis://h/0?ssl_ca_certs=secret
rediss://h/0?ssl_cert_reqs=secret http://u:secret@h u:secret@h user:secret unix://:secret@
embeded://u:secret@h redis+cluster://u:secret?x@h redis+cluster://secret:x?x@h
redis+cluster://u:secret#x@h redis+sentinel://u:secret?x@h/service
redis+sentinel://u:secret@h:x/service postgres://me:secret@example.test/0
redis://me:secret@example.test/0?db=x unix+cluster://me:secret@a
"""


NO_ADDRESS = """
localhost localhost:6379 http://h unix:// redis://[::1 redis://h/0?protocol=x redis://h/orders
redis://h/-1 redis://h/0x1 rediss://h/1/2
"""


def test_an_unreadable_url_is_refused_without_quoting_a_secret() -> None:
    for url in (
        *("", *NO_ADDRESS.split(), *UNREADABLE.split()),
        *(f"redis+cluster://me:secret@{rest}" for rest in NO_CLUSTER),
        *(f"redis+sentinel://me:secret@a{rest}" for rest in ("", "/", "/s/x")),
    ):
        with pytest.raises(delayq.ConfigurationError) as caught:
            from_url(url)
        error: BaseException | None = caught.value
        while error is not None:
            assert "secret" not in f"{error}{error!r}", url
            error = error.__cause__ or error.__context__


def test_a_cluster_is_named_by_some_of_its_servers() -> None:
    address = from_url("valkey+cluster://me:secret@a:7000,b,[::1]:7002?socket_connect_timeout=2")
    assert isinstance(address, ClusterAddress)
    assert address.label == "valkey+cluster://***@a:7000,b,[::1]:7002"
    places = [(seed.options["host"], seed.options["port"]) for seed in address.seeds]
    assert places == [("a", 7000), ("b", 6379), ("::1", 7002)]
    for seed in (*address.seeds, address.seeds[0].at("c", 7003)):
        assert has(seed, username="me", password="secret", socket_connect_timeout=2)
        assert seed.connection_class is Connection
    assert has(address.seeds[0].at("c", 7003), host="c", port=7003)


def test_a_server_behind_sentinels_is_named_by_them_its_service_and_its_database() -> None:
    address = from_url(
        "redis+sentinel://me:secret@a:7000,b/my%20orders/3?sentinel_password=hidden&socket_connect_timeout=2"
    )
    assert isinstance(address, SentinelAddress)
    assert address.service == "my orders"
    assert has(address.server, db=3, username="me", password="secret", socket_connect_timeout=2)
    places = [
        (sentinel.options["host"], sentinel.options["port"], sentinel.options["db"])
        for sentinel in address.sentinels
    ]
    assert places == [("a", 7000, 0), ("b", 26379, 0)]
    # Sentinels have users of their own.
    assert {sentinel.options["password"] for sentinel in address.sentinels} == {"hidden"}
    assert {sentinel.options["username"] for sentinel in address.sentinels} == {None}


def test_delayqs_own_settings_win_over_those_of_a_given_client() -> None:
    theirs: dict[str, Any] = {"socket_timeout": 1, "health_check_interval": 5, "protocol": 3}
    client = Redis(host="example.test", port=7000, decode_responses=True, **theirs)
    address = from_client(client)
    assert isinstance(address, Address)
    assert has(address, host="example.test", port=7000)
    connection = address.connection()
    assert isinstance(connection, Connection)
    assert connection.socket_timeout is None
    assert connection.health_check_interval == 0
    assert not connection.encoder.decode_responses
    assert connection.retry.get_retries() == 0


def test_a_client_of_a_cluster_names_its_servers() -> None:
    client = RedisCluster.from_url("rediss://me:secret@127.0.0.1:7000?ssl_ca_certs=/ca.crt")
    address = from_client(client)
    assert isinstance(address, ClusterAddress)
    assert "secret" not in repr(address)
    (seed,) = address.seeds
    assert seed.is_tls
    assert has(seed, host="127.0.0.1", port=7000, username="me", password="secret")
    assert has(seed, ssl_ca_certs="/ca.crt")
    assert isinstance(seed.connection(), SSLConnection)


def test_a_client_of_sentinels_names_them_and_the_service() -> None:
    make: Any = Sentinel
    users = {"sentinel_kwargs": {"password": "hidden"}, "username": "me", "password": "secret"}
    sentinels = make([("a", 1), ("b", 2)], **users)
    address = from_client(sentinels.master_for("shop", db=3))
    assert isinstance(address, SentinelAddress)
    assert not {"secret", "hidden"} & {*repr(address).split("'")}
    assert address.service == "shop"
    for sentinel, host, port in zip(address.sentinels, "ab", (1, 2), strict=True):
        assert has(sentinel, host=host, port=port, password="hidden")
    way_in = address.server.at("c", 3)
    assert has(way_in, host="c", port=3, db=3, username="me", password="secret")
    assert type(way_in.connection()) is Connection
    assert not way_in.is_tls
    encrypted = from_client(make([("a", 1)], ssl=True).master_for("shop"))
    assert isinstance(encrypted, SentinelAddress)
    assert encrypted.server.is_tls
    with pytest.raises(delayq.ConfigurationError, match="replicas"):
        from_client(sentinels.slave_for("shop"))
    with pytest.raises(delayq.ConfigurationError, match=r"got builtins\.int"):
        from_client(5)
    with pytest.raises(delayq.ConfigurationError, match=r"fakeredis .*delayq.testing.running\(\)"):
        from_client(fakeredis.FakeAsyncRedis())


def test_without_an_address_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELAYQ_URL", "nonsense")
    with pytest.raises(delayq.ConfigurationError, match="nonsense"):
        delayq.connect()
    monkeypatch.delenv("DELAYQ_URL")
    monkeypatch.setattr("delayq._embedded.server.available", lambda: False)
    with pytest.raises(delayq.ConfigurationError, match=r"DELAYQ_URL.*delayq\[embedded\]"):
        delayq.connect()


def test_without_an_address_a_warning_says_where_messages_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("DELAYQ_URL", raising=False)
    delayq.connect()
    assert "messages go to a private server of this process" in caplog.text
    assert "are lost when the process ends" in caplog.text


def test_bad_settings_are_refused() -> None:
    intervals = ({"resync_interval": 0}, {"resync_interval": -1}, {"retry_for": -1})
    for setting in (*intervals, {"retry_for": "5s"}, {"max_connections": 0}):
        with pytest.raises(delayq.BadInput):
            delayq.connect("redis://h", **setting)
