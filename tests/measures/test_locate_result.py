"""Located heads as a table: intervals of every prompt's values, files, configuration."""

import json
from dataclasses import replace

import pandas as pd
import pytest
import torch
from cases import slow
from launches import locating_half
from tolerance import assert_close

import icl_lens as il
from icl_lens.foundation.intervals import bootstrap_interval
from icl_lens.models.view import ModelView
from icl_lens.result.number_format import percent
from icl_lens.runs.configuration import configuration
from icl_lens.runs.stream import plan_batches

PROMPTS = [
    il.Prompt.parse(text, answer="foo")
    for text in (
        "love : bar like : bar eight : foo two : foo one :",
        "happy : bar sad : bar three : foo nine :",
        "cat : foo the red : bar a blue :",
        "one : foo two :",
        "love : foo a : bar the :",
        "sad : bar eight : foo dog :",
        "like : bar one two : foo three :",
    )
]
ASKED = {"model": "tiny", "task": "sentiment-number", "n": 7, "seed": 0, "by": "increase"}
OPTIONS = {"k": 2, "final_norm": "frozen"}


@pytest.fixture(scope="module")
def batch(gpt2):
    return il.tokenize(gpt2, PROMPTS)


@pytest.mark.parametrize("by", ["increase", "contrast"])
def test_intervals_are_those_of_every_prompts_values(gpt2, batch, by):
    if by == "contrast":
        batch = batch[[0, 1, 2, 4, 5]]  # with another label
    against = None if by == "increase" else batch.other_label_tokens
    increases = il.head_log_prob_increase(
        il.capture(gpt2, batch), batch.answer_tokens, against=against
    )
    located = il.locate(gpt2, batch, k=2, by=by, run=il.Run(batch_size=2))
    table = located.to_frame()
    names = ["name", "score", "low", "high", "selected"]
    assert list(table.columns)[:5] == names
    assert {"effect", "effect_low", "effect_high", "rank", "layer", "head"} < set(table.columns)
    assert table["name"].tolist() == [str(head) for head in located.top(12)]
    for layer, head, *cells in (
        table[["layer", "head", "score", "low", "high"]].to_numpy().tolist()[:3]
    ):
        interval = bootstrap_interval(
            increases[:, int(layer), int(head)].double(), clusters=batch.queries
        )
        assert_close(cells, [interval.value, interval.low, interval.high])
    lost = getattr(il.head_effects(gpt2, batch), "log_prob" if by == "increase" else "log_odds")
    for head, *cells in (
        table[["name", "effect", "effect_low", "effect_high"]].head(2).itertuples(index=False)
    ):
        layer, index = il.Head(head)
        interval = bootstrap_interval(lost[:, layer, index].double(), clusters=batch.queries)
        assert_close(cells, [interval.value, interval.low, interval.high])
    assert table["effect"].tail(10).isna().all()
    assert "effect" not in il.locate(gpt2, batch, k=2, by=by, other_scores=False).to_frame()
    assert "95% interval" in repr(located)
    assert il.locate(gpt2, batch[[0, 0]], k=2, by=by).to_frame()["low"].isna().all()


@pytest.mark.parametrize(
    "by",
    [
        "effect",
        slow("increase"),
        slow("contrast"),
        slow("exchange"),
    ],
)
def test_the_other_scores_of_listed_heads_are_those_of_their_functions(gpt2, words, by):
    """Each is the mean over prompts; the three exchanges are those of a scan of all heads."""
    many = il.tokenize(gpt2, locating_half("sentiment-number", words, 8))
    acts = il.capture(gpt2, many)
    others = many.other_label_tokens
    effects = il.head_effects(gpt2, many)
    scan = il.locate(gpt2, many, by="exchange", k=3, other_scores=False)
    by_label = acts.attention_by_label()
    right = by_label[torch.arange(8), :, :, many.answer]
    expected = {
        "contrast": il.head_log_prob_increase(acts, against=others).mean(0),
        "increase": il.head_log_prob_increase(acts).mean(0),
        "effect": (effects.log_prob if by == "increase" else effects.log_odds).mean(0),
        "true_label_attention": right.mean(0),
        "false_label_attention": (by_label.sum(-1) - right).mean(0),
    }
    for name in ("exchange", "keys", "values"):
        expected[name] = scan.scores[name].mean
    located = il.locate(gpt2, many, by=by, k=3, run=il.Run(batch_size=3))
    assert set(located.other_scores) - {"log_prob"} == set(expected) - {by}
    for name, means in expected.items():
        for layer, head in located.heads:
            assert_close(
                located.scores[name].mean[layer, head].float(), means[layer, head].float(), msg=name
            )
    listed = set(located.heads)
    if by != "exchange":
        assert all(
            located.scores["exchange"].mean[head].isnan()
            for head in located.top(12)
            if head not in listed
        )
    defined = located.summary()
    for title in list(located.columns())[4:]:
        assert f" {title} (" in defined


