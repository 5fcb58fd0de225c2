"""Frameworks for agents, each in an environment of its own: a chat, the same as a stream, and a tool that is called.

The demo model knows these questions: greedy, whole and stream are one text, and the tool is asked for the right city.
"""

from __future__ import annotations

from typing import Any

SUM = "23 + 45 = 68."


def check_talk(found: dict[str, Any]) -> None:
    """The whole answer, the same in pieces, and what it cost."""
    assert found["chat"] == found["stream"] == SUM
    assert found["n_pieces"] > 1 and found["n_tokens"] > 1


def check_tool(found: dict[str, Any]) -> None:
    """The tool was called, and its result was answered."""
    assert found["cities"] == ["Paris"] and found["after_tool"]


def test_pydantic_ai(server: Any, shell: Any) -> None:
    found = shell.script("agents", "with_pydantic_ai.py", server.base)
    for api in ("chat", "responses", "anthropic"):
        check_talk(found[api])
        check_tool(found[api])
        assert found[api]["person"] == {"name": "Bob", "age": 31}


def test_openai_agents(server: Any, shell: Any) -> None:
    found = shell.script("agents", "with_openai_agents.py", server.base)
    for api in ("chat", "responses"):
        check_talk(found[api])
        check_tool(found[api])


def test_smolagents(roomy_server: Any, shell: Any) -> None:
    found = shell.script("agents", "with_smolagents.py", roomy_server.base)
    check_talk(found)
    assert found["call"] == ["get_weather", {"city": "Paris"}] or '"city"' in found["call"][1]
    assert found["n_steps"] > 1 and found["final"], "the agent did not get to its end"


def test_haystack(server: Any, shell: Any) -> None:
    found = shell.script("agents", "with_haystack.py", server.base)
    check_talk(found)
    check_tool(found)
    assert found["call"] == ["get_weather", {"city": "Paris"}] and found["responses"] == SUM


def test_semantic_kernel(server: Any, shell: Any) -> None:
    found = shell.script("agents", "with_semantic_kernel.py", server.base)
    check_talk(found)
    check_tool(found)


def test_dspy(server: Any, shell: Any) -> None:
    found = shell.script("tasks", "with_dspy.py", server.base)
    assert found["chat"] == SUM and found["n_tokens"] > 1
    assert found["predicted"] and found["streamed_answer"] == found["predicted"] and found["n_pieces"] > 2


def test_anthropic_tool_runner_and_threads(server: Any, shell: Any) -> None:
    found = shell.script("agents", "with_anthropic.py", server.base)
    assert found["cities"] == found["streamed_cities"] == ["Paris"]
    assert found["after_tool"] and found["streamed_after_tool"] == found["after_tool"]
    assert found["n_messages"] == 6 and all(found["thread"])
