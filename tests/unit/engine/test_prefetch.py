"""How many messages are fetched ahead."""

from __future__ import annotations

from delayq._engine.prefetch import MAX_MESSAGES, begun_soon, moving_mean, next_batch


def test_only_messages_that_are_begun_within_a_moment_are_fetched_ahead() -> None:
    for handlers, took, messages in (
        *((1, 60.0, 0), (100, 60.0, 0)),
        (100, 1.0, 5),  # 100 handlers begin five messages within 50 ms
        *((1, 0.01, 5), (10, 0.1, 5)),
        *((100, 0.0001, MAX_MESSAGES), (1, 0.0, MAX_MESSAGES)),
    ):
        assert begun_soon(handlers, took) == messages, (handlers, took)


def test_the_mean_duration_follows_the_most_recent_messages() -> None:
    took = moving_mean(None, 1.0)
    assert took == 1.0
    for _ in range(100):
        before, took = took, moving_mean(took, 0.0)
        assert took < before
    assert took < 0.01


def test_the_size_of_a_batch_follows_the_pace_of_the_handler() -> None:
    for batch, got, took, following in (
        *((1, 1, 0.0, 4), (64, 64, 0.001, MAX_MESSAGES)),  # quick handling fetches more
        *((100, 100, 60.0, 1), (1, 1, 1.0, 1)),  # slow handling fetches one
        (4, 1, 0.0, 4),  # a trickle does not grow
    ):
        assert next_batch(batch, got, took) == following, (batch, got, took)
