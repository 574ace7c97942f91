"""The libraries that ``benchmarks.peers`` measures, and the scenarios of bullmq-bench."""

from __future__ import annotations

from dataclasses import dataclass

REDIS = "redis[hiredis]==8.1.0"


@dataclass(frozen=True)
class Peer:
    """A row of the table.

    Attributes:
        name: The name that is shown, and used in ``--peers``.
        version: The version that is installed.
        needs: Packages for pip, npm or Maven; empty if everything is installed already.
        module: The program in ``_peers``.
        bulk: How "many" are offered: the peer's bulk call, or the closest equivalent.
        due: How many due messages it handles in a second or two: with default settings, and with
            the best.
        best: The best settings; empty if the defaults are the best.
        slow: Whether its default lateness is up to a minute, so that it is measured in the first
            run only.
        least_redis: The first version of Redis that it works with, if that is a new one. Valkey
            will not do then.
        scenarios: The program in ``_peers`` for the scenarios of bullmq-bench, if there is one.
    """

    name: str
    version: str
    needs: tuple[str, ...]
    module: str
    bulk: str
    due: tuple[int, int]
    best: str = ""
    slow: bool = False
    kind: str = "python"
    least_redis: tuple[int, ...] = ()
    scenarios: str = ""


PEERS = (
    Peer("delayq DelayedQueue", "", (), "delayq_delayed", "offer_many", (50_000, 0)),
    Peer("delayq ReliableQueue", "", (), "delayq_reliable", "offer_many", (15_000, 0)),
    Peer(
        "delayq Worker",
        "",
        (),
        "delayq_worker",
        "offer_many",
        (30_000, 30_000),
        "concurrency 1000",
        scenarios="delayq_bench",
    ),
    Peer(
        "raw redis-py",
        "8.1.0",
        (),
        "raw",
        "100 in a script",
        (8_000, 50_000),
        "claims 100 at a time",
    ),
    Peer(
        "arq",
        "0.28.0",
        ("arq==0.28.0",),
        "arq",
        "gather",
        (600, 4_000),
        "poll_delay 0.01, max_jobs 1000, keep_result 0",
    ),
    Peer(
        "SAQ",
        "0.26.4",
        ("saq[redis,hiredis]==0.26.4", "typing_extensions"),
        "saq",
        "gather",
        (3_000, 3_000),
        "concurrency 100",
    ),
    Peer(
        "taskiq",
        "0.13.0",
        ("taskiq==0.13.0", "taskiq-redis==1.2.4", REDIS),
        "taskiq",
        "gather",
        (3_000, 3_000),
        "update_interval 1",
        slow=True,
    ),
    Peer(
        "streaq",
        "7.2.0",
        ("streaq==7.2.0",),
        "streaq",
        "enqueue_many",
        (3_000, 3_000),
        "concurrency 100",
    ),
    Peer(
        "docket",
        "0.27.0",
        ("pydocket==0.27.0",),
        "docket",
        "add_many",
        (100, 2_000),
        "concurrency 50, intervals of 10 ms, execution_ttl 0",
    ),
    Peer(
        "BullMQ Python",
        "3.4.4",
        ("bullmq==3.4.4", REDIS),
        "bullmq",
        "addBulk",
        (3_000, 4_000),
        "concurrency 100",
    ),
    Peer(
        "Dramatiq",
        "2.2.1",
        ("dramatiq[redis]==2.2.1", REDIS),
        "dramatiq",
        "none",
        (3_000, 4_000),
        "timeout 10, 4 threads",
    ),
    Peer(
        "Celery",
        "5.7.0",
        ("celery[redis]==5.7.0", REDIS),
        "celery",
        "none",
        (2_000, 2_000),
        "solo, no gossip, mingle, heartbeat",
    ),
    Peer(
        "RQ",
        "3.0.0",
        ("rq==3.0.0", REDIS),
        "rq",
        "pipeline",
        (400, 1_000),
        "SimpleWorker: no process for each job",
    ),
    Peer(
        "Huey",
        "3.5.4",
        ("huey==3.5.4", REDIS),
        "huey",
        "none",
        (8_000, 8_000),
        "2 workers, max_delay 0.01",
    ),
    Peer(
        "BullMQ Node",
        "6.7.0",
        ("bullmq@6.7.0", "ioredis@6.0.0"),
        "bullmq.cjs",
        "addBulk",
        (10_000, 20_000),
        "concurrency 100",
        kind="node",
        scenarios="bullmq_bench.cjs",
    ),
    Peer(
        "taskito",
        "0.22.0",
        ("taskito==0.22.0",),
        "taskito",
        "aenqueue_many",
        (500, 3_000),
        "polls every 5 ms, batches of 500",
    ),
    # Its worker starts on an older server, and handles nothing.
    Peer(
        "ChasquiMQ",
        "1.3.0",
        ("chasquimq==1.3.0",),
        "chasquimq",
        "gather",
        (10_000, 10_000),
        "no events, no repeats",
        least_redis=(8, 6),
        scenarios="chasquimq_bench",
    ),
    Peer(
        "Redisson",
        "4.7.0",
        ("redisson 4.7.0",),
        "redisson",
        "offerAsync",
        (5_000, 5_000),
        "poll(100)",
        kind="java",
    ),
)


@dataclass(frozen=True)
class Scenario:
    """A scenario of bullmq-bench: jobs are added, or handled by a worker if it has a concurrency.

    Attributes:
        name: The name that it has there.
        jobs: The number of jobs that are measured.
        warm_up: The number of jobs before them.
        bulk: How many jobs a call adds; 0 for a call for each job.
        width: The number of objects in the data of a job.
        depth: How deep objects are nested in each of them.
        concurrency: How many jobs the worker handles at a time; 0 if there is no worker.
    """

    name: str
    jobs: int
    warm_up: int = 1000
    bulk: int = 0
    width: int = 1
    depth: int = 1
    concurrency: int = 0


SCENARIOS = (
    Scenario("queue-add", 1000, width=10, depth=10),
    Scenario("queue-add-bulk", 10_000, bulk=50),
    Scenario("worker-generic", 1000, concurrency=1),
    Scenario("worker-concurrent", 10_000, concurrency=100),
)
