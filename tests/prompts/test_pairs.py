"""Pairs, label sets of their own, prompts without demonstrations or query: the numbers of one
prompt, in any batch.
"""

import itertools
import json

import faults
import pytest
import torch
from cases import slow_except
from prompt_parts import labels_of, pairs_of, texts_of
from small_tokenizers import model_of
from tolerance import assert_close

import icl_lens as il
from icl_lens.analyses.pair_check import pair_check_of_tokens
from icl_lens.errors import InputError
from icl_lens.measures.debias import balancing_weights
from icl_lens.prompts.batch_state import batch_from_state, batch_state

PAIRS = [
    ("love", "hate"),
    ("happy", "sad"),
    ("good", "bad"),
    ("cat", "dog"),
    ("France", "Spain"),
    ("red", "blue"),
]
PAIRS += [("one", "two"), ("eight", "nine"), ("yes", "no"), ("like", "foo"), ("the", "a")]
ARROW = il.Template("{text} : {label}", "{text} :", "\n")


def write(path, pairs=PAIRS, names=("input", "output")):
    """Write pairs in the format of the path's suffix; .json has rows, or columns if its name
    contains "columns".
    """
    rows = [dict(zip(names, pair, strict=True)) for pair in pairs]
    if "columns" in path.stem:
        columns = {name: [] for name in names}
        for row in rows:
            for name in names:
                columns[name].append(row[name])
        path.write_text(json.dumps(columns))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        separator = "," if path.suffix == ".csv" else "\t"
        path.write_text("\n".join(separator.join(cells) for cells in [names, *pairs]) + "\n")
    return path


@pytest.mark.parametrize(
    "name", ["pairs.json", "columns.json", "pairs.jsonl", "pairs.csv", "pairs.tsv"]
)
def test_files_of_pairs_are_read(tmp_path, name):
    path = write(tmp_path / name)
    prompts = il.load_task("mine", path=path, n=22, demonstrations=5)
    assert prompts == il.PairTask("mine", path).prompts(22, demonstrations=5)
    same_pairs = write(tmp_path / "same.csv")
    assert prompts == il.load_task("mine", path=same_pairs, n=22, demonstrations=5)
    assert il.load_task(str(path), n=5) == il.load_task("mine", path, n=5), "a path is a name"


def test_prompts_of_pairs_answer_with_a_word_that_no_demonstration_shows(tmp_path):
    path = write(tmp_path / "pairs.csv")
    for prompt in il.load_task("mine", path=path, n=22, demonstrations=5):
        assert len({*pairs_of(prompt)}) == 5
        assert {*pairs_of(prompt), (prompt.query, prompt.answer)} <= {*PAIRS}
        assert not {prompt.query, prompt.answer} & {*texts_of(prompt), *labels_of(prompt)}
        assert {*prompt.labels} == {*labels_of(prompt), prompt.answer}
        assert prompt.has_own_answer


def test_queries_of_pairs_are_shuffled_and_each_asked_before_any_twice(tmp_path):
    path = write(tmp_path / "pairs.csv")
    prompts = il.load_task("mine", path=path, n=22, demonstrations=5)
    queries, words = [prompt.query for prompt in prompts[:11]], [word for word, _ in PAIRS]
    assert queries != words
    assert sorted(queries) == sorted(words)
    assert il.load_task("mine", path=path, n=22, demonstrations=5, seed=1) != prompts


BUNDLED = (
    "antonyms",
    "country-capital",
    "present-past",
    "singular-plural",
    "english-french",
    "english-spanish",
)
BUNDLED += (
    "next-item",
    "country-language",
    "capitalization",
    "verb-gerund",
    "adjective-comparative",
    "animal-class",
)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_pairs_fill_ten_shots(name):
    """At least 40 pairs, each the query once; only the classes of animals may be shown with other
    animals.
    """
    pairs = il.PairTask(name).pairs()
    assert len({source for source, _ in pairs}) == len(pairs) >= 40
    for pair in pairs:
        assert all(word == " ".join(word.split()) for word in pair)
    prompts = il.load_task(name, n=len(pairs), demonstrations=10)
    assert {(prompt.query, prompt.answer) for prompt in prompts} == {*pairs}
    for prompt in prompts:
        assert len({*texts_of(prompt), prompt.query}) == 11
    assert all(prompt.has_own_answer for prompt in prompts) == (name != "animal-class")
    assert f'"{name}"' in " ".join(str(il.PairTask.__doc__).split())


def test_unknown_pairs_are_refused_with_the_names_of_all():
    words = ", ".join(map(repr, BUNDLED))
    faults.assert_refused(f"name must be one of {words}, got 'synonyms'", il.PairTask, "synonyms")
    faults.assert_refused(", ".join(BUNDLED), il.load_task, "synonyms", n=1)


