"""The server's routes over HTTP, as an ASGI application; it asks a Service for tokens and knows no engine."""
