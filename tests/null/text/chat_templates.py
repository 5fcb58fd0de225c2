"""Chat templates in the styles that checkpoints have, written for these tests, and conversations to render."""

from __future__ import annotations

from typing import Any

CHATML = """{%- if tools %}
<|im_start|>system
{%- if messages[0].role == 'system' %}
{{ messages[0].content }}
{%- endif %}
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{%- elif messages[0]['role'] == 'system' %}
<|im_start|>system
{{ messages[0]['content'] + '<|im_end|>' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == 'user' %}
        {%- set ns.open = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- if '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
<|im_start|>assistant
{% generation %}{{ content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments if call.arguments is string else call.arguments | tojson }}}
</tool_call>
        {%- endfor %}
<|im_end|>{% endgeneration %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
<|im_start|>user
        {%- endif %}
<tool_response>
{{ message.content }}
</tool_response>
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
<|im_end|>
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
    {%- if enable_thinking is defined and enable_thinking is false %}
<think>

</think>

    {%- endif %}
{%- endif %}
"""

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- macro text_of(content) -%}
    {%- if content is string -%}{{- content | trim -}}
    {%- elif content is iterable -%}
        {%- for part in content -%}{%- if part.type == 'text' -%}{{- part.text | trim -}}{%- endif -%}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = text_of(messages[0]['content']) %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message ~ "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + text_of(message.content) }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message and message.tool_calls %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

ODDS = """{% for m in messages if m.role != 'system' -%}
{% if loop.index > 3 %}{% break %}{% endif -%}
{{ loop.cycle('a', 'b') }} {{ loop.length }} {{ loop.revindex }} {{ '%-8s|%03d' | format(m.role, loop.index) }}
{{ ['x', m.content | upper] | join(', ') }} {{ {'k': [1, none], 'é': m.content} | tojson(indent=2, sort_keys=true) }}
{% for key, value in m.items() %}{{ key }}={{ value | string | length }};{% else %}nothing{% endfor %}
{% set pair = (m.role, m.content) %}{{ pair[1][:3] ~ '…' ~ pair | length }} {{ 'a' * 3 + 'b' }} {{ 2 ** 5 % 7 }}
{{ '{}-{:>5}'.format(m.role, 7) }} {{ m.content.replace('e', 'E').split() | map('capitalize') | list }}
{% filter upper %}shout {{ m.content | replace('l', 'L') | indent(2) }}{% endfilter %}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | tojson }}
{{ range(3) | list }} {{ dict(a=1).items() | list }} {{ undefined_thing }} {{ m.absent | default('none') }}
{% endfor %}"""

ROLE_MARKS = """{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + '\\n' }}
{%- set text = message.content if message.content is string else '' %}
{%- if message.role == 'assistant' and '</think>' in text %}
    {%- set reasoning = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
    {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
{%- elif message.reasoning_content is defined and message.reasoning_content is string %}
    {{- '<think>' ~ message.reasoning_content | trim ~ '</think>' }}
{%- endif %}
{{- '\\n' + text }}{{ '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|%s|>\\n' | format('assistant') }}{% else %}{{ eos_token }}{% endif %}"""

XML = """{% macro mark(name) %}<|{{ name }}|>{% endmacro %}
{%- macro extra(object, handled) %}{% for key in object if key not in handled %}
{%- if object[key] is mapping or object[key] is iterable and object[key] is not string %}
{{- '\\n<' ~ key ~ '>' ~ (object[key] | tojson | safe) ~ '</' ~ key ~ '>' }}
{%- else %}{{- '\\n<' ~ key ~ '>' ~ object[key] | string ~ '</' ~ key ~ '>' }}{% endif %}
{%- endfor %}{% endmacro %}
{%- if tools %}{{ mark('im_start') }}system
{%- for tool in tools %}{%- set tool = tool.function %}
{{- '\\n<function>\\n<name>' ~ tool.name ~ '</name>' }}{{ extra(tool, ['name', 'parameters']) }}
{%- for name, fields in tool.parameters.properties | items %}{{ '<' ~ name ~ '>' }}{{ extra(fields, []) }}{% endfor %}
{%- endfor %}{{ mark('im_end') }}{% endif %}
{%- for message in messages %}{% set head %}{{ mark('im_start') }}{{ message.role }}{% endset %}
{{- head }}
{%- if message.content is string %}{{ ' {}|{}'.format(message.content, message.name or '') }}
{%- elif message.content %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>' }}
{%- for name, value in call.function.arguments | items %}
{{- '\\n<parameter=' + name + '>' + (value if value is string else value | tojson) + '</parameter>' }}{% endfor %}
{{- '\\n</function>\\n</tool_call>' }}{% endfor %}{{ mark('im_end') }}
{% endfor %}{{ mark('im_start') ~ ['assist', 'ant'] | join }}"""

TEMPLATES = {"role_marks": ROLE_MARKS, "xml": XML, "chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "odds": ODDS}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter in <Köln> & Umgebung",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello there <b>&</b> 日本"}],
    [{"role": "system", "content": " be kind "}, {"role": "user", "content": "hi\nyou"}],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo "},
        {"role": "user", "content": "three"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"temperature": 7}'},
        {"role": "tool", "tool_call_id": "c2", "content": "wet"},
    ],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    [
        {"role": "user", "name": "ada", "content": "2 < 3 <b> 日本"},
        {"role": "assistant", "content": "<tool_call>\n{}\n</tool_call> it is"},
        {"role": "user", "content": "<i>why</i>?"},
    ],
]

HARMONY = """{%- macro about() -%}
    {%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
    {{- "Reasoning: " + reasoning_effort + "\\n\\n# Valid channels: analysis, commentary, final." }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" + about() + "<|end|>" }}
{%- set turns = messages %}
{%- set told = "" %}
{%- if messages[0].role in ("system", "developer") %}
    {%- set told = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- endif %}
{%- if told or tools %}
    {{- "<|start|>developer<|message|>" + told }}
    {%- for tool in tools or [] %}
        {{- "// " + tool.function.description + "\\ntype " + tool.function.name + ";" }}
    {%- endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in turns %}
    {%- if message.role == "assistant" %}
        {%- if "content" in message and "<|channel|>final<|message|>" in message.content %}
            {{- raise_exception("marks in content") }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set call = message.tool_calls[0].function %}
            {%- if message.content and message.thinking %}
                {{- raise_exception("Cannot pass both content and thinking") }}
            {%- elif message.content or message.thinking %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + (message.content or message.thinking) }}
                {{- "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
            {{- call.arguments | tojson + "<|call|>" }}
            {%- set last.name = call.name %}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last.name = none %}
        {%- endif %}
    {%- elif message.role == "tool" %}
        {%- if last.name is none %}{{- raise_exception("no call before") }}{%- endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content | tojson + "<|end|>" }}
    {%- elif message.role == "user" %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}"""
"""As gpt-oss's: reasoning is `thinking`, a message has one call, results follow the name of the newest."""
HARMONY_MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
