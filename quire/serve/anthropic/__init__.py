"""Anthropic's /v1/messages, made of what chat has."""
