"""Chat templates: the same text as transformers, refusals that name the message, and where templates are found."""

from __future__ import annotations

import copy
import json
import pathlib
import typing
from typing import Any

import jinja2
import pytest
from chat_templates import CALL, CHATML, CONVERSATIONS, LLAMA, MISTRAL, SPECIAL, TEMPLATES, TOOLS
from small_tokenizers import byte_level
from transformers.utils.chat_template_utils import render_jinja_template

from quire.core.errors import ConfigError, InvalidParameter, RequestError
from quire.core.prompts import ROLES
from quire.serve.openai import schema
from quire.text.chat_template import ChatTemplate


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return render_jinja_template([copy.deepcopy(messages)], chat_template=source, **SPECIAL, **options)[0][0]


@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("conversation", range(len(CONVERSATIONS)))
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_equals_transformers(name: str, conversation: int, tools: Any, generation: bool) -> None:
    template, messages = ChatTemplate({"default": TEMPLATES[name]}, SPECIAL), CONVERSATIONS[conversation]
    try:
        expected = theirs(TEMPLATES[name], messages, tools=tools, add_generation_prompt=generation)
    except (jinja2.TemplateError, TypeError, AttributeError):
        with pytest.raises(RequestError, match="chat template refused"):
            template.render(messages, tools=tools, add_generation_prompt=generation)
        return
    assert template.render(messages, tools=tools, add_generation_prompt=generation) == expected


@pytest.mark.parametrize(
    ("source", "kwargs"), [(CHATML, {"enable_thinking": False}), (LLAMA, {"date_string": "1 May"})]
)
def test_kwargs_reach_the_template(source: str, kwargs: dict[str, Any]) -> None:
    text = ChatTemplate({"default": source}, SPECIAL).render(CONVERSATIONS[0], kwargs=kwargs)
    assert text == theirs(source, CONVERSATIONS[0], add_generation_prompt=True, **kwargs)
    assert text != theirs(source, CONVERSATIONS[0], add_generation_prompt=True)


@pytest.mark.parametrize("content", ["so it", "so it ", "a\n\n"])
@pytest.mark.parametrize("source", [CHATML, LLAMA])
def test_the_last_message_can_be_continued(source: str, content: str) -> None:
    messages = [{"role": "user", "content": "so it"}, {"role": "assistant", "content": content}]
    template = ChatTemplate({"default": source}, SPECIAL)
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == theirs(source, messages, continue_final_message=True)
    with pytest.raises(InvalidParameter, match="add_generation_prompt"):
        template.render(messages, continue_final_message=True)
    with pytest.raises(InvalidParameter, match="continue_final_message"):
        template.render([{"role": "assistant"}], add_generation_prompt=False, continue_final_message=True)


def test_text_parts_become_what_the_template_takes() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    plain = [{"role": "user", "content": "one\ntwo"}]
    chatml = ChatTemplate({"default": CHATML}, SPECIAL)
    assert chatml.render(parts) == chatml.render(plain)
    llama = ChatTemplate({"default": LLAMA}, SPECIAL)
    assert llama.render(parts) == theirs(LLAMA, parts, add_generation_prompt=True)
    only_parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
    assert ChatTemplate({"default": only_parts}, {}).render(plain) == "one\ntwo;"


