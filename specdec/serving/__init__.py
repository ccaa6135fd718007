"""Serves many callers: an engine for asyncio, and an OpenAI-compatible server over it."""
