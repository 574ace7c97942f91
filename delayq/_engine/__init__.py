"""The engine that both kinds of queue share: when to act, for whom, and in which batches."""
