"""Messages to a prompt by the checkpoint's Jinja template. Owns finding templates, checking messages, and rendering.

Does not own the sandbox and its limits (`text/sandbox`). Templates come from the operator alone, never from a request.
Invariants: any messages give either a string or a RequestError that names the message at fault, in bounded time; of
each character of the string it is known whether the template wrote it (`text/origin`).
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2
import jinja2.meta

from quire.core.errors import ConfigError, InvalidParameter, RequestError, shown
from quire.core.files import read_regular
from quire.core.prompts import ROLES
from quire.text.harmony import is_harmony
from quire.text.harmony_history import turns_of, with_descriptions
from quire.text.origin import MIXTURES, Origin, TracedText, origins_of, plain, texts_of, traced
from quire.text.sandbox import MAX_SOURCE_CHARS, ChatEnvironment, TemplateLimit
from quire.text.tokenizer import read_tokenizer_config, special_strings

RESERVED: Final = """messages tools documents conversation add_generation_prompt continue_final_message chat_template
    tokenize tokenizer_kwargs padding truncation max_length return_dict return_tensors return_assistant_tokens_mask"""
"""Names that a request may not use in `chat_template_kwargs`; nor those of special tokens and template functions."""
MAX_TEMPLATE_BYTES: Final = 4 * MAX_SOURCE_CHARS
_TEMPLATE_FAILS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What expressions of a template can raise."""
_MARK: Final = "\ue000CONTINUE\ue001"
"""Stands at the end of the last message while it is rendered, to find that place again; a space follows it, by which
one sees whether the template trims messages."""
_WRITTEN_BY_MODEL: Final = frozenset(("content", "reasoning", "reasoning_content", "thinking"))
"""What the model itself wrote in an assistant's message."""

Message = Mapping[str, Any]


