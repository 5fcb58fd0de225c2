"""The HTTP server and its page. Knows the engine only through `AsyncLLM`; starts in `server.run`."""
