"""The page of an atlas: its numbers, marks that are linked, and hostile names of scores."""

import json
import re
from dataclasses import replace

import pytest
import torch
from browsers import opened

from icl_lens.atlas.definitions import DEFINITIONS
from icl_lens.atlas.head_atlas import HeadAtlas, HeadScore

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
    heads = {str(6 * head.layer + head.head): kinds for head, kinds in atlas.names.items()}
    assert data["kinds"] == heads
    assert "<img" not in page
    assert atlas.finding.startswith(
        "2 of 24 heads of tiny have a name: induction (1) and needed (1)"
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
