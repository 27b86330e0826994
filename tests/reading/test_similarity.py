"""Similarity of a prompt's queries and labels' keys: against the model's own scores; as a figure,
element and page.
"""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tolerance import assert_close

import icl_lens as il
from icl_lens.models import attention_scores
from icl_lens.report.html import head_contents

SCORES = torch.tensor([[2.0, -1.0, 0.0], [0.5, 1.0, -2.0]])
QUERIES, KEYS = ["love", "a$b$"], ["foo", "<i>bar", "one"]


def test_the_figure_shows_every_score_where_it_belongs():
    figure = il.plots.similarity_matrix(SCORES, QUERIES, KEYS)
    image = figure.axes[0].collections[0]
    assert image.get_array().tolist() == SCORES.tolist()
    assert image.get_clim() == (-2.0, 2.0)
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == KEYS
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["love", r"a\$b\$"]
    figure.canvas.draw()


def test_the_element_shows_every_score_in_its_cell():
    element = il.html.similarity_matrix(
        SCORES, QUERIES, KEYS, query_classes=[0, 1], key_classes=[0, 1, -1]
    )
    page = str(element)
    assert (
        '<td class="n p" style="--v:100%">+2.00</td><td class="n m" style="--v:50%">−1.00</td>'
        in page
    )
    assert '<span class="tok l1">a$b$</span>' in page
    assert "<i>bar" not in page
    assert "&lt;i&gt;bar" in page
    # Reached by Tab, and scrolled from the keyboard where it is wider than the page.
    assert (
        '<div class="scroll" tabindex="0" role="region" aria-label="Similarity of queries and keys"><table'
        in page
    )
    assert page.count('scope="row"') == len(QUERIES)
    assert page.count('scope="col"') == len(KEYS)
    # where scripts and styles are stripped: the same numbers, tinted
    assert (
        "background-color: rgba(213,94,0,0.80)"
        in element._repr_html_().partition("icl-lens-twin")[2]
    )
    assert "−2.00" in repr(element)


@pytest.mark.parametrize("draw", [il.plots.similarity_matrix, il.html.similarity_matrix])
def test_sizes_that_do_not_fit_are_refused(draw):
    with pytest.raises(il.InputError, match=r"= \[2, 2\].* got \[2, 3\]"):
        draw(SCORES, QUERIES, KEYS[:2])


# Of a prompt's own queries and keys


PROMPT = "love : bar like : bar eight : foo two : foo one :"


def test_an_explanation_holds_it_for_every_located_head(gpt2: Any) -> None:
    explanation = il.explain(gpt2, il.Prompt.parse(PROMPT, answer="foo"), k=3)
    batch = il.tokenize(gpt2, [il.Prompt.parse(PROMPT, answer="foo")])
    similarity = il.label_similarity(gpt2, batch, [report.head for report in explanation.heads])[0]
    assert_close([report.similarity for report in explanation.heads], similarity)
    table = explanation.to_frame("similarity")
    assert len(table) == 3 * 5 * 4
    first = table[table["name"] == str(explanation.heads[0].head)].pivot(
        index="query_position", columns="key_position", values="score"
    )
    assert_close(first, similarity[0])
    assert (first.columns - 1).tolist() == first.index[:4].tolist()
    assert [*table["query_label"][:20:4]] == ["bar", "bar", "foo", "foo", "foo"]
    assert (
        il.explain(gpt2, il.Text("love bar love", answer=" bar"), k=2).to_frame("similarity").empty
    )


def matching(scores: Any) -> float:
    """Return how much higher columns score in rows of their own label, by definition, for the
    answer 'foo'.
    """
    x, asked = np.array(scores), np.array([0, 0, 1, 1, 1])  # bar, bar, foo, foo, and the answer
    x = x - x.mean(1, keepdims=True)
    columns = []
    for j in range(4):
        is_other = np.arange(5) != j
        columns.append(
            x[is_other & (asked == asked[j]), j].mean()
            - x[is_other & (asked != asked[j]), j].mean()
        )
    return float(np.mean(columns))


def test_a_label_that_all_rows_prefer_does_not_count_as_matching(gpt2: Any) -> None:
    explanation = il.explain(gpt2, il.Prompt.parse(PROMPT, answer="foo"), k=1)
    for scores, expected in (
        ([[0.0, 0.0, 3.0, 3.0]] * 5, "+0.00"),  # all prefer foo
        (
            [[1.0, 1.0, 0.0, 0.0]] * 2 + [[0.0, 0.0, 1.0, 1.0]] * 3,
            "+1.00",
        ),  # all prefer their own label
    ):
        report = replace(explanation.heads[0], similarity=tuple(map(tuple, scores)))
        page = replace(explanation, heads=(report,)).to_html()
        assert f"a column scores {expected} higher" in page