def test_columns_with_other_names_are_pairs_if_the_task_says_so(tmp_path):
    path = write(tmp_path / "words.csv", names=("word", "opposite"))
    task = il.PairTask("opposites", path, columns=("word", "opposite"))
    assert task.pairs() == PAIRS
    assert {(p.query, p.answer) for p in task.prompts(11)} == {*PAIRS}
    with pytest.raises(InputError, match="no column 'input', 'output', only 'word', 'opposite'"):
        il.PairTask("opposites", path).prompts(1)


def test_shared_outputs_may_be_shown(tmp_path):
    """Outputs that repeat are classes: a prompt that never showed the answer could not be
    solved.
    """
    pairs = [(f"text {i}", ("up", "down")[i % 2]) for i in range(12)]
    prompts = il.load_task(
        "mine", path=write(tmp_path / "pairs.json", pairs), n=24, demonstrations=6
    )
    assert sum(prompt.has_own_answer for prompt in prompts) <= 4
    for prompt in prompts:
        assert prompt.query not in texts_of(prompt)
    assert {prompt.labels for prompt in prompts} == {("down", "up")}


REFUSED = [
    ({"labels": ("a", "b")}, "labels must be None for pairs"),
    ({"layout": "reorder"}, "layout must be 'random' for pairs"),
    ({"demonstrations": 11}, "at least 11 pairs with other words than each query, got 10"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_apply_to_pairs_is_refused(tmp_path, options, words):
    faults.assert_refused(
        words, il.load_task, "mine", path=write(tmp_path / "pairs.json"), n=2, **options
    )


BAD_FILES = [
    ('[{"input": "a", "output": ["b"]}]', "has a list in column 'output'"),
    ('{"input": ["a", "b"], "output": ["c"]}', "must have the same length, got [2, 1]"),
    ('[{"input": "a", "output": "b"}, 3]', "not a list of objects"),
    ('[{"input": "a", "output": "b"}, {"input": "c"}]', "row 2 has no column 'output'"),
    ('["a", "b"]', "is not a list of objects"),
    ('[{"input": "a", "output": " "}]', "among 0 pairs"),
]


@pytest.mark.parametrize(("content", "words"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_files_of_pairs_are_refused(tmp_path, content, words):
    path = tmp_path / "pairs.json"
    path.write_text(content)
    faults.assert_refused(words, il.load_task, "mine", path=path, n=2, demonstrations=1)


def test_pairs_of_one_length_align(tmp_path):
    """With this tokenizer, most words have as many tokens as letters."""
    pairs = [(f"zq{a}v", f"{b}xjw") for a, b in zip("abcdefgh", "hgfedcba", strict=True)]
    pairs += [("dry", "wet"), ("banana", "x"), ("highest", "low")]
    path, model = write(tmp_path / "pairs.json", pairs), model_of("byte")

    def positions(**options):
        batch = il.tokenize(model, il.load_task("mine", path=path, n=8, **options))
        return {
            (*row, last)
            for row, last in zip(batch.label_positions.tolist(), batch.last.tolist(), strict=True)
        }

    assert len(positions()) > 1
    assert len(positions(same_length_for=model)) == 1


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return il.load_task(
        "mine", path=write(tmp_path_factory.mktemp("pairs") / "pairs.json"), n=5, demonstrations=3
    )


@pytest.fixture(scope="module")
def zero_shot():
    choices = ("yes", "no")
    return [
        il.Prompt([], query, answer, choices)
        for query, answer in (("love", "yes"), ("the sad cat", "no"))
    ]


def hf_log_probs(run, batch, row):
    """Return the log-probability of every next token by plain transformers code."""
    ids = batch.tokens[row, : int(batch.last[row]) + 1]
    return run.hf(ids[None]).logits[0, -1].log_softmax(-1)


def test_each_prompt_has_its_own_choices(family_run, prompts, zero_shot):
    """Scores are those of plain code for every label, whatever other prompts the batch has."""
    run = family_run("gpt2")
    with_shown_answer = il.Prompt.parse("love : yes sad : no happy :", answer="yes")
    free = il.Prompt(
        [il.Demonstration("love", "yes"), il.Demonstration("sad", "no")], "", labels=("yes", "no")
    )
    all_prompts = [*prompts, *zero_shot, with_shown_answer, free]
    batch = il.tokenize(run.model, all_prompts, prepend_bos=False)
    assert len(batch.labels) > 6
    assert batch.labels == tuple(
        sorted(set(itertools.chain.from_iterable(prompt.labels for prompt in all_prompts)))
    )
    scores, acts = il.score(run.model, batch), il.capture(run.model, batch)
    increases = il.head_log_prob_increase(acts[:8], batch[:8].answer_tokens)
    against = il.head_log_prob_increase(
        acts[:8], batch[:8].answer_tokens, against=batch[:8].other_label_tokens
    )
    for row, prompt in enumerate(all_prompts):
        expected = hf_log_probs(run, batch, row)
        assert {
            label
            for label, is_choice in zip(batch.labels, batch.label_mask[row], strict=True)
            if is_choice
        } == {*prompt.labels}
        own_scores = {
            label: expected[run.model.tokenizer.convert_tokens_to_ids(label)]
            for label in prompt.labels
        }
        for label, value in own_scores.items():
            assert_close(scores[row, batch.labels.index(label)], value.float().detach())
        assert batch.labels[int(acts.predicted[row])] == max(
            own_scores, key=lambda label: float(own_scores[label])
        )
        alone = il.tokenize(run.model, prompt, prepend_bos=False)
        assert alone.labels == prompt.labels
        acts_alone = il.capture(run.model, alone)
        assert_close(
            acts_alone.label_log_probs[0],
            scores[row, [batch.labels.index(label) for label in alone.labels]],
        )
        if prompt.answer is not None:
            assert_close(
                il.head_log_prob_increase(acts_alone, alone.answer_tokens)[0], increases[row]
            )
            contrast = il.head_log_prob_increase(
                acts_alone, alone.answer_tokens, against=alone.other_label_tokens
            )
            assert_close(contrast[0], against[row])


def test_the_query_without_content_has_no_tokens(family_run):
    run = family_run("gpt2")
    prompt = il.Prompt([il.Demonstration("love", "yes"), il.Demonstration("sad", "no")], "")
    batch = il.tokenize(run.model, prompt, prepend_bos=False)
    assert batch.token_strings[0] == "love : yes sad : no :".split()
    assert batch.query_range[0].tolist() == [6, 6]
    assert batch.token_roles[0][-1] == "last"
    assert "query" not in batch.token_roles[0]


def test_labels_that_look_alike_are_compared_where_they_part_or_once(family_run):
    """Two choices of one prompt share their first token; next to an answer of its own, they are one
    choice.
    """
    model = model_of("byte")
    demonstrations = [
        il.Demonstration("to", "food"),
        il.Demonstration("do", "foot"),
        il.Demonstration("go", "gone"),
    ]
    clash = il.Prompt(demonstrations, "see", "seen", ("food", "foot", "gone", "seen"))
    clear = il.Prompt([il.Demonstration("be", "foot")], "see", "seen", ("foot", "seen"))
    batch = il.tokenize(model, [clear, clash])
    assert batch.answer_tokens.tolist() == [model.tokenizer(" s")["input_ids"][0]] * 2
    assert (batch.other_label_tokens >= 0).sum(1).tolist() == [1, 1]
    # "gone" begins with the answer's first token, a space, and "foot" with that of "food".
    assert batch.label_mask[1].tolist() == [label in ("food", "seen") for label in batch.labels]
    # Labels of a prompt that shows its answer are compared, where they part.
    assert il.tokenize(model, il.Prompt(demonstrations, "see", "foot")).labels == (
        "foo…",
        "food",
        "foot",
        "gone",
    )
    # Two prompts may share tokens with each other.
    unclear = il.Prompt([il.Demonstration("be", "food")], "see", "seen", ("food", "seen"))
    pair = il.tokenize(model, [clear, unclear])
    assert int(pair.label_tokens[pair.labels.index("food")]) == int(
        pair.label_tokens[pair.labels.index("foot")]
    )


def test_an_answer_of_its_own_is_compared_with_what_differs_from_it(gpt2):
    """Contrast, effects and log-odds are those of the text with these tokens; "cat" is compared
    once.
    """
    texts_and_labels = [("love", "cat dog"), ("sad", "cat bar"), ("nine", "no yes"), ("two", "red")]
    prompt = il.Prompt(
        [il.Demonstration(*text_and_label) for text_and_label in texts_and_labels],
        "one",
        "no",
        (*(label for _, label in texts_and_labels), "no"),
    )
    batch = il.tokenize(gpt2, [prompt], prepend_bos=False)
    plain = il.PromptBatch.from_tokens(
        batch.tokens.tolist(),
        model=gpt2,
        targets=int(batch.answer_tokens),
        against=[
            [
                gpt2.tokenizer(word, add_special_tokens=False)["input_ids"][0]
                for word in ("cat", "red")
            ]
        ],
    )
    acts, theirs = il.capture(gpt2, batch), il.capture(gpt2, plain)
    contrast = il.head_log_prob_increase(
        acts, batch.answer_tokens, against=batch.other_label_tokens
    )
    assert_close(
        contrast, il.head_log_prob_increase(theirs, plain.answer_tokens, against=plain.against)
    )
    ours, same = il.head_effects(gpt2, batch), il.head_effects(gpt2, plain)
    assert_close(ours.log_odds, same.log_odds)
    assert ours.log_odds.abs().max() > 1e-3
    assert il.explain(gpt2, batch, k=2).scores.compared_with in (
        ("cat dog", "red"),
        ("cat bar", "red"),
    )


def test_prompts_without_demonstrations_have_no_labels_to_look_at(gpt2, zero_shot):
    batch = il.tokenize(gpt2, zero_shot, prepend_bos=False)
    acts = il.capture(gpt2, batch, writers=True)
    assert batch.label_positions.shape == (2, 0)
    assert batch.text_ranges.shape == (2, 0, 2)
    assert batch.labels == ("yes", "no")
    head = il.Head(1, 2)
    for look in (
        lambda: acts.attention_to_labels(),
        lambda: acts.label_values(head),
        lambda: acts.own_label_ranks(head),
        lambda: il.label_similarity(gpt2, batch, [head]),
        lambda: il.saliency_flow(gpt2, batch),
        lambda: balancing_weights(batch),
        lambda: il.mean_score_parts(gpt2, batch, heads=[head]),
    ):
        with pytest.raises(InputError, match="the prompts have no demonstrations"):
            look()
    parts = il.attention_score_parts(acts, head)
    assert parts.positions.shape == batch.tokens.shape, "all positions, as for text"
    assert_close(parts.query_side.sum(-1), parts.scores)
    whole = il.whole_label_log_probs(gpt2, batch)
    assert_close(whole, il.score(gpt2, batch))
    restored = batch_from_state(*batch_state(batch))
    assert (restored.prompts, restored.labels) == (batch.prompts, batch.labels)


def test_the_advice_for_a_prompt_without_demonstrations_works(gpt2, zero_shot):
    with pytest.raises(InputError) as refused:
        il.explain(gpt2, zero_shot[1], k=2)
    call = str(refused.value).partition("with ")[2]
    explanation = eval(call, {"il": il, "model": gpt2})
    batch = il.tokenize(gpt2, zero_shot[1:])
    assert explanation.scores.log_probs[0] == pytest.approx(
        float(il.score(gpt2, batch)[0, 1]), abs=1e-4
    )


def test_prompts_without_labels_are_refused():
    faults.assert_refused("before the query, or pass labels= to choose from", il.Prompt, [], "love")
    faults.assert_refused("no demonstration", il.Prompt.parse, "love :")
    faults.assert_refused("add it to labels=", il.Prompt, [il.Demonstration("a", "b")], "c", "d")
    prompt = il.Prompt([il.Demonstration("a", "b")], "c", "d", ("b", "d"))
    assert prompt.has_own_answer


def shown_words(prompt):
    return [demonstration.label for demonstration in prompt.demonstrations]


RULES = {
    "knows": lambda prompt: prompt.answer,
    "learns": lambda prompt: prompt.answer if prompt.demonstrations else "foo",
    "maps": lambda prompt: (
        prompt.answer if {(d.text, d.label) for d in prompt.demonstrations} & {*PAIRS} else "foo"
    ),
    "copies": lambda prompt: shown_words(prompt)[-1] if prompt.demonstrations else "foo",
    "first": lambda prompt: shown_words(prompt)[0] if prompt.demonstrations else "foo",
    "one word": lambda prompt: PAIRS[0][1],
    "knows and copies": lambda prompt: (
        prompt.answer
        if ord(prompt.query[-1]) % 2 or not prompt.demonstrations
        else shown_words(prompt)[-1]
    ),
}
# Accuracy as given, mismatched and without demonstrations; copied, copied from the last; what the
# model does.
FOUND: dict[str, tuple[tuple[float, ...], tuple[float, float], tuple[str, ...]]] = {
    "knows": ((1, 1, 1), (0, 0), ("knows",)),
    "learns": ((1, 1, 0), (0, 0), ("learns",)),
    "maps": ((1, 0, 0), (0, 0), ("learns", "maps")),
    "copies": ((0, 0, 0), (1, 1), ("copies",)),
    "first": ((0, 0, 0), (1, 0), ("copies",)),
}
SENTENCES = {
    "learns": "The model does the task from the demonstrations: the answer is the most probable token",
    "maps": "It learns which output belongs to which input.",
    "knows": "It knows answers without the demonstrations.",
    "copies": "It copies outputs of the demonstrations.",
}


@pytest.mark.parametrize("rule", FOUND)
def test_task_check_of_answers_by_a_rule(gpt2, tmp_path, monkeypatch, rule):
    """Accuracy counts any token of the vocabulary; demonstrations and copying are its controls."""
    pairs = il.PairTask(
        "mine", write(tmp_path / "pairs.json", [pair for pair in PAIRS if "foo" not in pair])
    )

    def top_token(model, batch, sets, *, read):
        ids = [
            model.tokenizer.convert_tokens_to_ids(RULES[rule](prompt)) for prompt in batch.prompts
        ]
        log_probs = torch.eye(model.cfg.d_vocab)[ids].log()
        return read(log_probs, torch.arange(len(batch)))[:, None]

    monkeypatch.setattr("icl_lens.analyses.pair_check.score", top_token)
    check = il.task_check(gpt2, pairs, n=30)
    accuracies, copied, behaviors = FOUND[rule]
    assert tuple(interval.value for interval in check.accuracy.values()) == accuracies
    assert list(check.accuracy) == ["given", "mismatched", "none"]
    low_of_ten_queries = pytest.approx(0.741 * accuracies[0], abs=1e-3)
    assert check.accuracy["given"].low == low_of_ten_queries
    assert (check.copied, check.copied_last) == copied
    assert (check.shown, check.last_output, check.n_prompts, check.n_queries) == (0, 0, 30, 10)
    check_behaviors_of_pairs(check, behaviors)
    assert check.does_task == (rule in ("learns", "maps"))
    assert check.lacks_task == (rule in ("copies", "first")), "who knows answers does the task"
    assert ("is not shown to matter" in str(check)) == (rule == "learns")


def check_behaviors_of_pairs(check, behaviors):
    """Each behavior has an effect of 1 and a sentence, the others an effect of 0 and none."""
    assert check.behaviors == behaviors
    for name, effect in check.effects.items():
        assert effect.value == pytest.approx(float(name in behaviors))
    for name, sentence in SENTENCES.items():
        assert (sentence in str(check)) == (name in behaviors)
    assert ("not shown to do the task" in str(check)) == (not check.does_task)


@pytest.mark.parametrize(
    ("rule", "behaviors"), [("one word", ()), ("knows and copies", ("knows", "copies"))]
)
def test_task_check_of_pairs_counts_each_behavior_alone(
    gpt2, tmp_path, monkeypatch, rule, behaviors
):
    """A word that is always said is the answer of some prompts, and hits nothing."""
    pairs = il.PairTask(
        "mine", write(tmp_path / "pairs.json", [pair for pair in PAIRS if "foo" not in pair])
    )

    def top_token(model, batch, sets, *, read):
        ids = [
            model.tokenizer.convert_tokens_to_ids(RULES[rule](prompt)) for prompt in batch.prompts
        ]
        return read(torch.eye(model.cfg.d_vocab)[ids].log(), torch.arange(len(batch)))[:, None]

    monkeypatch.setattr("icl_lens.analyses.pair_check.score", top_token)
    check = il.task_check(gpt2, pairs, n=30)
    assert check.behaviors == behaviors
    assert (check.accuracy["given"].value > 0) == (check.accuracy["none"].value > 0)
    assert check.effects["maps"].value == pytest.approx(0)
    assert check.effects["learns"].value <= 0, "copying or saying one word is no learning"
    assert check.effects["knows"].value == pytest.approx(float("knows" in behaviors))
    assert not check.does_task


def check_of_right_answers(n_shown, n_right):
    """The check of 40 prompts, of which the first `n_shown` show their answer, and the first
    `n_right[arrangement]` are right.
    """
    prompts, outputs = [], []
    for number in range(40):
        answer = f"a{number}"
        first = answer if number < n_shown else "one"
        pairs = [("x", first), ("y", "two"), ("z", "three")]
        labels = tuple(dict.fromkeys([first, "two", "three", answer]))
        prompts.append(il.Prompt(pairs, f"q{number}", answer, labels))
        outputs.append([100 + number if number < n_shown else 1, 2, 3])
    answers = torch.arange(100, 140)
    predicted = {}
    for arrangement in ("given", "none", "mismatched"):
        is_right = torch.arange(40) < n_right[arrangement]
        predicted[arrangement] = torch.where(is_right, answers, 9)
    return pair_check_of_tokens(prompts, predicted, answers, torch.tensor(outputs))


@pytest.mark.parametrize(
    ("n_shown", "right", "does_task"),
    [
        (40, {"given": 30, "none": 5, "mismatched": 5}, True),
        (40, {"given": 30, "none": 30, "mismatched": 5}, False),  # demonstrations do not help
        (40, {"given": 30, "none": 5, "mismatched": 30}, False),  # answers could be copied
        (3, {"given": 18, "none": 30, "mismatched": 2}, False),  # demonstrations harm
        (0, {"given": 28, "none": 28, "mismatched": 10}, False),
        (0, {"given": 28, "none": 5, "mismatched": 28}, True),
    ],
)
def test_pairs_are_learned_where_demonstrations_help_and_not_by_copying(n_shown, right, does_task):
    check = check_of_right_answers(n_shown, right)
    assert check.does_task == does_task
    assert check.gained.value == pytest.approx((right["given"] - right["none"]) / 40)
    says = str(check)
    assert ("The model does the task from the demonstrations" in says) == does_task
    maps = right["given"] > right["mismatched"]
    assert ("It learns which output belongs to which input." in says) == (does_task and maps)
    lowers = "Exchanging the inputs of the demonstrations makes it right less often."
    assert (lowers in says) == (maps and not does_task)


def test_task_check_of_classes_that_are_not_always_shown(gpt2, tmp_path, monkeypatch):
    """Answers may be shown, so repeating the last output is right where it is the answer."""
    pairs = [(source, ("yes", "no", "foo")[i % 3]) for i, (source, _) in enumerate(PAIRS)]
    prompts = il.load_task(str(write(tmp_path / "pairs.json", pairs)), n=44)
    prompts = [prompt for prompt in prompts if len({*shown_words(prompt)}) > 1]
    say_last = lambda model, batch, sets, *, read: torch.tensor(  # noqa: E731
        [
            [model.tokenizer.convert_tokens_to_ids((shown_words(p) or ["the"])[-1])]
            for p in batch.prompts
        ]
    )
    monkeypatch.setattr("icl_lens.analyses.pair_check.score", say_last)
    check = il.task_check(gpt2, prompts)
    share = sum(shown_words(p)[-1] == p.answer for p in prompts) / len(prompts)
    assert check.accuracy["given"].value == check.last_output == share > 0
    assert check.copied_last == pytest.approx(1 - share)
    assert check.shown == sum(p.answer in shown_words(p) for p in prompts) / len(prompts)
    assert 0 < check.shown < 1
    assert not check.does_task


def prompt_half_answered_by(run, number, query, answer):
    """A prompt that every second time is answered by the model's most probable word."""
    pairs = [pair for pair in PAIRS[number % 3 :: 3] if query not in pair][:3]
    labels = [label for _, label in pairs]
    text = il.tokenize(run.model, il.Prompt(pairs, query), prepend_bos=False)
    top = run.model.tokenizer.convert_ids_to_tokens(int(hf_log_probs(run, text, 0).argmax()))
    if number % 2 and top.isalnum() and top not in {*labels, query}:
        answer = top
    return il.Prompt(pairs, query, answer, (*labels, answer))


def mismatched_prompt(prompt):
    """The prompt in which each output has the input of the one before it in alphabetical order."""
    words = sorted(shown_words(prompt))
    before = dict(zip(words, [words[-1], *words[:-1]], strict=True))
    text_of = {label: text for text, label in pairs_of(prompt)}
    pairs = [(text_of[before[word]], word) for word in shown_words(prompt)]
    return il.Prompt(pairs, prompt.query, prompt.answer, prompt.labels)


def test_task_check_reads_the_most_probable_token_of_the_vocabulary(family_run):
    """Half of the answers are what plain code says comes next."""
    run = family_run("gpt2")
    prompts = [
        prompt_half_answered_by(run, number, *pair) for number, pair in enumerate([*PAIRS, *PAIRS])
    ]
    check = il.task_check(run.model, prompts, prepend_bos=False)
    mismatched = list(map(mismatched_prompt, prompts))
    none = [il.Prompt([], prompt.query, prompt.answer, prompt.labels) for prompt in prompts]
    for name, arranged_prompts in (("given", prompts), ("mismatched", mismatched), ("none", none)):
        batch = il.tokenize(run.model, arranged_prompts, prepend_bos=False)
        top = [int(hf_log_probs(run, batch, row).argmax()) for row in range(len(batch))]
        right = torch.tensor(top) == batch.answer_tokens
        assert check.accuracy[name].value == float(right.double().mean())
        if name == "given":
            assert right.any()
            assert not right.all()


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".json", ".tsv"])
def test_commands_read_pairs(run, tiny, tmp_path, suffix):
    path = write(tmp_path / f"pairs{suffix}")
    options = ("--path", path, "--demonstrations", 3, "--model", tiny, "--no-check")
    code, out, err = run("locate", *options, "-n", 6, "--by", "increase")
    assert code == 0, err
    named = write(tmp_path / "named.tsv", names=("word", "opposite"))
    code, again, err = run(
        "locate", "--pairs", "--columns", "word,opposite", "--path", named, *options[2:], "-n", 6
    )
    assert code == 0, err
    assert again.splitlines()[1:4] == out.splitlines()[1:4], "the same prompts"
    code, again, err = run(
        *("locate", "--pairs", "--columns", "text,label", *options[2:], "-n", 6),
        *("--path", write(tmp_path / "usual.tsv", names=("text", "label"))),
    )
    assert code == 0, "the default columns of texts can be those of pairs: " + err
    assert again.splitlines()[1:4] == out.splitlines()[1:4]
    code, _, err = run("locate", *options, "-n", 6, "--labels", "a,b")
    assert code == 2
    faults.assert_sentence(err.removesuffix("\n"), "--labels has no effect here: pairs")


@pytest.mark.slow
def test_commands_check_pairs_first(run, tiny, tmp_path):
    path = write(tmp_path / "antonyms.json")
    options = ("--demonstrations", 3, "--model", tiny, "-n", 20, "--by", "increase")
    options = (*options, "--anyway")  # the model of random weights does no task
    code, out, err = run("locate", "--path", path, *options)
    assert code == 0, err
    prompts = il.load_task(str(path), n=20, demonstrations=3)
    sentence, printed = str(il.task_check(il.load_model(str(tiny)), prompts)), " ".join(out.split())
    assert (
        printed.index("First of 20 prompts:")
        < printed.index(sentence)
        < printed.index("mean increase")
    )
    code, same, err = run("locate", "--task", path, *options)
    assert code == 0, err
    # The last line, the command for the kinds of these heads, has the options that were given.
    assert same.splitlines()[:-1] == out.splitlines()[:-1]
    assert f"-t {path}" in same.splitlines()[-1]
    code, _, err = run("locate", "--task", "antonyms", "--columns", "a,b", *options)
    assert code == 2
    faults.assert_sentence(
        err.removesuffix("\n"), "--columns has no effect here: bundled pairs have no columns"
    )


HEAD = il.Head(1, 2)
QUICK = ("heads", "head effects", "edges", "whole labels", "ablation")
# What each function returns for every prompt; without `against`, contrasts compare with the outputs
# shown.
BY_PROMPT = {
    "layers": lambda m, b: (
        il.layer_log_prob_increase(il.capture(m, b), against=b.other_label_tokens).attn
    ),
    "heads": lambda m, b: il.head_log_prob_increase(il.capture(m, b), against=b.other_label_tokens),
    "subheads": lambda m, b: il.subhead_log_prob_increase(
        il.capture(m, b), against=b.other_label_tokens
    ).sum(-1),
    "neurons": lambda m, b: il.neuron_log_prob_increase(
        il.capture(m, b), 1, against=b.other_label_tokens
    ),
    "top subheads": lambda m, b: il.top_subheads(il.capture(m, b), k=3).value,
    "value parts": lambda m, b: il.value_parts(il.capture(m, b, writers=True), HEAD).parts,
    "score parts": lambda m, b: (
        il.attention_score_parts(il.capture(m, b, writers=True), HEAD).key_side
    ),
    "head effects": lambda m, b: il.head_effects(m, b).log_odds,
    "gradient estimates": lambda m, b: il.head_effects(m, b, method="gradient").log_odds,
    "edges": lambda m, b: il.head_to_head_effects(m, b, readers=[HEAD], part="q").log_odds,
    "demonstrations": lambda m, b: il.demonstration_effects(m, b).log_odds,
    "saliency": lambda m, b: il.saliency_flow(m, b).label_to_last,
    "whole labels": lambda m, b: (
        il.whole_label_log_probs(m, b).as_subclass(torch.Tensor).gather(1, b.answer[:, None])
    ),
    "ablation": lambda m, b: torch.tensor(
        il.ablate_with_controls(m, b, [HEAD]).per_prompt("heads", "log_odds")[0].tolist()
    ),
    "explanation": lambda m, b: torch.tensor(
        [il.explain(m, b[[row]]).all_heads.contrast for row in range(len(b))]
    ),
}


@pytest.mark.parametrize(
    "name",
    slow_except(QUICK, BY_PROMPT),
)
def test_prompts_of_pairs_have_the_numbers_they_have_alone(gpt2, prompts, name):
    """Other prompts of the batch have other choices, which change nothing."""
    together = BY_PROMPT[name](gpt2, il.tokenize(gpt2, prompts, prepend_bos=False))
    alone = [
        BY_PROMPT[name](gpt2, il.tokenize(gpt2, prompt, prepend_bos=False)) for prompt in prompts
    ]
    assert len(together) == len(prompts)
    assert_close(together, torch.cat(alone))
    assert together.abs().max() > 1e-5


def test_means_over_pairs_are_those_of_their_prompts(family_run, prompts):
    run = family_run("gpt2")
    model, batch = run.model, il.tokenize(run.model, prompts, prepend_bos=False)
    shown_outputs = torch.stack([batch.label_tokens[row] for row in batch.label_index])
    contrast = il.head_log_prob_increase(
        il.capture(model, batch), batch.answer_tokens, against=shown_outputs
    )
    assert_close(il.locate(model, batch, by="contrast").score.mean.float(), contrast.mean(0))
    lost = il.locate(model, batch, by="effect").score.mean
    assert_close(
        lost.float(), il.head_effects(model, batch, against=shown_outputs).log_odds.mean(0)
    )
    vector = il.function_vector(model, heads=[HEAD], reference=batch)
    assert_close(
        vector,
        torch.stack(
            [il.function_vector(model, heads=[HEAD], reference=batch[[i]]) for i in range(5)]
        ).mean(0),
    )
    recovered = il.indirect_effects(model, batch, reference=batch)
    with il.edited(model, il.Ablate([HEAD], mode="mean", reference=batch, positions="last")):
        edited = torch.stack(
            [
                torch.tensor(
                    float(il.capture(model, batch).token_log_probs(batch.answer_tokens)[i])
                )
                for i in range(5)
            ]
        )
    before = torch.stack(
        [hf_log_probs(run, batch, row)[batch.answer_tokens[row]] for row in range(5)]
    )
    assert_close(recovered[:, 1, 2], edited.exp() - before.float().exp())


def test_pairs_are_correct_if_the_answer_is_the_top_token_of_the_vocabulary(family_run, prompts):
    """One of two answers is the best of the prompt's words, the other what plain code says comes
    next.
    """
    run = family_run("gpt2")
    rows, words = [], sorted(set(itertools.chain.from_iterable(PAIRS)))
    for prompt in prompts:
        demonstrated_words, batch = (
            shown_words(prompt),
            il.tokenize(run.model, prompt, prepend_bos=False),
        )
        scores = hf_log_probs(run, batch, 0)
        top = run.model.tokenizer.convert_ids_to_tokens(int(scores.argmax()))
        best = max(
            words,
            key=lambda word: float(
                scores[run.model.tokenizer.convert_tokens_to_ids(word)].detach()
            ),
        )
        for answer in {best, top} - {*demonstrated_words}:
            rows.append(
                il.Prompt(
                    prompt.demonstrations,
                    prompt.query,
                    answer,
                    (*dict.fromkeys(demonstrated_words), answer),
                )
            )
    comparison = il.compare_models(run.model, run.model, rows, prepend_bos=False)
    batch = il.tokenize(run.model, rows, prepend_bos=False)
    expected = [
        float(hf_log_probs(run, batch, row).argmax() == batch.answer_tokens[row])
        for row in range(len(rows))
    ]
    assert comparison.a["accuracy"].tolist() == expected
    assert 0 < sum(expected) < len(expected)
    continued = il.generate(run.model, batch, max_new_tokens=1).tokens[0]
    assert [
        float(top_tokens[0] == token)
        for top_tokens, token in zip(continued, batch.answer_tokens, strict=True)
    ] == expected


@pytest.mark.slow
def test_circuits_of_pairs_are_tested_edge_by_edge(gpt2, tmp_path):
    prompts = il.load_task("mine", write(tmp_path / "pairs.json"), n=33)
    first, second = il.split_by_query(prompts, 8)
    edges = il.locate_circuit(gpt2, first, second, [HEAD], n_edges=50, n_random=3).to_frame()
    batch, reference = il.tokenize(gpt2, second), il.tokenize(gpt2, first)
    three_edges = [
        il.Edge(HEAD, *edges.loc[row, ["part", "writer", "role"]]) for row in (0, 1, len(edges) - 1)
    ]
    removed = [[], *([il.WithoutEdges([edge], reference=reference)] for edge in three_edges)]
    scores = il.score(gpt2, batch, removed).unbind(1)
    odds = [
        il.metrics.label_log_odds(set_log_odds, batch.answer, choices=batch.label_mask)
        for set_log_odds in scores
    ]
    effects = [float((odds[0] - set_log_odds).mean()) for set_log_odds in odds[1:]]
    assert edges["effect"].iloc[[0, 1, -1]].tolist() == pytest.approx(effects, abs=1e-5)
    assert max(map(abs, effects)) > 1e-3


REFUSE = {
    "two towers": lambda m, p: il.two_towers(m, p),
    "located by exchange": lambda m, p: il.locate(m, p.prompts(4), by="exchange"),
    "compared by exchange": lambda m, p: il.compare_models(m, m, p.prompts(4), by="exchange"),
    "explained by exchange": lambda m, p: il.explain(m, p.prompts(1)[0], by="exchange"),
    "score parts": lambda m, p: il.mean_score_parts(m, il.tokenize(m, p.prompts(4)), heads=[HEAD]),
    "other query": lambda m, p: p.prompts(1)[0].with_other_query(),
}


@pytest.mark.parametrize("name", REFUSE)
def test_what_exchanges_classes_is_refused_for_pairs(gpt2, tmp_path, name):
    pairs = il.PairTask("mine", write(tmp_path / "pairs.json"))
    words = (
        "has no query of another class" if name == "other query" else "must demonstrate its answer"
    )
    faults.assert_refused(words, REFUSE[name], gpt2, pairs)