JOINING = (
    "{% for m in messages %}{% if m['tool_calls'] is defined %}{% for tool in m['tool_calls'] %}"
    "{{ '<call>' + tool['function']['name'] + '\\n' + tool['function']['arguments'] + '</call>' }}{% endfor %}"
    "{% else %}{{ m['role'] + ':' + m['content'] }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("arguments", [{"city": "Köln"}, '{"city": "Köln"}'])
@pytest.mark.parametrize("template", [JOINING, JOINING.replace("is defined", "is defined and m['content'] is none")])
def test_a_template_that_joins_arguments_gets_text(arguments: object, template: str) -> None:
    """As DeepSeek V3's, and R1's, which has calls only where there is no content."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    text = ChatTemplate({"default": template}, {}).render(turns)
    assert text == 'user:Hi<call>f\n{"city": "Köln"}</call>'


def test_arguments_of_tool_calls_may_be_json_text() -> None:
    template = ChatTemplate({"default": LLAMA}, SPECIAL)
    written = copy.deepcopy(CONVERSATIONS[3])
    written[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Köln"}'
    assert template.render(written) == template.render(CONVERSATIONS[3])
    written[1]["tool_calls"][0]["function"]["arguments"] = "{oops"
    assert "{oops" in template.render(written), "what a model wrote has to be taken back"
    with pytest.raises(InvalidParameter, match="JSON") as caught:
        ChatTemplate({"default": TEMPLATES["xml"]}, SPECIAL).render(written)
    assert caught.value.param == "messages[1].tool_calls"
    assert CALL["function"] == {"name": "weather", "arguments": {"city": "Köln"}}, "the caller's messages were changed"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([{"content": "x"}], "messages[0]"),
        (None, "messages"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "ipython", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, 7], "messages[1]"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "file:///etc"}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": object()}], "messages[0]"),
        ([{"role": "user", "content": "x", "tool_calls": ["f"]}], "messages[0].tool_calls"),
    ],
)
def test_bad_messages_are_named(messages: Any, param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        ChatTemplate({"default": CHATML}, SPECIAL).render(messages)
    assert caught.value.param == param


def test_roles_are_those_of_the_server() -> None:
    """What a client may send a template takes, and the other way about; a developer speaks as the system."""
    kinds = [message.__struct_config__.tag for message in typing.get_args(schema.Message)]
    assert sorted(kinds) == sorted(ROLES)
    template = ChatTemplate({"default": CHATML}, SPECIAL)
    texts = [template.render([{"role": role, "content": "x"}]) for role in ("developer", "system")]
    assert texts[0] == texts[1] and "system" in texts[0]
    with pytest.raises(InvalidParameter, match="'bogus' is not allowed: it must be one of system, developer, user, "):
        template.render([{"role": "bogus", "content": "x"}])


def test_deep_values_are_refused() -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidParameter, match="64 levels"):
        ChatTemplate({"default": CHATML}, SPECIAL).render([{"role": "user", "content": "x", "extra": deep}])


@pytest.mark.parametrize(
    "name", ["messages", "tools", "chat_template", "tokenize", "bos_token", "raise_exception", "range", "_x", "a b"]
)
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        ChatTemplate({"default": CHATML}, SPECIAL).render(CONVERSATIONS[0], kwargs={name: "{{ 7 * 7 }}"})
    assert caught.value.param == "chat_template_kwargs"


def test_what_the_template_says_reaches_the_user_cut_short() -> None:
    template = ChatTemplate({"default": MISTRAL}, SPECIAL)
    with pytest.raises(RequestError, match="must alternate") as caught:
        template.render(CONVERSATIONS[4])
    assert caught.value.param == "messages"
    loud = ChatTemplate({"default": "{{ raise_exception(messages[0].content * 1000) }}"}, {})
    with pytest.raises(RequestError) as caught:
        loud.render([{"role": "user", "content": "spam"}])
    assert len(str(caught.value)) < 300


def test_user_text_is_never_a_template() -> None:
    text = ChatTemplate({"default": CHATML}, SPECIAL).render([{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}])
    assert "{{ 7 * 7 }}{% raw %}" in text


def found(folder: pathlib.Path, override: pathlib.Path | None = None, **options: Any) -> str | None:
    template = ChatTemplate.load(folder, override)
    return None if template is None else template.render([{"role": "user", "content": "x"}], **options)


def test_templates_are_found_where_transformers_looks(make_folder: Any) -> None:
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "chat_template": "config {{ bos_token }}"}
    folder = make_folder(byte_level(), config)
    assert found(make_folder(byte_level(), {})) is None
    assert found(folder) == "config <s>"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert found(folder) == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert found(folder, tools=TOOLS) == "jinja"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert (found(folder), found(folder, tools=TOOLS)) == ("jinja", "tools")
    (folder / "mine.jinja").write_text("mine {{ bos_token }}")
    assert found(folder, folder / "mine.jinja", tools=TOOLS) == "mine <s>"
    with pytest.raises(ConfigError, match=r"absent\.jinja cannot be read"):
        found(folder, folder / "absent.jinja")


def test_a_range_that_is_too_long_is_told() -> None:
    """For any message when the template is loaded, for one of them when it is rendered."""
    with pytest.raises(ConfigError, match="chat template 'default', for one short message: Range too big"):
        ChatTemplate({"default": "{% for i in range(10**9) %}x{% endfor %}"}, {})
    for_some = ChatTemplate({"default": "{% if messages | length > 1 %}{{ range(10**9) | list }}{% endif %}x"}, {})
    with pytest.raises(RequestError, match="refused these messages: 'Range too big"):
        for_some.render([{"role": "user", "content": "x"}] * 2)


def test_named_templates_in_the_config(make_folder: Any) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = make_folder(byte_level(), {"chat_template": named})
    assert (found(folder), found(folder, tools=TOOLS)) == ("plain", "tools")
    for wrong in ([{"name": 3}], 5, {"default": "plain"}, ["plain"], True):
        with pytest.raises(ConfigError, match="list of named ones"):
            found(make_folder(byte_level(), {"chat_template": wrong}))
    assert found(make_folder(byte_level(), {"chat_template": None})) is None
    assert found(make_folder(byte_level(), {"chat_template": []})) is None
    with pytest.raises(RequestError, match="no default"):
        found(make_folder(byte_level(), {"chat_template": named[1:]}))


def test_a_role_that_the_template_names_is_one() -> None:
    source = "{% for m in messages %}{{ '<out>' if m.role == 'ipython' else '' }}{{ m.content }}{% endfor %}"
    template = ChatTemplate({"default": source}, {})
    assert str(template.render([{"role": "ipython", "content": "4"}], add_generation_prompt=False)) == "<out>4"
    for role in ("observation", ["ipython"], None):
        with pytest.raises(InvalidParameter, match="or one that the chat template names"):
            template.render([{"role": role, "content": "4"}])
