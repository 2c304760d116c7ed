"""A server: OpenAI's interface over an engine, many requests at once."""
