"""Ollama's /api, made of what chat, completions and vectors have."""