def test_all_listed_heads_are_in_the_table_and_none_is_dropped_without_a_word(icl_mini):
    batch = il.tokenize(icl_mini, il.load_task("animal-country", n=6))
    located = il.locate(icl_mini, batch, by="contrast", k=24, other_scores=False)
    (section,) = located.to_view().sections
    assert [row[0] for row in section.rows] == list(map(str, located.heads))
    assert "24 more rows" in str(located)
    assert "24 more rows" in located.to_html()
    removed = il.ablate_with_controls(icl_mini, batch, located.heads[:22], n_random=2)
    assert f"{located.heads[19]} and 2 more zeroed at" in str(removed)


def test_why_columns_are_missing_is_said_below_the_table(gpt2):
    """Not of prompts that have nothing to exchange."""
    shown = [("love", "cat dog"), ("sad", "cat bar"), ("nine", "foo")]
    demonstrations = [il.Demonstration(text, label) for text, label in shown]
    answers = {"one": "foo", "like": "cat bar", "red": "cat dog"}
    begin_alike = [il.Prompt(demonstrations, query, answer) for query, answer in answers.items()]
    reason = "Queries, keys and values could not be exchanged: prompts must have labels that part at one token"
    located = il.locate(gpt2, begin_alike, k=2)
    assert "exchange" not in located.scores
    assert reason in located.summary()
    for prompts in (
        PROMPTS[:2],
        [replace(prompt, answer="red", labels=("foo", "bar", "red")) for prompt in PROMPTS[:2]],
    ):
        located = il.locate(gpt2, prompts, k=2)
        assert ("exchange" in located.scores) == (prompts == PROMPTS[:2])
        assert "could not be exchanged" not in located.summary()


def test_prompts_that_share_a_query_count_once(gpt2):
    """Copies of every prompt add nothing: the interval stays that of one copy, not 1/√4 of it."""
    four_times = []
    for prompt in PROMPTS:
        four_times += [prompt] * 4
    copies = [il.tokenize(gpt2, PROMPTS), il.tokenize(gpt2, four_times)]
    tables = [
        il.locate(gpt2, batch, k=2, by="increase", run=il.Run(batch_size=2)).to_frame()
        for batch in copies
    ]
    widths = [(table["high"] - table["low"]).to_numpy() for table in tables]
    assert_close(widths[1], widths[0])
    assert (widths[0] > 1e-4).all()


def test_result_files_hold_the_result(gpt2, batch, tmp_path):
    located = il.locate(gpt2, batch, k=2, by="effect", run=il.Run(tmp_path))
    table = located.to_frame()
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "heads.csv"), table)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "heads.parquet"), table)
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored == json.loads(json.dumps(located.to_dict()))
    assert (stored["heads"], stored["n_prompts"]) == ([str(head) for head in located.heads], 7)


def halves(model, n):
    prompts = il.load_task("animal-country", n=3 * n)
    return [il.tokenize(model, half) for half in il.split_by_query(prompts, n)]


@pytest.mark.slow
def test_what_held_out_prompts_lose_is_the_finding(icl_mini, tmp_path):
    """It names random heads, accuracy and log-odds."""
    locating, testing = halves(icl_mini, 20)
    located = il.locate(icl_mini, locating, k=4, held_out=testing, n_random=5)
    expected = il.ablate_with_controls(icl_mini, testing, located.heads, n_random=5)
    assert located.finding.startswith(expected.finding)
    assert located.heads_that_matter == located.heads
    assert not located.removal.conditions["all layers"].sets  # shown nowhere, so not run
    assert "matter: jointly zeroed at the last position" in located.finding
    assert "not shown to be this task" not in located.finding
    assert expected.shows_that_heads_matter
    sentence = "{} with these heads, {} without them, {} without random heads"
    accuracies, log_odds = [], []
    for name in ("no ablation", "heads", "same layers"):
        accuracies.append(percent(expected.interval(name, "accuracy").value))
        log_odds.append(f"{expected.interval(name, 'log_odds').value:.2f}".replace("-", "−"))
    assert f"accuracy is {sentence.format(*accuracies)} (chance 50.0%)." in located.finding
    assert f"the answer's log-odds are {sentence.format(*log_odds)}; " in located.finding
    assert "(with other queries)" in located.finding
    located.save(tmp_path / "located.json")
    assert il.results.load(tmp_path / "located.json").finding == located.finding
    without = il.locate(icl_mini, locating, k=4)
    assert without.removal is None
    assert "icl-lens ablate" in without.finding


