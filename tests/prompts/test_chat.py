"""Chat templates: the tokens are those of the tokenizer's own `apply_chat_template`, and labels are
where they are.
"""

import copy
import threading
import time

import pytest
from cases import slow, slow_except
from small_tokenizers import model_of, tokenizer_of

import icl_lens as il
from icl_lens.prompts import chat_template

CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{{ '<|endoftext|>' }}{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
INSTRUCTIONS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
)
FIRST_DIFFERS = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {% if loop.first %}<<SYS>>{% endif %}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{% endif %}{% endfor %}"
)
PROMPTS = [
    il.Prompt.parse("love : bar like : bar eight : foo one :", answer="foo"),
    il.Prompt.parse("two : foo sad : bar three :", answer="foo"),
]
ASKED = {"tokenize": False, "add_generation_prompt": True}


def chatting(template: str | None):
    model = model_of("byte")
    model.tokenizer = copy.deepcopy(tokenizer_of("byte"))
    model.tokenizer.chat_template = template
    return model


def messages(prompt, text="{text}", label="{label}", system=None):
    turns = [] if system is None else [{"role": "system", "content": system}]
    for demonstration in prompt.demonstrations:
        turns.append({"role": "user", "content": text.format(text=demonstration.text)})
        turns.append({"role": "assistant", "content": label.format(label=demonstration.label)})
    return [*turns, {"role": "user", "content": text.format(text=prompt.query)}]


@pytest.mark.parametrize(
    ("template", "options"),
    [(chat_format, {}) for chat_format in (CHATML, HEADERS, NO_SYSTEM, INSTRUCTIONS)]
    + [
        slow(chat_format, {"text": "Text: {text}\nLabel?"})
        for chat_format in (CHATML, HEADERS, NO_SYSTEM, INSTRUCTIONS)
    ]
    + [(CHATML, {"system": "You label texts."}), slow(HEADERS, {"system": "You label texts."})],
)
def test_tokens_are_those_of_the_tokenizers_own_template(template, options):
    model = chatting(template)
    chat = il.Template.chat(model, **options)
    batch = il.tokenize(model, PROMPTS, template=chat)
    for row, prompt in enumerate(PROMPTS):
        text = model.tokenizer.apply_chat_template(messages(prompt, **options), **ASKED)
        assert batch.texts[row] == text
        ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert batch.tokens[row, : int(batch.last[row]) + 1].tolist() == ids
        for demonstration, (start, end) in zip(
            prompt.demonstrations, batch.label_ranges[row].tolist(), strict=False
        ):
            assert model.tokenizer.decode(ids[start:end]).strip() == demonstration.label
        parts = [
            ids[start:end] for start, end in batch.demonstration_ranges[row].tolist() if start >= 0
        ]
        for demonstration, part in zip(
            prompt.demonstrations, map(model.tokenizer.decode, parts), strict=True
        ):
            assert part.count(demonstration.text) == part.count(demonstration.label) == 1
            assert part.endswith(chat.demonstration.partition("{label}")[2])


def test_what_the_model_says_before_the_label_is_written_at_the_query():
    model = chatting(CHATML)
    label = "It is {label}."
    (text,) = il.tokenize(model, PROMPTS[0], template=il.Template.chat(model, label=label)).texts
    assert (
        text
        == model.tokenizer.apply_chat_template(messages(PROMPTS[0], label=label), **ASKED) + "It is"
    )


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (None, {}, "model must have a tokenizer with a chat template"),
        (
            NO_SYSTEM,
            {"system": "Be kind."},
            "must accept these messages, got the error System role not supported",
        ),
        (FIRST_DIFFERS, {}, "must write all turns alike"),
        (
            "{{ messages[0].content }}",
            {},
            "must write each message once, but it leaves some out or repeats them",
        ),
        (CHATML, {"text": "Text:"}, r"text must contain \{text} and label \{label} once"),
    ],
)
def test_templates_that_cannot_be_used_are_refused(template, options, message):
    with pytest.raises(il.InputError, match=message):
        il.Template.chat(chatting(template), **options)


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "loops": (
        NESTED,
        r"within 5 seconds, got no text within 1 seconds; write the turns as an il.Template",
    ),
    "one operation": ("{{ 10 ** (10 ** 9) }}", "got no text within 1 seconds"),
    "text": (
        "{% for a in range(2000) %}{{ 'x' * 1000 }}{% endfor %}",
        r"1,000,000 characters .* got 2,000,000 characters",
    ),
    "memory": ("{% set x = 'x' * 2 ** 31 %}", "got the error MemoryError"),
    "recursion": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "got the error maximum recursion depth",
    ),
}


@pytest.mark.parametrize("case", slow_except(["text", "recursion", "one operation"], ENDLESS))
def test_templates_that_do_not_end_are_stopped(case, monkeypatch):
    template, message = ENDLESS[case]
    monkeypatch.setattr(chat_template, "SECONDS", 1)
    with pytest.raises(il.InputError, match=message.replace("5 seconds", "1 seconds")):
        il.Template.chat(chatting(template))


def test_a_template_that_does_not_end_holds_up_no_other_thread(monkeypatch):
    """Rendered in a thread, as a notebook's kernel may, while this one goes on counting."""
    monkeypatch.setattr(chat_template, "SECONDS", 1)
    errors = []

    def render():
        try:
            il.Template.chat(chatting(NESTED + "{# thread #}"))
        except il.InputError as error:
            errors.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    longest, before = 0.0, time.monotonic()
    while thread.is_alive():
        time.sleep(0.01)
        longest, before = max(longest, time.monotonic() - before), time.monotonic()
    assert len(errors) == 1
    assert longest < 1
