"""The page of an atlas: its numbers, marks that are linked, and hostile names of scores."""

import json
import re
from dataclasses import replace

import pytest
import torch
from browsers import opened

import icl_lens as il
from icl_lens.analyses.atlas.definitions import DEFINITIONS
from icl_lens.analyses.atlas.head_atlas_result import HeadAtlas
from icl_lens.analyses.atlas.head_score import HeadScore
from icl_lens.foundation.intervals import Interval
from icl_lens.measures.joint_removal import ListRemoval
from icl_lens.report.html.atlas_page import data, opening_head

HOSTILE = "</script><img src=x onerror=window.broken=1>"
KINDS = {"induction": "induction", "effect": "needed"}


@pytest.fixture(scope="module")
def atlas():
    generator = torch.Generator().manual_seed(0)
    scores = {}
    for name in ("previous_token", "induction", "copying", "effect"):
        mean = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        scores[name] = HeadScore.of(DEFINITIONS[name], mean, n=5)
        if name in KINDS:
            p_value = torch.ones(4, 6).double()
            p_value[tuple(scores[name].top(1)[0])] = 1e-4
            scores[name] = replace(scores[name], kind=KINDS[name], p_value=p_value)
    hostile = replace(
        scores["copying"],
        name="hostile",
        title=HOSTILE,
        mean=torch.full((4, 6), torch.nan).double(),
    )
    return HeadAtlas("tiny", scores | {"hostile": hostile}, {}, k=3)


def test_the_page_has_every_number_and_escapes_names(atlas):
    page = atlas.to_html()
    (data,) = re.findall(r'<script type="application/json" class="data">(.*?)</script>', page, re.S)
    data = json.loads(data)
    for score, drawn in zip(atlas, data["scores"], strict=True):
        expected = score.mean.flatten().tolist()
        if score.name == "hostile":
            assert drawn["values"] == [None] * 24
        else:
            assert drawn["values"] == pytest.approx(expected, rel=1e-4)
    heads = {str(6 * head.layer + head.head): kinds for head, kinds in atlas.kinds_by_head.items()}
    assert data["kinds"] == heads
    assert "<img" not in page
    assert atlas.finding.startswith(
        "2 of 24 heads of tiny have a kind: induction (1) and needed (1)"
    )
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)


def test_the_sentence_says_where_no_head_stands_out(atlas):
    scores = {}
    for score in atlas:
        p_value = None if score.p_value is None else torch.ones(4, 6).double()
        scores[score.name] = replace(score, p_value=p_value)
    assert (
        replace(atlas, scores=scores).finding
        == "None of 24 heads of tiny stands out by any of 2 kinds."
    )


def removal(lost, low):
    """Return a made-up removal of heads, which matter if the low end is above zero."""
    ends = {"lost": Interval(lost, low, 2 * lost - low), "lost_by_random": Interval(0.0, -0.1, 0.1)}
    difference = Interval(lost, low, 2 * lost - low)
    return ListRemoval((il.Head(0, 0),), intact=2.0, difference=difference, unit="nats", **ends)


def test_the_page_opens_on_the_head_with_a_kind_that_is_first_by_the_score_that_costs_most(atlas):
    """Without held-out prompts, that score is the effect; a head that was asked about comes first."""
    (induction,), (needed,) = atlas.kinds["induction"], atlas.kinds["needed"]
    assert induction != needed
    assert opening_head(atlas) == needed
    unclear = {"induction": removal(0.9, 0.5), "effect": removal(2.0, -0.1)}
    assert opening_head(replace(atlas, removals=unclear)) == induction
    clear = {"induction": removal(0.9, 0.5), "effect": removal(2.0, 0.1)}
    assert opening_head(replace(atlas, removals=clear)) == needed
    by_another = {"copying": removal(2.0, 0.1)}
    means = atlas["copying"].mean
    first = max((induction, needed), key=lambda head: means[head])
    assert opening_head(replace(atlas, removals=by_another)) == first
    asked = atlas.for_heads(["L3H1", "L0H0"])
    assert opening_head(asked) == il.Head(3, 1)
    scores = {name: replace(score, p_value=None) for name, score in atlas.scores.items()}
    assert opening_head(replace(atlas, scores=scores)) == atlas["effect"].top(1)[0]


