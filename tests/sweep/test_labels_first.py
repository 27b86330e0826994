"""Demonstrations with their label before their text: places, and every measure against plain
Hugging Face passes.
"""

from functools import cached_property

import pytest
import sweep
import torch
from prompt_parts import labels_of, texts_of
from small_tokenizers import model_of
from sweep import trimmed
from test_sweep_numbers import CHECKS, Both, case_of_family  # noqa: F401
from tolerance import assert_close

import icl_lens as il

LABEL_FIRST = il.Template("{label} : {text}", "{text} :", prefix="the ")
"""With a word in front, so that the first label is predicted somewhere."""
LINES = il.Template("A: {label}\nQ: {text}", "Q: {text}\nA:", "\n\n", prefix="Classify.\n\n")
OTHERWISE = {
    "tokens_are_the_words": "its reference writes the words down",
    "words_of_a_task_have_one_length": "its reference counts on labels after texts",
    **dict.fromkeys(
        ["calibrated", "compared", "explained"], "it tokenizes with the default template"
    ),
}
"""Checks that do not apply, and why."""
QUICK = {"captured", "demonstrations", "scaled", "saliency", "label_similarity"}


class Case(Both):
    """Prompts with labels before texts; longer ones to patch from have one more word in front."""

    @cached_property
    def stretched(self):
        longer = il.Template(LABEL_FIRST.demonstration, LABEL_FIRST.query, prefix="the the ")
        return il.tokenize(
            self.model, self.others, prepend_bos=False, labels=("foo", "bar"), template=longer
        )

    def demonstrations(self, row):
        spans, end = [], 1
        for demonstration in self.prompts[row].demonstrations:
            spans.append(range(end, end := end + 2 + len(demonstration.text.split())))
        return spans

    def places(self, row, role):
        """Return the positions of a prompt's tokens of a role; roles are counted word by word."""
        prompt, roles = self.prompts[row], ["other"]
        for demonstration in prompt.demonstrations:
            roles += ["label", "other", *["text"] * len(demonstration.text.split())]
        roles += [*["query"] * len(prompt.query.split()), "last"]
        assert len(roles) == len(self.ids[row])
        return [i for i, role_of_token in enumerate(roles) if role in ("all", role_of_token)]


@pytest.fixture
def label_first(monkeypatch):
    """Write the prompts of the sweep with labels before texts."""
    options = {"prepend_bos": False, "labels": ("foo", "bar"), "template": LABEL_FIRST}
    monkeypatch.setattr(
        sweep, "tokenized", lambda model, prompts: il.tokenize(model, prompts, **options)
    )

    def exchanged(case):
        towers = il.two_towers(
            case.model,
            sweep.ONE_WORD,
            case.heads,
            n_random=3,
            prepend_bos=False,
            template=LABEL_FIRST,
        )
        return {exchange.name: exchange.lost for exchange in towers.exchanges}

    monkeypatch.setattr(sweep, "exchanged", exchanged)


@pytest.mark.parametrize(
    ("check", "family"),
    [
        pytest.param(
            check, family, marks=() if check in QUICK and family == "gpt2" else pytest.mark.slow
        )
        for number, check in enumerate(sorted(CHECKS.keys() - OTHERWISE.keys()))
        for family in ("gpt2", ("llama_gqa", "gemma2")[number % 2])  # in turn
        if (check, family) != ("value_parts", "gemma2")  # refused: its readout has a soft-cap
    ],
)
@pytest.mark.usefixtures("no_type_checks", "label_first")
def test_numbers_are_hugging_faces(case_of_family, family, check):  # noqa: F811
    CHECKS[check][1](case_of_family(family, Case))


READ_BACK = [
    il.Prompt.parse("love : bar a sad eight : foo one :", answer="foo"),
    il.Prompt.parse("two : foo sad : bar three the nine :", answer="foo"),
]


@pytest.mark.parametrize("kind", ["byte", "byte-trimmed", "metaspace"])
@pytest.mark.parametrize("bos", [False, True])
def test_every_range_is_read_back(kind, bos):
    model = model_of(kind)
    batch = il.tokenize(model, READ_BACK, template=LINES, prepend_bos=bos)
    for row, prompt in enumerate(READ_BACK):
        tokens = batch.tokens[row].tolist()

        def read(span, tokens=tokens):
            return model.tokenizer.decode(tokens[slice(*span)])

        for number, demonstration in enumerate(prompt.demonstrations):
            text, label = demonstration.text, demonstration.label
            whole = read(batch.demonstration_ranges[row, number].tolist())
            assert read(batch.label_ranges[row, number].tolist()).strip() == label
            assert read(batch.text_ranges[row, number].tolist()).strip() == text
            assert whole == f"A: {label}\nQ: {text}\n\n"
        assert read(batch.query_range[row].tolist()).strip() == prompt.query
        _, end = batch.demonstration_ranges[row, -1].tolist()
        assert read((end, int(batch.last[row]) + 1)) == f"Q: {prompt.query}\nA:"
        scored = batch.tokens[row, batch.label_positions[row]].tolist()
        assert scored == batch.label_tokens[batch.label_index[row]].tolist()


@pytest.mark.parametrize("kind", ["byte", "byte-trimmed", "metaspace"])
@pytest.mark.parametrize("bos", [False, True])
def test_roles_of_prompts_with_labels_first(kind, bos):
    batch = il.tokenize(model_of(kind), READ_BACK, template=LINES, prepend_bos=bos)
    for prompt, roles in zip(READ_BACK, batch.token_roles, strict=True):
        assert roles[-1] == "last"
        assert roles.count("query") == len(prompt.query.split())
        assert roles.count("text") == sum(len(text.split()) for text in texts_of(prompt))
        of_label = {"foo": "true label", "bar": "false label"}
        expected = [of_label[label] for label in labels_of(prompt)]
        assert [role for role in roles if "label" in role] == expected


def test_an_explanation_takes_the_template(case_of_family):  # noqa: F811
    case = case_of_family("gpt2", Case)
    prompt = case.prompts[0]
    batch = il.tokenize(case.model, prompt, template=LABEL_FIRST, prepend_bos=False)
    explained = il.explain(case.model, prompt, template=LABEL_FIRST, prepend_bos=False)
    with torch.no_grad():
        log_probs = torch.log_softmax(case.hf(trimmed(batch)[0][None]).logits[0, -1], dim=-1)
    assert_close(torch.tensor(explained.scores.log_probs), log_probs[batch.label_tokens])
    assert explained.input.label_positions == (1, 4, 7)
    assert "happy" in explained.to_html()
