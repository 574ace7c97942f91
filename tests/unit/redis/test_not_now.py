"""The errors of a server after which the same call may succeed later."""

from __future__ import annotations

import pytest

from delayq._redis.retry import is_not_now

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


@pytest.mark.parametrize("text", LATER.strip().splitlines())
def test_a_server_that_cannot_serve_now_may_later(text: str) -> None:
    assert is_not_now(text)


@pytest.mark.parametrize("text", NEVER.strip().splitlines())
def test_an_error_for_good_is_not_taken_for_one_whatever_it_quotes(text: str) -> None:
    assert not is_not_now(text)
