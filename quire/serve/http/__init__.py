"""Connections and messages: what comes in as bytes, who may send it, and how an answer leaves. Knows no endpoint."""
