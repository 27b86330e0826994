"""Labels that begin alike: where they part, by hand; numbers at each decision, against the same
text written out.
"""

import json
import re

import pytest
import torch
from cases import slow
from explanations import terminal_text
from same_values import same
from small_tokenizers import model_of
from tolerance import assert_close

import icl_lens as il
from icl_lens.analyses import task_check
from icl_lens.analyses.explanation.sentences import shown_only
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_state import batch_from_state, batch_state

LINES = il.Template("{text} : {label}", "{text} :", " the ")
# In the tiny models' vocabulary, each word is a token.
SHOWN = [
    ("love", "cat dog"),
    ("sad", "cat bar"),
    ("nine", "foo"),
    ("two", "cat"),
    ("red", "cat dog foo"),
]
DEMONSTRATIONS = [il.Demonstration(text, label) for text, label in SHOWN]
ANSWERS = ["cat dog foo", "foo", "cat", "cat bar"]
PROMPTS = [
    il.Prompt(DEMONSTRATIONS, query, answer)
    for query, answer in zip("one like happy eight".split(), ANSWERS, strict=True)
]
# Rows by hand: the prompt, what is appended, the answer's token, and the tokens of what it is
# compared with.
ROWS = [
    (0, "", "cat", {"foo"}),
    (0, "cat", "dog", {"bar", "the"}),
    (0, "cat dog", "foo", {"the"}),
    (1, "", "foo", {"cat"}),
    (2, "", "cat", {"foo"}),
    (2, "cat", "the", {"dog", "bar"}),
    (3, "", "cat", {"foo"}),
    (3, "cat", "bar", {"dog", "the"}),
]


def token_of(model, word: str) -> int:
    (token,) = model.tokenizer(word, add_special_tokens=False)["input_ids"]
    return token


def tokens_of(model, words) -> set[int]:
    return {token_of(model, word) for word in words}


@pytest.fixture(scope="module")
def batch(gpt2):
    return il.tokenize(gpt2, PROMPTS, template=LINES, prepend_bos=False)


def written_out(model, batch) -> PromptBatch:
    """The rows as plain token ids: text and appended words, with target and comparisons."""
    rows, targets, against = [], [], []
    for number, appended, answer, compared_words in ROWS:
        text = f"{LINES.render(PROMPTS[number]).text} {appended}".strip()
        rows.append(model.tokenizer(text, add_special_tokens=False)["input_ids"])
        targets.append(token_of(model, answer))
        against.append(sorted(tokens_of(model, compared_words)))
    return PromptBatch.from_tokens(rows, model=model, targets=targets, against=against)


def test_each_decision_has_a_row(gpt2, batch):
    plain = written_out(gpt2, batch)
    assert torch.equal(batch.tokens, plain.tokens)
    assert batch.decisions.prompt_index.tolist() == [number for number, *_ in ROWS]
    selected = batch[[3, 1]].decisions
    assert selected.prompt_index.tolist() == [ROWS[3][0], ROWS[1][0]]
    assert selected.n_appended.tolist() == [len(ROWS[row][1].split()) for row in (3, 1)]
    assert batch.queries == tuple(PROMPTS[number].query for number, *_ in ROWS)
    assert "4 prompts at 8 decisions" in repr(batch)
    again = batch_from_state(*json_copy(batch))
    assert again.labels == batch.labels
    assert same(again.decisions, batch.decisions)


def test_each_decision_compares_the_answer_with_what_else_may_follow(gpt2, batch):
    assert torch.equal(batch.answer_tokens, written_out(gpt2, batch).answer_tokens)
    for row, (_, _, _, compared_words) in zip(batch.other_label_tokens.tolist(), ROWS, strict=True):
        assert set(row) - {-1} == tokens_of(gpt2, compared_words)
    assert batch.labels == ("cat…", "cat", "cat bar", "cat dog…", "cat dog", "cat dog foo", "foo")
    answers = [batch.labels[index] for index in batch.answer]
    assert answers[:4] == ["cat…", "cat dog…", "cat dog foo", "foo"]
    assert answers[4:] == ["cat…", "cat", "cat…", "cat bar"]


@pytest.mark.parametrize(
    ("row", "words"),
    enumerate(["cat cat foo cat cat", "dog bar foo the dog", "the bar foo the foo"]),
)
def test_demonstrated_labels_are_read_where_they_part_from_what_is_appended(batch, row, words):
    tokens = [batch.token_strings[row][at].strip() for at in batch.label_positions[row]]
    assert tokens == words.split()


def json_copy(batch):
    tensors, values = batch_state(batch)
    return tensors, json.loads(json.dumps(values))


def test_without_answer_all_decisions_are_made_and_batches_have_the_same_labels(gpt2, batch):
    asked = il.tokenize(gpt2, il.Prompt(DEMONSTRATIONS, "one"), template=LINES, prepend_bos=False)
    assert asked.tokens.shape[0] == 3
    assert asked.labels == batch.labels == il.tokenize(gpt2, PROMPTS[1:2], template=LINES).labels
    assert (
        il.tokenize(gpt2, il.Prompt(DEMONSTRATIONS[2:4], "one", "foo")).decisions.prompt_index
        is None
    )


