"""The HTTP server: OpenAI's endpoints, in front of an engine. Needs the extra `serve`."""