def check_sentence_on_single_heads(located):
    """What a table shows of heads alone is not denied below it."""
    effect, together = located.scores["effect"], "The table ranks single heads; together, they are"
    for low in (-0.1, 0.1):
        low_everywhere = replace(effect, low=torch.full_like(effect.low, low))
        changed = replace(located, scores=located.scores | {"effect": low_everywhere})
        assert (together in changed.finding) == (low > 0)
        assert ("none of them is shown to carry" in changed.finding) == (low < 0)


@pytest.mark.slow
def test_heads_that_do_not_matter_are_not_shown_to(gpt2, batch, monkeypatch):
    few = batch[[0, 1, 2, 4, 5]]
    untrained = il.locate(gpt2, few, by="increase", k=1, held_out=few, n_random=5)
    check_sentence_on_single_heads(untrained)
    assert "It is not shown that" in untrained.finding
    assert not untrained.removal.shows_that_heads_matter
    assert "On 5 prompts, 5 of whose 5 queries were used to locate the heads" in untrained.finding
    assert untrained.heads_that_matter == []
    assert untrained.to_dict()["heads_that_matter"] == []
    assert "The table ranks heads; none of them is shown to carry the answer." in untrained.finding
    assert untrained.removal.lacks_task
    assert untrained.finding.startswith("The model is not shown to do this task: of 5 prompts it ")
    assert "What these heads add" not in untrained.finding
    monkeypatch.setattr(il.results.ControlledAblation, "shows_that_heads_matter", True)
    assert "What these heads add is therefore not shown to be this task." in untrained.finding


def test_the_configuration_names_what_changes_a_run(gpt2, batch):
    def configured(rows, options, asked, batch_size=2):
        plan = plan_batches(ModelView.of(gpt2), rows, il.Run(batch_size=batch_size))
        return configuration(gpt2, rows, plan, options, asked)

    manifest = configured(batch, OPTIONS, ASKED)
    settings = {
        "model": "tiny",
        "task": "sentiment-number",
        "n": 7,
        "seed": 0,
        "k": 2,
        "final_norm": "frozen",
    }
    assert manifest | settings == manifest
    assert {"weights", "labels", "prompts", "device", "batches", "plan", "versions"} < set(manifest)
    assert manifest["batches"] == 4
    assert manifest["labels"] == list(batch.labels)
    json.dumps(manifest)
    for changed_manifest, changed_names in (
        (configured(batch, OPTIONS | {"k": 3}, ASKED), {"k"}),
        (configured(batch, OPTIONS, ASKED, 3), {"batches", "plan"}),
        (configured(batch, OPTIONS, ASKED | {"seed": 1}), {"seed"}),
        (configured(batch[[1, 0, 2, 3, 4, 5, 6]], OPTIONS, ASKED), {"prompts", "plan"}),
    ):
        assert {
            name for name in manifest if manifest[name] != changed_manifest[name]
        } == changed_names


def test_runs_on_labels_of_several_tokens_do_not_resume_older_ones(gpt2, batch):
    """Older versions stored what such labels have at their last tokens only."""
    text = [il.Demonstration("love", "bar eight"), il.Demonstration("one", "foo")]
    longer = il.tokenize(gpt2, [il.Prompt(text, query="two", answer="foo")])
    assert "labels_are" not in configuration(gpt2, batch, [[0]], OPTIONS, ASKED)
    assert "labels_are" in configuration(gpt2, longer, [[0]], OPTIONS, ASKED)


def test_prompts_that_do_not_show_their_answer_have_no_attention_to_true_labels(gpt2):
    texts = [
        "love : bar like : foo one :",
        "sad : bar three : foo two :",
        "cat : foo red : bar nine :",
    ]
    prompts = [il.Prompt.parse(text, answer="foo") for text in texts]
    hidden = [
        il.Prompt(prompt.demonstrations[:1], prompt.query, "foo", labels=["bar", "foo"])
        for prompt in prompts[:2]
    ]
    batch = il.tokenize(gpt2, [*hidden, prompts[2]], labels=["bar", "foo"])
    located = il.locate(gpt2, batch, k=2, by="increase")
    shown = il.capture(gpt2, batch[2:]).attention_by_label()[0, :, :, batch.labels.index("foo")]
    for head in located.heads:
        assert_close(located.scores["true_label_attention"].mean[head].float(), shown[head])
    without = il.locate(gpt2, batch[:2], k=2, by="increase")
    assert without.scores["true_label_attention"].mean.isnan().all()
    assert "attention to true labels" in located.columns()
    assert "attention to true labels" not in without.columns()
    assert "attention to true labels" not in without.summary()
    assert "attention to false labels" in without.columns()
