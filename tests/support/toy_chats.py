"""Chat templates for the tiny tokenizers."""

from __future__ import annotations

from toy_words import word_tokenizer

ROLES = "{% set names = {'system': 'w90', 'user': 'w91', 'assistant': 'w92', 'tool': 'w93'} %}"
ASK = "{% if add_generation_prompt %}w92 {% endif %}"


def template(end: str = "[EOS]", text: str = "m.content") -> str:
    """A message is its role's word, its text and `end`."""
    return f"{ROLES}{{% for m in messages %}}{{{{ names[m.role] }}}} {{{{ {text} }}}} {end} {{% endfor %}}{ASK}"


# The system prompt stands in the last user message, as some models want it.
MOVING = (
    f"{ROLES}{{% if messages[0].role == 'system' %}}{{% set system = messages[0].content + ' ' %}}{{% endif %}}"
    "{% for m in messages if m.role != 'system' %}{{ names[m.role] }} "
    "{{ system if loop.last and system }}{{ m.content }} [EOS] {% endfor %}" + ASK
)


def chat_tokenizer(**how: str):
    return word_tokenizer(template(**how))
