"""How models' chat templates write tool calls and texts, each reduced to that."""

from __future__ import annotations

_EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
_DONE = "{% endfor %}{% endfor %}"

QWEN = (
    '{% if tools %}call as <tool_call>{"name": ...}</tool_call>{% endif %}' + _EACH + "<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>' + _DONE
)
LLAMA = (
    "{% for t in tools or [] %}{{ t | tojson(indent=4) }}{% endfor %}"
    + _EACH
    + "{{ '{\"name\": \"' + c.function.name + '\", ' }}{{ '\"parameters\": ' }}"
    + '{{ c.function.arguments | tojson }}{{ "}" }}'
    + _DONE
)
MISTRAL = (
    _EACH
    + "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '[TOOL_CALLS] [{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}]' + _DONE
)
DEEPSEEK = _EACH + "{{ 'call ' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}" + _DONE
KIMI = (
    _EACH + "{{ c.id }}{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}" + _DONE
)
PRINTS = _EACH + "{{ c.function.name }}({{ c.function.arguments }})" + _DONE
NONE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"

TEXTS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
ADDS = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
_PARTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }};{% endif %}{% endfor %}"
PARTS = "{% for m in messages %}<{{ m.role }}>" + _PARTS + "{% endfor %}"
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    + _PARTS
    + "{% endif %}{% endfor %}"
)
