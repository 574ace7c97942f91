"""The doctor's conclusions from a server's replies."""

from __future__ import annotations

from delayq._redis.client import read_info
from delayq.admin import doctor


def test_the_doctor_judges_the_figures_of_a_server_and_gives_advice() -> None:
    for look, info, level in (
        (doctor._version, "redis_version=6.2.14", "ok"),
        (doctor._version, "redis_version=7.2.4 valkey_version=9.1.2", "ok"),
        (doctor._version, "redis_version=6.0.9", "wrong"),
        (doctor._version, "role=master", "note"),
        (doctor._role, "role=master connected_slaves=2", "ok"),
        (doctor._role, "role=slave master_host=a master_port=1", "wrong"),
        (doctor._persistence, "aof_enabled=1", "ok"),
        (doctor._persistence, "aof_enabled=1 aof_last_write_status=err", "wrong"),
        (doctor._persistence, "aof_enabled=0", "note"),
        (doctor._persistence, "aof_enabled=0 rdb_last_bgsave_status=err", "wrong"),
        (doctor._persistence, "loading=1", "wrong"),
        (doctor._persistence, "role=master", "note"),
        (doctor._memory, "used_memory=50 maxmemory=0 maxmemory_policy=noeviction", "ok"),
        (doctor._memory, "used_memory=95 maxmemory=100 maxmemory_policy=noeviction", "wrong"),
        (doctor._memory, "used_memory=95 maxmemory=100", "note"),
        (doctor._memory, "maxmemory=100 maxmemory_policy=volatile-lru", "wrong"),
        (doctor._memory, "maxmemory=0 maxmemory_policy=allkeys-lru", "note"),
    ):
        finding = look(dict(part.split("=") for part in info.split()))
        assert (finding.level, bool(finding.advice)) == (level, level != "ok"), info
    assert read_info(b"# Server\r\nredis_version:7.0\r\nexecutable:/a:b\r\n\r\n") == {
        "redis_version": "7.0",
        "executable": "/a:b",
    }