def test_the_page_has_the_sentences_of_every_head(atlas):
    drawn = data(atlas)
    for place in range(24):
        assert drawn["notes"].get(place, []) == atlas.notes_on(il.Head.from_index(place, 6))
    named = [6 * head.layer + head.head for head in atlas.kinds_by_head]
    assert not set(named) & {
        place for place, notes in drawn["notes"].items() if "closest" in notes[0]
    }
    assert len(drawn["notes"]) >= 24 - len(named)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_a_head_marked_in_one_map_is_marked_in_all(atlas, browser, tmp_path, width, scheme):
    atlas.to_html(tmp_path / "atlas.html")
    context = opened(
        browser, viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    page, problems = context.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto((tmp_path / "atlas.html").as_uri())
    maps = page.locator(".atlas canvas")
    assert maps.count() == 5
    maps.nth(1).scroll_into_view_if_needed()
    box = maps.nth(1).bounding_box()
    page.mouse.click(box["x"] + box["width"] * 2.5 / 6, box["y"] + box["height"] * 1.5 / 4)
    assert page.locator(".atlas .card h3").inner_text() == "L1H2"
    values = page.locator(".atlas .value").all_inner_texts()
    assert all(value.startswith("L1H2") for value in values)
    maps.nth(0).press("ArrowDown")
    assert page.locator(".atlas").get_attribute("data-marked") == "L2H2"
    page.select_option(".atlas select.x", "copying")
    assert page.locator(".atlas circle").count() == 24
    assert page.locator(".atlas circle.marked").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("window.broken === undefined")
    assert problems == []
    context.close()


@pytest.mark.slow
def test_ranks_on_a_card_are_those_of_the_scores(atlas, browser, tmp_path):
    """Equal values share a place, and a head without a number has none."""
    published = atlas.with_scores({"published": [(3, 3, 0.06), (2, 3, 0.06), (1, 0, 0.02)]})
    published.to_html(tmp_path / "atlas.html")
    context = opened(browser, viewport={"width": 1280, "height": 900}, offline=True)
    page = context.new_page()
    page.goto((tmp_path / "atlas.html").as_uri())
    maps = page.locator(".atlas canvas")
    maps.nth(0).scroll_into_view_if_needed()
    box = maps.nth(0).bounding_box()
    places = {"L2H3": "1 of 24", "L3H3": "1 of 24", "L1H0": "3 of 24", "L0H0": "–"}
    for head in map(il.Head.parse, places):
        across, down = (head.head + 0.5) / 6, (head.layer + 0.5) / 4
        page.mouse.click(box["x"] + box["width"] * across, box["y"] + box["height"] * down)
        assert page.locator(".atlas .card h3").inner_text() == str(head)
        cells = page.locator(".atlas .card tr td:nth-child(3)").all_inner_texts()
        expected = []
        for score in published:
            rank = score.rank(head)
            expected.append("–" if rank is None else f"{rank} of {published.n_heads}")
        assert cells == expected
        assert cells[-1] == places[str(head)]  # of the published score
    context.close()


@pytest.mark.slow
def test_names_of_heads_in_tables_open_their_card(atlas, browser, tmp_path):
    """The card has the sentences of the head, and is in view."""
    atlas.to_html(tmp_path / "atlas.html")
    context = opened(browser, viewport={"width": 400, "height": 900}, offline=True)
    page = context.new_page()
    page.goto((tmp_path / "atlas.html").as_uri())
    (named, *_) = atlas.kinds_by_head
    buttons = page.locator("td button.head", has_text=str(named))
    buttons.first.click()
    assert page.locator(".atlas").get_attribute("data-marked") == str(named)
    assert page.locator(".atlas .card h3").inner_text() == str(named)
    card = page.locator(".atlas .card h3").bounding_box()
    assert 0 <= card["y"] <= 900
    unnamed = next(head for place in range(24) if (head := il.Head.from_index(place, 6)) != named)
    maps = page.locator(".atlas canvas")
    maps.nth(0).scroll_into_view_if_needed()
    box = maps.nth(0).bounding_box()
    across, down = (unnamed.head + 0.5) / 6, (unnamed.layer + 0.5) / 4
    page.mouse.click(box["x"] + box["width"] * across, box["y"] + box["height"] * down)
    notes = page.locator(".atlas .card .note").all_inner_texts()
    assert notes[: len(atlas.notes_on(unnamed))] == atlas.notes_on(unnamed)
    context.close()