def test_numbers_of_a_decision_are_those_of_the_text_written_out(gpt2, batch):
    """Increases, contrasts, effects and log-odds; `from_tokens` knows nothing of labels."""
    plain = written_out(gpt2, batch)
    ours, theirs = il.capture(gpt2, batch), il.capture(gpt2, plain)
    contrasts = [
        il.head_log_prob_increase(captured, b.answer_tokens, against=against)
        for captured, b, against in (
            (ours, batch, batch.other_label_tokens),
            (theirs, plain, plain.against),
        )
    ]
    assert_close(*contrasts)
    assert contrasts[0].abs().max() > 1e-3
    effects = [il.head_effects(gpt2, captured) for captured in (batch, plain)]
    assert_close(effects[0].log_odds, effects[1].log_odds)
    assert_close(effects[0].log_prob, effects[1].log_prob)
    ablated = [il.Ablate(["L1H0"], positions="last")]
    alone = torch.cat([il.score(gpt2, batch[row], [ablated]) for row in range(len(batch))])
    assert_close(il.score(gpt2, batch, [ablated]), alone)


FAMILIES = [
    "gpt2",
    slow("gptj"),
    slow("neox"),
    slow("llama_gqa"),
    slow("qwen3"),
    slow("opt"),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_scores_are_sums_over_the_labels_tokens(load_tiny, family_run, name):
    """Here every token of a label decides, so the sum is log p of the label and, after "cat", of
    what follows it.
    """
    model, hf = load_tiny(name), family_run(name).hf.float()
    prompts = [il.Prompt(DEMONSTRATIONS[:4], query) for query in ("one", "like")]
    batch = il.tokenize(model, prompts, template=LINES, prepend_bos=False)
    scores = batch.decisions.whole_scores(il.score(model, batch), batch.label_mask)
    assert batch.decisions.whole_labels == ("cat", "cat bar", "cat dog", "foo")
    for row, prompt in enumerate(prompts):
        text = LINES.render(prompt).text
        for column, label in enumerate(("cat the", "cat bar", "cat dog", "foo")):
            ids = model.tokenizer(f"{text} {label}", add_special_tokens=False, return_tensors="pt")[
                "input_ids"
            ]
            n = len(label.split())
            with torch.no_grad():
                log_probs = hf(ids).logits[0].log_softmax(-1)
            theirs = sum(
                float(log_probs[-1 - n + i, ids[0, len(ids[0]) - n + i]]) for i in range(n)
            )
            assert_close(scores[row, column], theirs)
    hf.double()
    pairs = [label for label in batch.decisions.whole_labels if " " in label]
    whole = il.whole_label_log_probs(model, batch)
    assert whole.labels == batch.decisions.whole_labels
    n_tokens = torch.tensor([len(label.split()) for label in batch.decisions.whole_labels])
    assert_close(il.whole_label_log_probs(model, batch, per_token=True), whole / n_tokens)
    for label in pairs:
        column = batch.decisions.whole_labels.index(label)
        assert_close(whole[[0, 2], column], scores[:, column])


@pytest.mark.slow
def test_calibration_demonstrations_and_towers_take_decisions(gpt2, batch):
    """Row by row what they are for the row alone; texts removed from a prompt keep what is
    appended.
    """
    row_scores = [
        il.calibrated_scores(gpt2, batch[row], inputs=["nine", "red"]) for row in range(len(batch))
    ]
    assert_close(il.calibrated_scores(gpt2, batch, inputs=["nine", "red"]), torch.cat(row_scores))
    removed = il.demonstration_effects(gpt2, batch, ways=["removed"]).log_odds[..., 0]
    row = 2  # "cat dog foo" against "cat dog"
    demonstrations = [d for place, d in enumerate(DEMONSTRATIONS) if place != 1]
    text = f"{LINES.render(il.Prompt(demonstrations, 'one')).text} cat dog"
    ids = [gpt2.tokenizer(text, add_special_tokens=False)["input_ids"]]
    foo, end = token_of(gpt2, "foo"), token_of(gpt2, "the")
    without = il.score(
        gpt2, PromptBatch.from_tokens(ids, model=gpt2), read=lambda log_probs, _: log_probs
    )[0]
    intact = il.score(gpt2, written_out(gpt2, batch)[row], read=lambda log_probs, _: log_probs)[0]
    assert_close(
        removed[row, 1], (intact[foo] - intact[end]) - (without[foo] - without[end]), scale=10
    )
    with pytest.raises(il.InputError, match="classes='binary'"):
        il.two_towers(gpt2, PROMPTS * 5, template=LINES)
    two = [d for d in DEMONSTRATIONS if d.label in ("cat dog", "cat bar")]
    more = [il.Demonstration("happy", "cat bar"), il.Demonstration("like", "cat dog")]
    prompts = [
        il.Prompt([*two, *more], q, a) for q, a in (("love", "cat dog"), ("sad", "cat bar"))
    ] * 6
    assert il.tokenize(gpt2, prompts, template=LINES).decisions.n_appended.tolist() == [1] * 12
    towers = il.two_towers(gpt2, prompts, ["L1H0"], template=LINES, n_random=3)
    assert bool(torch.tensor(towers.lost["query"].value).isfinite())


def test_a_check_compares_whole_labels(gpt2, monkeypatch):
    """The model says "cat" (60 %) rather than "foo", but "foo" (40 %) rather than "cat dog" or "cat
    bar" (30 %).
    """
    probability = {"cat…": 0.6, "foo": 0.4, "cat dog": 0.5, "cat bar": 0.5}

    def score(model, batch):
        return torch.tensor([[probability[label] for label in batch.labels]] * len(batch)).log()

    monkeypatch.setattr(task_check, "score", score)
    queries = "one like happy eight love sad red nine two".split()
    labels = ("cat dog", "cat bar", "foo")
    prompts = []
    for i, query in enumerate(queries * 3):
        shown_labels = [labels[(i + n) % 3] for n in range(4)]
        pairs = list(zip(queries[:4], shown_labels, strict=True))
        prompts.append(il.Prompt(pairs, query, labels[i % 3]))
    check = il.task_check(gpt2, prompts, template=LINES)
    assert check.accuracy["given"].value == pytest.approx(1 / 3)
    assert check.favorite == "foo"
    assert set(check.label_auroc) == {*labels}


@pytest.mark.slow
def test_the_last_decision_is_explained(gpt2):
    explanation = il.explain(gpt2, PROMPTS[3], template=LINES, k=2)
    assert explanation.target == "cat bar"
    assert set(explanation.scores.compared_with) == {"cat dog…", "cat"}
    assert explanation.input.n_shared_tokens == 1
    first = il.explain(gpt2, il.tokenize(gpt2, PROMPTS[3], template=LINES)[0], k=2)
    assert first.target == "cat…"
    assert first.scores.compared_with == ("foo",)


def test_numbers_from_ten_on_are_labels():
    """After "1", "10" continues with a digit and "1" with the line break."""
    model, lines = model_of("metaspace"), il.Template("{text} : {label}", "{text} :", "\n")
    demonstrations = [il.Demonstration(f"t{n}", str(n)) for n in (1, 2, 10, 12)]
    batch = il.tokenize(model, il.Prompt(demonstrations, "t", "1"), template=lines)
    for row, names in enumerate((["1", "2", "1", "1"], ["⏎", "2", "0", "2"])):
        assert [batch.token_names[row][at] for at in batch.label_positions[row]] == names
    assert batch.label_ranges[1, 0].diff().item() == 2


@pytest.mark.parametrize(
    "row",
    [row if row % 3 == 1 else slow(row) for row in range(len(ROWS))],
)
def test_every_decision_is_shown(gpt2, batch, row):
    """In the terminal and on the page, demonstrations have their whole labels, in the color of what
    stands for them.
    """
    explanation = il.explain(gpt2, batch[row], k=2)
    text, page = terminal_text(explanation), explanation.to_html()
    for _, label in SHOWN:
        assert label in text
        assert f">{label}<" in page
    assert explanation.answer == explanation.target
    choices = batch.label_mask[row].nonzero()[:, 0].tolist()
    n_other = len(shown_only(explanation))
    assert {*shown_only(explanation)} == {*explanation.labels} - {batch.labels[i] for i in choices}
    assert text.count("no choice here") == page.count("no choice here") == n_other
    stands_for = {}
    for index in choices:
        for label in batch.decisions.groups[index]:
            stands_for[label] = batch.labels[index]
    for (_, label), index in zip(SHOWN, explanation.input.demonstration_labels, strict=True):
        if label in stands_for:
            assert explanation.labels[index] == stands_for[label]


@pytest.mark.parametrize("by", ["contrast", "effect"])
def test_the_command_counts_prompts(run, tiny, tmp_path, by):
    """Eight prompts at more decisions: the sentence under the table counts the prompts."""
    labels = ["cat dog", "cat bar", "foo"]
    words = [
        "love",
        "like",
        "eight",
        "two",
        "one",
        "hate",
        "nine",
        "three",
        "happy",
        "sad",
        "good",
        "bad",
    ]
    rows = [{"text": word, "label": labels[number % 3]} for number, word in enumerate(words)]
    (tmp_path / "mine.json").write_text(json.dumps(rows))
    options = (
        "--path",
        tmp_path / "mine.json",
        "--classes",
        "all",
        "--demonstrations",
        1,
        "-n",
        8,
        "-m",
        tiny,
    )
    names = ("--labels", "cat bar=cat bar,cat dog=cat dog,foo=foo", "--no-check", "--by", by)
    code, out, err = run("locate", *options, *names)
    assert code == 0, err
    text = " ".join(out.split())
    n_decisions = re.search(r"First of 8 prompts at (\d+) decisions", text)[1]
    assert int(n_decisions) > 8
    assert "Means over 8 prompts. 95% intervals" in text