class ChatTemplate:
    """The templates of one checkpoint: 'default', and 'tool_use' if it has one for requests with tools."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], traces: bool = True) -> None:
        """Compile and try out. ConfigError if a template is not valid, or exceeds the limits for one short message.

        traces: False gives plain strings, in which marks written by a request are as good as the template's.
        """
        self._traces = traces
        self._environment = ChatEnvironment()
        self._special_tokens = dict(special_tokens)
        self.sources = dict(sources)
        """By name."""
        self._templates = {name: self._compile(name, source) for name, source in sources.items()}
        parsed = [self._environment.parse(source) for source in sources.values()]
        self.variables = frozenset[str]().union(*map(jinja2.meta.find_undeclared_variables, parsed))
        """What the templates look at, as `messages`, and perhaps `enable_thinking`."""
        constants = (one.value for source in parsed for one in source.find_all(jinja2.nodes.Const))
        self._roles = frozenset(ROLES) | {one for one in constants if isinstance(one, str) and one.strip()}
        """A role that a template has is among the strings that it compares with, as `ipython`."""
        self._wants_parts = {name: self._try_out(name) for name in sources}
        """Whether a template takes content as a list of parts (True), as a string (False), or both (None)."""
        self._wants_text = {name: self._joins_arguments(name) for name in sources}
        """Whether a template takes the arguments of a call as JSON text alone, as DeepSeek's does."""
        self._in_messages = {name: is_harmony((source,)) for name, source in self.sources.items()}
        """Whether a template writes the messages of Harmony."""

    @classmethod
    def load(
        cls, folder: pathlib.Path, override: pathlib.Path | None = None, traces: bool = True
    ) -> ChatTemplate | None:
        """The template in file `override`, else those of the checkpoint; None if it has none.

        Looks where transformers does: chat_template.jinja and additional_chat_templates/*.jinja, else
        chat_template.json, else `chat_template` in tokenizer_config.json, as a string or as a list of named ones.
        Raises ConfigError.
        """
        config = read_tokenizer_config(folder)
        sources = {"default": _read(override)} if override is not None else _find(folder, config)
        if not sources:
            return None
        return cls(sources, special_strings(config), traces)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Encode it without adding special tokens: the template writes them. It is a `TracedText`, from
        which the tokenizer makes marks only where the template, or a role, wrote them.

        messages: each with one of `ROLES`, or a role that the template names, and content that is a string, a list of
        text parts, or absent.
        continue_final_message: leave the last message open, so that the model goes on with it.
        kwargs: further variables for the template (`chat_template_kwargs` of a request).
        Raises InvalidParameter for a bad message, tool or reserved name, and RequestError(param="messages") when the
        template refuses or fails.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError("this model's chat templates have no default one", param="messages")
        chat = _checked_messages(messages, self._wants_parts[name], self._roles, self._wants_text[name])
        described = None if tools is None else _checked_tools(tools)
        turns = chat
        if self._in_messages[name]:
            turns, described = turns_of(chat), with_descriptions(described)
        if not isinstance(kwargs, Mapping | None):
            raise InvalidParameter("chat_template_kwargs", kwargs, "an object")
        if continue_final_message:
            if add_generation_prompt:
                limit = "false when continue_final_message is true"
                raise InvalidParameter("add_generation_prompt", add_generation_prompt, limit)
            _mark_end(turns)
        variables = {
            **self._special_tokens,
            **self._checked_kwargs(kwargs or {}),
            "messages": [self._traced_message(message) for message in turns],
            "tools": None if described is None else self._traced(described),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._environment.render(self._templates[name], variables)
        except TemplateLimit as error:
            raise RequestError(f"{error.message}: send fewer or shorter messages", param="messages") from None
        except _TEMPLATE_FAILS as error:
            _check_arguments(chat)
            is_said = isinstance(error, jinja2.TemplateError | OverflowError)  # the latter of a range that is too long
            reason = shown(str(error)) if is_said else type(error).__name__
            raise RequestError(f"the chat template refused these messages: {reason}", param="messages") from None
        if continue_final_message:
            text = _cut_at_mark(text)
        if not self._traces:
            return plain(text)
        if isinstance(text, TracedText) and any(mixture in origins_of(text) for mixture in MIXTURES):
            said = list(variables.values())
            text.said = {origin: texts_of(said, origin) for origin in (Origin.MODEL, Origin.REQUEST)}
        return text

    def _traced(self, value: Any, origin: Origin = Origin.REQUEST) -> Any:
        return traced(value, origin) if self._traces else value

    def _traced_message(self, message: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for key, value in message.items():
            if key == "role":
                found[key] = value
            else:
                by_model = message["role"] == "assistant" and key in _WRITTEN_BY_MODEL
                found[self._traced(key)] = self._traced(value, Origin.MODEL if by_model else Origin.REQUEST)
        return found

    def _compile(self, name: str, source: str) -> jinja2.Template:
        if len(source) > MAX_SOURCE_CHARS:
            raise ConfigError(f"chat template {name!r} has {len(source)} characters; the limit is {MAX_SOURCE_CHARS}")
        try:
            return self._environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, OverflowError) as error:
            reason = shown(str(error)) if isinstance(error, jinja2.TemplateError) else "it is nested too deeply"
            hint = "correct it, or pass --chat-template FILE"
            raise ConfigError(f"chat template {name!r} does not compile: {reason}; {hint}") from None

    def _try_out(self, name: str) -> bool | None:
        """Render one short message in both forms of content; see `_wants_parts`."""
        word = "quire"
        found = []
        for content in (word, [{"type": "text", "text": word}]):
            try:
                found.append(self._tried(name, [{"role": "user", "content": content}]))
            except (TemplateLimit, OverflowError) as error:
                raise ConfigError(f"chat template {name!r}, for one short message: {error}") from None
            except _TEMPLATE_FAILS:
                found.append("")
        as_string, as_parts = found
        if word in as_parts and as_string == as_parts:
            return None
        return word in as_parts and "'type'" not in as_parts and word not in as_string

    def _joins_arguments(self, name: str) -> bool:
        """Whether a call can be rendered only if its arguments are text; see `_wants_text`."""
        return any(
            [self._renders_call(name, content, arguments) for arguments in ({"quire": "1"}, '{"quire": "1"}')]
            == [False, True]
            for content in (None, "")
        )

    def _renders_call(self, name: str, content: str | None, arguments: object) -> bool:
        call = {"id": "a", "type": "function", "function": {"name": "quire", "arguments": arguments}}
        said = {"role": "assistant", "content": content, "tool_calls": [call]}
        try:
            text = self._tried(name, [{"role": "user", "content": "quire"}, said])
        except (TemplateLimit, *_TEMPLATE_FAILS):
            return False
        return "quire" in text.partition("quire")[2]

    def _tried(self, name: str, messages: list[dict[str, Any]]) -> str:
        variables = {
            **self._special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        return self._environment.render(self._templates[name], variables)

    def _checked_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        for name in kwargs:
            taken = name in RESERVED.split() or name in self._special_tokens or name in self._environment.globals
            if taken or not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
                raise InvalidParameter("chat_template_kwargs", name, "free of reserved names")
        return {name: self._traced(_plain(value, "chat_template_kwargs")) for name, value in kwargs.items()}


def _find(folder: pathlib.Path, config: Mapping[str, Any]) -> dict[str, str]:
    sources: dict[str, str] = {}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = _read(path)
    if (folder / "chat_template.jinja").exists():
        sources["default"] = _read(folder / "chat_template.jinja")
    if sources:
        return sources
    found = config.get("chat_template")
    if (folder / "chat_template.json").exists():
        found = _chat_template_json(folder / "chat_template.json")
    if isinstance(found, str):
        return {"default": found}
    for entry in found if isinstance(found, list) else [] if found is None else [found]:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise ConfigError(
                f"chat_template of tokenizer_config.json is {shown(entry)}: it must be a string or a list of named"
                " ones; correct it, or pass --chat-template FILE"
            )
        sources[entry["name"]] = entry["template"]
    return sources


def _chat_template_json(path: pathlib.Path) -> object:
    try:
        found = json.loads(_read(path))
    except (ValueError, RecursionError):
        raise ConfigError(f"{path.name} is not valid JSON; correct it, or pass --chat-template FILE") from None
    return found.get("chat_template") if isinstance(found, dict) else None


def _read(path: pathlib.Path) -> str:
    try:
        return read_regular(path, MAX_TEMPLATE_BYTES).decode()
    except OSError as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the chat template {path} is not UTF-8: {error.reason} at byte {error.start}") from None


def _checked_messages(
    messages: Sequence[Message], wants_parts: bool | None, roles: frozenset[str], wants_text: bool
) -> list[dict[str, Any]]:
    """Plain copies, with content in the form that the template takes, and the arguments of tool calls too."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidParameter("messages", messages, "a list with at least one message")
    chat = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidParameter(where, message, "an object with a role")
        if not isinstance(message["role"], str) or message["role"] not in roles:
            limit = f"one of {', '.join(ROLES)}, or one that the chat template names"
            raise InvalidParameter(f"{where}.role", message["role"], limit)
        plain = _plain(message, where)
        plain["role"] = "system" if message["role"] == "developer" else str(message["role"])
        if "content" in plain:
            plain["content"] = _content(plain["content"], wants_parts, where)
        if plain.get("tool_calls") is not None:
            _parse_arguments(plain["tool_calls"], where, wants_text)
        chat.append(plain)
    return chat


def _checked_tools(tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidParameter("tools", tools, "a list of objects")
    return [_plain(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _content(content: Any, wants_parts: bool | None, where: str) -> Any:
    if content is None:
        return None
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if wants_parts else content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidParameter(f"{where}.content", kind, "a string or a list of parts of type 'text'")
    return "\n".join(part["text"] for part in parts) if wants_parts is False else content


def _parse_arguments(calls: Any, where: str, wants_text: bool) -> None:
    """OpenAI clients send arguments as JSON text; templates expect the object, but for those that want text.

    Text that is not JSON stays text: a model wrote it, its client sends it back, and the conversation has to go on.
    """
    param = f"{where}.tool_calls"
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InvalidParameter(param, call, "a list of objects with a function")
        arguments = function.get("arguments")
        if wants_text:
            if not isinstance(arguments, str):
                function["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
        elif isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                function["arguments"] = json.loads(arguments) if arguments.strip() else {}


def _check_arguments(chat: list[dict[str, Any]]) -> None:
    """InvalidParameter for arguments that have stayed text: this template wants the object."""
    for i, message in enumerate(chat):
        calls = message.get("tool_calls") or []
        for call in calls if isinstance(calls, list) else [calls]:
            arguments = call.get("function", call).get("arguments")
            if isinstance(arguments, str):
                raise InvalidParameter(f"messages[{i}].tool_calls", arguments, "valid JSON in function.arguments")


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of exact JSON types, so that a template never meets an object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth >= 64:
        raise InvalidParameter(where, "a value nested more deeply", "nested at most 64 levels")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1) for item in value]
    raise InvalidParameter(where, type(value).__name__, "made of JSON values")


def _mark_end(chat: list[dict[str, Any]]) -> None:
    last = chat[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _MARK + " "
    elif isinstance(content, list) and content:
        content[-1]["text"] += _MARK + " "
    else:
        raise InvalidParameter("continue_final_message", True, "used with a last message that has text")


def _cut_at_mark(text: str) -> str:
    """The text up to the mark; if the template trimmed the message there, the space before it goes too."""
    at = text.rfind(_MARK)
    if at < 0:
        raise RequestError("the chat template hides the last message, so it cannot be continued", param="messages")
    return text[:at] if text[at + len(_MARK) :].startswith(" ") else text[:at].rstrip()
