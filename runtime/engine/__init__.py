"""Schedule, run a round, commit: the engine, its requests and its KV bookkeeping."""
