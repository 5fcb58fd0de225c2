"""The HTTP server and its web page. Knows the engine only through `AsyncLLM`; starts in `server.run`."""
