"""Chat templates: the Jinja programs in model files that turn messages into a prompt."""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lazykv.errors import ModelFormatError

MAX_TEMPLATE_CHARACTERS = 2**18
MAX_PROMPT_CHARACTERS = 2**24
MAX_STEPS = 10**6
"""Rounds of loops and calls of macros in one rendering."""


def render_chat(
    template: str,
    messages: Iterable[Mapping[str, str]],
    *,
    bos: str = "",
    eos: str = "",
    add_generation_prompt: bool = True,
) -> str:
    """The prompt for `messages` (each with `role` and `content`), as `template` lays it out.

    `bos` and `eos` are the texts of the begin and end tokens. A template is a program from an
    untrusted file: it runs in Jinja's sandbox, reaches nothing but the messages and the clock, and
    its length, steps, products and output are bounded. Its memory is not: strings may still be
    doubled by joining them.

    Raises ModelFormatError if the messages are not of that form, or the template is not valid,
    refuses them, fails, or passes a bound.
    """
    messages = _checked(messages)
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise ModelFormatError(
            f"chat template: got {len(template)} characters, need at most {MAX_TEMPLATE_CHARACTERS}"
        )
    environment = _Environment()
    try:
        stream = environment.from_string(template).generate(
            messages=[dict(message) for message in messages],
            bos_token=bos,
            eos_token=eos,
            add_generation_prompt=add_generation_prompt,
        )
        return _bounded_join(stream)
    except ModelFormatError:
        raise
    except Exception as error:
        # A template is foreign code: whatever it trips over is its own fault.
        raise ModelFormatError(
            f"chat template: got {type(error).__name__} ({str(error)[:200]}), "
            "need one that works for these messages"
        ) from error


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with the options and names that chat templates are written for.

    They are those of `apply_chat_template` in the transformers documentation.
    """

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters["tojson"] = _tojson
        self._steps = 0

    def spend_step(self) -> str:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise ModelFormatError(f"chat template: got over {MAX_STEPS} steps, need fewer")
        return ""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        bodies = [loop.body for loop in tree.find_all(nodes.For)]
        bodies += [macro.body for macro in tree.find_all(nodes.Macro)]
        for body in bodies:
            # An attribute of the environment: a template cannot rebind it, as it could a name.
            spend = nodes.Call(nodes.EnvironmentAttribute("spend_step"), [], [], None, None)
            body.insert(0, nodes.Output([spend]).set_lineno(tree.lineno))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = _magnitude(left) * _magnitude(right)
        if operator == "**" and isinstance(right, int):
            size = _magnitude(left) ** min(max(right, 0), 64)
        if size > MAX_PROMPT_CHARACTERS:
            raise ModelFormatError(
                f"chat template: got a product of {size:.1e}, need at most {MAX_PROMPT_CHARACTERS}"
            )
        return super().call_binop(context, operator, left, right)


def _magnitude(value: Any) -> float:
    """The length of a sequence, the size of a number; at least 2, so that a power's base counts."""
    size = len(value) if hasattr(value, "__len__") else abs(value)
    return max(float(size), 2.0)


def _bounded_join(stream: Iterable[str]) -> str:
    pieces, length = [], 0
    for piece in stream:
        length += len(piece)
        if length > MAX_PROMPT_CHARACTERS:
            raise ModelFormatError(
                f"chat template: got over {MAX_PROMPT_CHARACTERS} characters, need fewer"
            )
        pieces.append(piece)
    return "".join(pieces)


def _checked(messages: Iterable[Mapping[str, str]]) -> list[Mapping[str, str]]:
    if isinstance(messages, Mapping) or not isinstance(messages, Iterable):
        raise ModelFormatError(
            f"chat messages: got {type(messages).__name__}, need a list of messages"
        )
    given = list(messages)
    for place, message in enumerate(given):
        if not isinstance(message, Mapping):
            raise ModelFormatError(
                f"chat message {place}: got {type(message).__name__}, need role and content"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ModelFormatError(
                    f"chat message {place}: got {key} {message.get(key)!r}, need a string"
                )
    return given


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: object, indent: int | None = None) -> str:
    # Unlike Jinja's own, leaves quotes and angle brackets as they are: the output is no web page.
    return json.dumps(value, ensure_ascii=False, indent=indent)
