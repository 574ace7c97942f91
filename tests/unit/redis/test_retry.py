"""The errors of a server after which the same call may succeed later, and when it is repeated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from delayq._redis.retry import is_not_now, retry_delay

SCRIPT = "f_" + "0123456789abcdef" * 2 + "01234567"


LATER = f"""
BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.
LOADING Redis is loading the dataset in memory
READONLY You can't write against a read only replica.
READONLY You can't write against a read only replica. script: 1234, on @user_script:1.
MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.
CLUSTERDOWN Hash slot not served
TRYAGAIN Multiple keys request during rehashing of slot
NOREPLICAS Not enough good replicas to write.
MISCONF Redis is configured to save RDB snapshots, but it's unable to persist to disk.
MISCONF Errors writing to the AOF file: No space left on device
UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)
max number of clients reached
Error running script (call to {SCRIPT}): @user_script:12: -READONLY You can't write
Error running script (call to {SCRIPT}): @user_script:12: @user_script: 12: -MISCONF Redis is
"""
NEVER = f"""
NOPERM User dev-BUSY has no permissions to run the 'evalsha' command
NOPERM User LOADING has no permissions to access the 'x-READONLY' key
ACL failure in script: this user MISCONF has no permissions to run the 'zadd' command
Error running script (call to {SCRIPT}): @user_script:3: NOPERM User -BUSY has no permissions
unknown command 'TRYAGAIN'
BUSYKEY Target key name already exists.
BUSYGROUP Consumer Group name already exists
OOM command not allowed when used memory > 'maxmemory'.
WRONGTYPE Operation against a key holding the wrong kind of value
"""


def test_a_server_that_cannot_serve_now_may_later() -> None:
    for text in LATER.strip().splitlines():
        assert is_not_now(text), text


def test_an_error_for_good_is_not_taken_for_one_whatever_it_quotes() -> None:
    for text in NEVER.strip().splitlines():
        assert not is_not_now(text), text


@given(st.integers(1, 10_000))
def test_the_delay_before_a_retry_doubles_up_to_its_bound_with_jitter(attempt: int) -> None:
    assert 0.01 <= retry_delay(attempt) <= 5.0
    assert retry_delay(attempt, longest=0.5) <= 0.5
    assert retry_delay(1) <= 0.02
    assert retry_delay(50) >= 2.5
