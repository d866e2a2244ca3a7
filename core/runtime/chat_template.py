"""Chat messages to the text a model was trained to continue, through its own Jinja template.

The environment is the one that chat templates are written for (Hugging Face's `apply_chat_template`): sandboxed,
trimmed blocks, `raise_exception`, `strftime_now`, `tojson` without escaping, loop controls and `{% generation %}`.

Invariants
* A template cannot change its inputs or reach Python: it comes with the weights and is not trusted.
* Whatever a template or a message does wrong is a `RequestError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twinfer.core.errors import RequestError


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env.from_string(template)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
) -> str:
    """The prompt text of a conversation.

    messages: each with "role" and "content".  special_tokens: "bos_token", "eos_token", ... as the template names
    them.  Raises RequestError for no messages, a message without a role, or a refusal of the template.
    """
    if not messages:
        raise RequestError("messages=[]: a chat needs at least one message; give [{'role': 'user', 'content': ...}]")
    if not isinstance(messages, Sequence):
        raise RequestError(f"a conversation is a {type(messages).__name__}; give [{{'role': 'user', 'content': ...}}]")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise RequestError(f"messages[{i}]={message!r}: needs 'role' and 'content'; give both as strings")
    try:
        return _compile(template).render(
            messages=[dict(m) for m in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except (jinja2.TemplateError, TypeError) as error:
        text = str(error).replace("\n", " ")
        raise RequestError(
            f"messages: the model's chat template refuses them ({text}); change their roles or content"
        ) from error