def test_the_page_shows_the_matrix_and_what_same_labels_score(gpt2: Any) -> None:
    explanation = il.explain(gpt2, il.Prompt.parse(PROMPT, answer="foo"), k=2)
    page, report = explanation.to_html(), explanation.heads[0]
    (panel,) = re.findall(
        rf'<article class="panel" data-head="{report.head}".*?</article>', page, re.DOTALL
    )
    cells = re.findall(r'<td class="n [pm]" style="--v:\d+%">([+−][\d.]+)</td>', panel)
    centered = []
    for i, row in enumerate(report.similarity):
        rest_of_row = [x for j, x in enumerate(row) if j != i]
        centered.append([x - math.fsum(rest_of_row) / len(rest_of_row) for x in row])
    assert [float(cell.replace("−", "-")) for cell in cells] == [
        round(x, 2) for row in centered for x in row
    ]
    assert f"a column scores {matching(report.similarity):+.2f} higher".replace("-", "−") in panel
    assert "Attention scores without positions" in explanation._repr_html_()
    assert (
        "Attention scores without positions"
        not in il.explain(gpt2, il.Text("love bar love", answer=" bar"), k=2).to_html()
    )


def test_a_model_that_hides_its_rotation_is_explained_without_it(
    load_tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny("gptj")

    def hidden(*_: Any) -> None:
        raise attention_scores.RotaryAnglesUnavailable("does not expose its rotary angles")

    assert il.explain(model, il.Prompt.parse(PROMPT, answer="foo"), k=2).heads[0].similarity
    monkeypatch.setattr(attention_scores, "rotation_table", hidden)
    explanation = il.explain(model, il.Prompt.parse(PROMPT, answer="foo"), k=2)
    assert explanation.heads[0].similarity == ()
    assert {left_out.section for left_out in explanation.left_out} == {
        "effects of demonstrations",
        "attention scores without positions",
        "why heads attend where they do",
    }
    assert "<h4>Attention scores without positions" not in explanation.to_html()
    with pytest.raises(il.InputError, match="does not expose its rotary angles"):
        il.label_similarity(model, il.tokenize(model, [il.Prompt.parse(PROMPT)]), ["L0H0"])


@pytest.mark.slow
def test_labels_of_several_tokens_are_asked_for_before_their_first() -> None:
    model = il.load_model("icl-mini")
    prompt = il.Prompt.parse(
        "love : barfoo like : barfoo eight : foobar two : foobar one :", answer="foobar"
    )
    batch = il.tokenize(model, [prompt])
    tokens = batch.token_strings[0]
    assert [tokens[place] for place in batch.prediction_positions[0]] == [":"] * 4
    assert [tokens[place] for place in batch.label_positions[0]] == [
        tokens[start] for start, _ in batch.label_ranges[0]
    ]
    assert bool((batch.label_ranges[..., 1] - batch.label_positions > 1).all())
    explanation = il.explain(model, prompt, k=2)
    table = explanation.to_frame("similarity")
    assert {tokens[place] for place in table["query_position"]} == {":"}
    asked, labels = batch.prediction_positions[0].tolist(), batch.label_positions[0].tolist()
    resid = il.capture(model, batch, positions=[[*asked, *labels]]).resid_pre[:, 4]
    scored = il.query_key_metric(model, "L4H0").scores(resid[:4], resid[4:])
    assert_close(il.label_similarity(model, batch, ["L4H0"])[0, 0, :4], scored)
    early = batch.at([int(batch.label_positions[0, 1])])
    assert early.prediction_positions.tolist()[0][2:] == [-1, -1]


def test_long_texts_and_many_demonstrations_stay_short_on_the_page(gpt2: Any) -> None:
    text = (
        " ".join(f"{word} : {label}" for word, label in [("love", "bar"), ("two", "foo")] * 10)
        + " one :"
    )
    explanation = il.explain(gpt2, il.Prompt.parse(text, answer="foo"), k=1)
    page = explanation.to_html()
    assert "The last 16 of 20 demonstrations are shown" in page
    assert (
        page.count('<td class="n p" style="--v') + page.count('<td class="n m" style="--v')
        == 17 * 16
    )
    assert len(explanation.to_frame("similarity")) == 21 * 20
    assert (
        "Attention scores without positions"
        not in il.explain(gpt2, il.Prompt.parse("two : foo one :", answer="foo"), k=1).to_html()
    )
    assert head_contents.cut("愛" * 40) == "愛" * 22 + " …"
