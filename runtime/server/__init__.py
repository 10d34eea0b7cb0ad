"""OpenAI-compatible HTTP over the engine: parse, admit, stream, count, stop gracefully."""
