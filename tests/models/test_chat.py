"""Chat templates: the real one, the names templates expect, and hostile ones."""

import re

import pytest

from lazykv.errors import ModelFormatError
from lazykv.models import chat
from lazykv.models.chat import render_chat

HELLO = [{"role": "user", "content": "it's <b>"}]


def test_golden_prompt(smollm2, golden):
    question = {"role": "user", "content": "Explain in a few sentences why the sky is blue."}
    assert render_chat(smollm2.chat_template, [question]) == golden[0]["prompt"]
    system = {"role": "system", "content": "Be brief."}
    prompt = render_chat(smollm2.chat_template, [system, question], add_generation_prompt=False)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert prompt.endswith("blue.<|im_end|>\n")


def test_the_names_and_options_of_chat_templates():
    assert render_chat("{{ bos_token }}{{ eos_token }}", HELLO, bos="<s>", eos="</s>") == "<s></s>"
    indented = "{% for m in messages %}\n  {% if 1 %}\nx{% endif %}{% endfor %}"
    assert render_chat(indented, HELLO) == "x"
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render_chat(loop, HELLO) == "01"
    assert render_chat("{{ messages[0].content | tojson }}", HELLO) == '"it\'s <b>"'
    assert re.fullmatch(r"\d{4}", render_chat("{{ strftime_now('%Y') }}", HELLO))
    assert render_chat("{{ 2 * 3 }}{{ 'ab' * 2 }}{{ 2 ** 3 }}", HELLO) == "6abab8"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if", "TemplateSyntaxError"),
        ("{{ messages[0].tools.name }}", "no attribute 'tools'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ().__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ 'a' * 10**10 }}", "product"),
        ("{{ [1, 2] * 10000000000 }}", "product"),
        ("{{ 9 ** 9 ** 9 }}", "product"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(1000000) }}", "[Rr]ange too big"),
        ("x" * (chat.MAX_TEMPLATE_CHARACTERS + 1), "characters"),
    ],
)
def test_failing_and_hostile_templates(template, said):
    with pytest.raises(ModelFormatError, match=said):
        render_chat(template, HELLO)


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
CALLS = "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}"


@pytest.mark.parametrize("template", [LOOPS, CALLS])
def test_steps_are_bounded(template, monkeypatch):
    monkeypatch.setattr(chat, "MAX_STEPS", 1000)
    with pytest.raises(ModelFormatError, match="over 1000 steps"):
        render_chat(template, HELLO)


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr(chat, "MAX_PROMPT_CHARACTERS", 1000)
    with pytest.raises(ModelFormatError, match="over 1000 characters"):
        render_chat("{% for i in range(300) %}{{ 'aaaa' }}{% endfor %}", HELLO)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "user"}], "content None"),
        ([{"role": 1, "content": ""}], "role 1"),
        (["hello"], "message 0: got str"),
        ([*HELLO, None], "message 1: got NoneType"),
        (None, "chat messages: got NoneType, need a list"),
        (5, "chat messages: got int, need a list"),
        (HELLO[0], "chat messages: got dict, need a list"),
    ],
)
def test_messages_are_checked(messages, said):
    with pytest.raises(ModelFormatError, match=said):
        render_chat("", messages)


def test_messages_may_come_one_by_one():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert render_chat(template, iter(HELLO)) == render_chat(template, HELLO) != ""
