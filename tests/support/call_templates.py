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
_WRITTEN = "{{ c.function.arguments | tojson }}"
_VALUE = "{{ v if v is string else v | tojson }}"
_ITEMS = "{% for k, v in c.function.arguments | items %}"
QWEN_CODER = (
    _EACH + "<tool_call>\n<function={{ c.function.name }}>\n" + _ITEMS + "<parameter={{ k }}>\n" + _VALUE + "\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>" + _DONE
)
GLM = (
    _EACH
    + "<tool_call>{{ c.function.name }}\n"
    + _ITEMS
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
    + _VALUE
    + "</arg_value>\n{% endfor %}</tool_call>"
    + _DONE
    + "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}\n<think></think>{% endif %}{% endif %}"
)
MISTRAL_ARGS = _EACH + "[TOOL_CALLS]{{ c.function.name }}[ARGS]" + _WRITTEN + _DONE
DEEPSEEK_R1 = (
    _EACH + "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\n```json\n' "
    "+ c.function.arguments + '\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}"
    + _DONE
    + "{% if add_generation_prompt %}<｜Assistant｜><think>\n"
    "{% if thinking is defined and not thinking %}</think>{% endif %}{% endif %}"
)
DEEPSEEK_V31 = (
    _EACH + "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' "
    "+ c.function.arguments + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}"
    + _DONE
    + "{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
KIMI_K2 = (
    _EACH
    + "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    + _WRITTEN
    + "<|tool_call_end|><|tool_calls_section_end|>"
    + _DONE
)
HARMONY = (
    "Reasoning: {{ reasoning_effort | default('medium') }}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% set c = m.tool_calls[0] %}<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json"
    "<|message|>" + _WRITTEN + "<|call|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
FUNCTION_GEMMA = (
    _EACH + "<start_function_call>call:{{ c.function.name + '{' }}" + _ITEMS + "{{ k }}:{{ v }}{% endfor %}}" + _DONE
)
GEMMA_4 = (
    _EACH
    + "<|tool_call>call:{{ c.function.name + '{' }}"
    + _ITEMS
    + "{{ k }}:{{ v }}{% endfor %}}<tool_call|>"
    + _DONE
    + "{% if add_generation_prompt %}{{ '' if enable_thinking else '<|channel>thought\n<channel|>' }}{% endif %}"
)
QWEN_3 = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": '
    + _WRITTEN
    + "}\n</tool_call>"
    + _DONE
    + "{% if add_generation_prompt %}<assistant>\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
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
