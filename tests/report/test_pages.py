"""Pages and elements as text: complete, self-contained, and safe whatever the tokens say. Drawing:
test_pages_in_browser.
"""

import base64
import gzip
import html as stdlib_html
import itertools
import json
import re
import shlex
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import explanations as ex
import families
import numpy as np
import pytest
import torch
from cases import slow
from click.testing import CliRunner
from page_elements import Page

import icl_lens as il
from icl_lens.analyses.explanation import sections
from icl_lens.analyses.explanation.command import command
from icl_lens.analyses.explanation.reports import first_report
from icl_lens.analyses.explanation.sections import SECTIONS, ExplanationSection
from icl_lens.analyses.explanation.sentences import lost_name, scores_note, why_sentence
from icl_lens.analyses.explanation.tables import TableName
from icl_lens.cli import app
from icl_lens.cli.program import app_with_all_options
from icl_lens.report import explanation_terminal, html, palette
from icl_lens.report.html import explanation_page, head_contents, templating
from icl_lens.report.html.templating import asset, circuitsvis_bundle, visible
from icl_lens.result.number_format import joined, percent, signed
from icl_lens.result.view import Column, Section


def every_element(explanation):
    n = len(explanation.input.tokens)
    patterns = torch.ones(1, n, n).tril() / torch.arange(1, n + 1)[:, None]
    return [
        html.attention_to_labels(explanation),
        html.attention_patterns(explanation.input.tokens, patterns, [il.Head(1, 2)]),
        html.subhead_values(explanation),
        html.token_values(explanation.input.tokens, torch.ones(1, n), ["ones"]),
        html.words_by_position(explanation),
        html.head_heatmap(explanation),
        html.head_heatmap(torch.tensor(explanation.all_heads.increase)),
    ]


def strips(source):
    """Return the tokens of every strip on a page, each with its classes, share of full color, and
    title.
    """
    token = re.compile(
        r'<span role=listitem(?: class="([^"]*)")?(?: style=--v:(\d+)%)? title="([^"]*)">(.*?)</span>'
    )
    tokens_of_strips = []
    for strip in re.findall(r'<div class="strip.*?</div>', source):
        tokens_of_strips.append([])
        for classes, share, title, text in token.findall(strip):
            shown_token = (stdlib_html.unescape(text), classes, int(share or 0), title)
            tokens_of_strips[-1].append(shown_token)
    return tokens_of_strips


@pytest.fixture(scope="module")
def paper():
    return ex.made()


@pytest.fixture(scope="module")
def paper_page(paper):
    return Page(paper.to_html())


def test_nothing_on_a_page_points_outside(paper):
    second_explanation = ex.made(seed=1)
    for source in [
        paper.to_html(),
        il.compare(paper, second_explanation).to_html(),
        *map(str, every_element(paper)),
    ]:
        page = Page(source)
        links = []
        for _, attributes in page.elements:
            for name in ("src", "href", "srcset", "action", "data"):
                if attributes.get(name):
                    links.append(attributes[name])
        assert links == ["data:,"]  # the empty icon, without which browsers ask for one
        styles = "".join(re.findall(r"<style>(.*?)</style>", source, re.S))
        assert "url(" not in styles
        assert "@import" not in styles
    assert paper.to_html() == ex.made().to_html(), "the same explanation gives the same page"


def test_only_what_circuitsvis_draws_contains_its_script_and_contains_it_once(paper):
    packed = circuitsvis_bundle()
    assert re.fullmatch(r"[A-Za-z0-9+/]{,500000}=*", packed)  # safe inside a script element
    bundle = gzip.decompress(base64.b64decode(packed)).decode()
    assert "var CircuitsVis=" in bundle[:60]
    assert "sourceMappingURL" not in bundle  # developer tools would fetch it
    pages = [paper, ex.free(), il.compare(paper, ex.made(seed=1))]
    elements = every_element(paper)
    sources = [*(page.to_html() for page in pages), *map(str, elements)]
    counts = [source.count(packed) for source in sources]
    assert counts == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0]  # attention to labels and attention patterns
    assert counts == [source.count(asset("circuitsvis.js")) for source in sources]
    assert [count > 0 for count in counts] == [
        bool(Page(source).all("div", **{"class": "cv"})) for source in sources
    ]
    assert [displayed._repr_html_().count(packed) for displayed in (*pages, *elements)] == counts


def test_nothing_asks_the_network(monkeypatch, paper):
    import socket

    from circuitsvis.utils import render

    def refuse(*args, **kwargs):
        raise AssertionError("asked for the network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(render, "internet_on", refuse)
    monkeypatch.setattr(render.RenderedHTML, "_repr_html_", refuse)
    monkeypatch.setattr(render.RenderedHTML, "__str__", refuse)
    paper.to_html()
    paper._repr_html_()
    for element in every_element(paper):
        str(element)
        element._repr_html_()


def test_a_missing_bundle_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(templating, "files", lambda package: tmp_path)
    with pytest.raises(il.InputError, match=r"lacks dist/cdn/iife\.js"):
        circuitsvis_bundle.__wrapped__()


def test_what_is_installed_includes_the_templates():
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is missing")
    sdist = pytest.importorskip("hatchling.builders.sdist", reason="hatchling is missing")
    for builder in (wheel.WheelBuilder, sdist.SdistBuilder):
        files = builder(str(Path(__file__).parents[2])).recurse_included_files()
        paths = {Path(file.relative_path).as_posix() for file in files}
        for template in templating.TEMPLATES.list_templates():
            assert f"icl_lens/report/html/templates/{template}" in paths
        assert {Path(path).name for path in paths} >= {
            "colors.css",
            "page.css",
            "page.js",
            "circuitsvis.js",
            "host_theme.js",
            "theme.js",
            "frame.js",
            "live.js",
            "live.css",
            "cheatsheet.md",
        }


@pytest.mark.slow
def test_a_large_page_is_small():
    explanation = ex.large()
    assert (len(explanation.all_heads.increase), len(explanation.all_heads.increase[0])) == (36, 20)
    assert len(explanation.input.tokens) == 200
    assert len(explanation.to_html().encode()) <= 1_200_000
    assert len(explanation._repr_html_().partition('<div class="icl-lens-twin">')[2]) < 150_000


def hostile_explanation(text):
    """An explanation with the text wherever a user or a model can put one."""
    # A lone surrogate comes from a model's tokens only: prompts refuse it.
    demonstrated_text = "odd" if any("\ud800" <= char <= "\udfff" for char in text) else text
    prompt = il.Prompt(
        [il.Demonstration(demonstrated_text, "foo"), il.Demonstration("two", demonstrated_text)],
        f"query {demonstrated_text}",
        "foo",
        ("foo", demonstrated_text),
    )
    tokens = [text, ":", "foo", "two", ":", text, "query", text, ":"]
    made = ex.made(prompt, tokens=tokens, words=[text, "plain"], model=text)
    return ex.changed(made, target_token=text, versions=(("icl-lens", text),))


def pages_and_twins(word):
    """Return all pages and elements, with this word wherever a user can put one, and their static
    versions.
    """
    one_word = word.replace(" ", "_")
    free, hostile = (
        ex.free(f"a b {one_word} d", target=f"␣{one_word}", other="x"),
        hostile_explanation(word),
    )
    elements = every_element(hostile)
    pages = [
        free.to_html(),
        hostile.to_html(),
        il.compare(free, hostile).to_html(),
        *map(str, elements),
    ]
    return [*map(Page, pages)], [
        twin(displayed) for displayed in (free, hostile, il.compare(free, hostile), *elements)
    ]


@pytest.fixture(scope="module")
def harmless():
    return pages_and_twins("word")


@pytest.mark.parametrize(
    "text",
    [
        *ex.HOSTILE[:2],
        *(slow(hostile_text) for hostile_text in ex.HOSTILE[2:]),
    ],
)
def test_injected_markup_stays_text(harmless, text):
    """Pages, elements and their static versions have the elements and attributes that harmless
    words give.
    """
    pages, twins = pages_and_twins(text)
    for before, after in zip(harmless[0], pages, strict=True):
        assert [(tag, sorted(names)) for tag, names in after.elements] == [
            (tag, sorted(names)) for tag, names in before.elements
        ]
        for data in after.scripts:
            assert re.fullmatch(r"[A-Za-z0-9+/]+=*|[^<>&]*", data)  # circuitsvis, or JSON
    for before, after in zip(harmless[1], twins, strict=True):
        assert [tag for tag, _ in after.elements] == [tag for tag, _ in before.elements]
    assert pages[1].text.count(text) >= 20


@pytest.mark.parametrize(
    ("text", "displayed_text"),
    [
        ("שלום", "שלום"),
        ("مرحبا", "مرحبا"),
        ("👩‍👩‍👧🏽", "👩‍👩‍👧🏽"),
        ("<0xE2>", "<0xE2>"),
        ("\ufffd", "\ufffd"),
        ("ï¿½", "ï¿½"),
        ("Ġfoo", "Ġfoo"),
        ("a\u202eb", "a⟨U+202E⟩b"),
        ("\ud83d", "⟨U+D83D⟩"),
        ("\x00", "⟨U+0000⟩"),
        ("a\u2028b", "a⏎b"),
    ],
)
def test_unusual_tokens_are_shown(text, displayed_text):
    explanation = hostile_explanation(text)
    source = explanation.to_html()
    source.encode("utf-8")  # a lone surrogate would not
    page = Page(source)
    assert page.text.count(displayed_text) >= 20
    if not text.isascii():
        isolated = re.findall(r"<bdi>(.*?)</bdi>", source)
        assert displayed_text in map(stdlib_html.unescape, isolated) or displayed_text.isascii()
    for element in every_element(explanation):
        element._repr_html_().encode("utf-8")


def test_white_space_tokens_can_be_seen():
    explanation = ex.made(tokens=["love", "\n", "bar", " ", "", *"xxxxxxxxx"])
    text = Page(
        ex.changed(explanation, next_tokens=(("\n", 0.5), (" ", 0.2), ("", 0.1))).to_html()
    ).text
    assert "⏎ 50.0%" in text
    assert "␣ 20.0%" in text
    assert "∅ 10.0%" in text
    assert visible("\t\r\ufeff") == "⇥␍⟨U+FEFF⟩"


def test_numbers_have_one_form():
    for values, rounded, largest in (
        ([0.123456789, float("nan")], [0.12346, None], 0.12346),
        ([0.0, 0.0], [0, 0], 1),
    ):
        explanation = ex.made("a : foo b :")
        report = replace(
            explanation.heads[0],
            attention=tuple(values),
            value_words=(),
            value_ranks=(),
            key_words=(),
        )
        nothing = dict.fromkeys(("label_positions", "label_ranges", "demonstration_labels"), ())
        tokens = dict.fromkeys(("tokens", "token_names"), ("a", "b"))
        explanation = ex.changed(explanation, heads=(report,), **tokens, **nothing)
        props = json.loads(Page(str(html.attention_to_labels(explanation))).scripts[0])["props"]
        assert (props["values"], props["maxValue"]) == (rounded, largest)
    assert [signed(1.2345), signed(-0.5)] == ["+1.234", "−0.500"]
    assert [percent(0.123), percent(0.0), percent(0.00012)] == ["12.3%", "0.0%", "0.012%"]


def test_every_head_has_a_cell_with_its_value(paper, paper_page):
    cells = {}
    for tag, attributes in paper_page.elements:
        if tag == "button" and "data-value" in attributes:
            cells[attributes["data-head"]] = attributes
    assert len(cells) == 24
    increases = np.array(paper.all_heads.increase)
    reach = np.abs(increases).max()
    for (layer, head), value in np.ndenumerate(increases):
        cell = cells[f"L{layer}H{head}"]
        assert float(cell["data-value"]) == pytest.approx(value, rel=1e-4)
        assert cell["aria-label"].startswith(f"L{layer}H{head}, {signed(value)} nats")
        assert cell["style"] == f"--v:{100 * abs(value) / reach:.1f}%"
        assert cell["class"].split()[0] == ("p" if value >= 0 else "n")
    ringed = [name for name, cell in cells.items() if "top" in cell["class"]]
    assert sorted(ringed) == sorted(str(report.head) for report in paper.heads)


def test_the_style_sheet_has_the_palettes_colors():
    """Only colors of the light theme are compared: they come first in the sheet."""
    sheet = asset("colors.css")

    def colors(*names):
        return [re.search(rf"--{name}: (#[0-9a-f]{{6}})", sheet)[1].upper() for name in names]

    assert colors("pos", "neg") == [palette.BLUE, palette.ORANGE]
    # The fifth label's yellow differs on purpose: it is darker on a white page than in the
    # terminal.
    labels = [palette.SKY, palette.AMBER, palette.GREEN, palette.PINK, palette.ORANGE]
    assert colors("l0", "l1", "l2", "l3", "l5") == labels


def test_layer_bars_are_drawn_to_scale(paper):
    explanation = ex.changed(
        paper,
        attn=(1.0, -1.0),
        ffn=(0.5, 0.0),
        increase=paper.all_heads.increase[:2],
        heads=(replace(paper.heads[0], head=il.Head(1, 0)),),
    )
    bars = Page(explanation.to_html()).all("rect")
    # Zero lies half way between +1 and −1.
    assert [(a["class"], a["y"], a["height"]) for a in bars] == [
        ("p", "0.00%", "50.00%"),
        ("n", "50.00%", "50.00%"),
        ("p", "25.00%", "25.00%"),
        ("p", "50.00%", "0.40%"),
    ]


def test_probabilities_after_removal_are_on_the_page(paper):
    log2 = 0.6931471805599453
    explanation = ex.changed(
        paper,
        log_probs=(-2 * log2, -log2),
        ablation=replace(
            paper.ablation, located=(-log2, -3 * log2), random=((-log2, -log2), (-2 * log2, -log2))
        ),
    )
    page = Page(explanation.to_html())
    assert "The model predicts foo, correctly" in page.text
    assert "Probability 50.0%, after" in page.text
    removal = page.text[
        page.text.index("Ablating the located heads") : page.text.index("Largest parts")
    ]
    assert "bar25.0%50.0%37.5% (25.0%–50.0%)" in removal
    assert "foo50.0%12.5%50.0% (50.0%–50.0%)" in removal


def test_the_located_table_sums_attention_by_label(paper):
    report = replace(
        paper.heads[0], attention=tuple(0.01 * i for i in range(14)), ablated=(-1.0, -1e9)
    )
    text = Page(replace(paper, heads=(report,)).to_html()).text
    # bar at 2 and 5, foo at 8 and 11
    assert f"{report.head}{signed(report.increase)}0.070.190.0%" in text


SEVERAL_TOKENS = {
    "spellings": (("␣", "bar"), ("foo",)),
    "scored_tokens": ("␣", "foo"),
    "whole_log_probs": (-7.25, -0.5),
}
SHARED_TOKENS = SEVERAL_TOKENS | {
    "spellings": (("␣", "bar"), ("␣", "foo")),
    "scored_tokens": ("bar", "foo"),
    "n_shared_tokens": 1,
}


@pytest.mark.parametrize(
    ("changes", "expected", "unexpected"),
    [
        ({}, ["Exact and certified: 21 of 336 parts"], "contrast, nats"),
        ({"certified": False}, ["all 336 parts were evaluated"], "Exact and certified"),
        ({"prompt": il.Prompt.parse(ex.PAPER)}, ["The model predicts"], "correctly"),
        ({"log_probs": (-0.1, -3.0)}, ["The model predicts bar, not foo"], "correctly"),
        (
            {"log_probs": (-5.0, -4.0), "next_tokens": (("␣Seoul", 0.155),)},
            [
                "Most probable: ␣Seoul (15.5%); among the labels: foo (1.8%), correctly",
                "most probable label",
            ],
            "The model predicts",
        ),
        (
            SEVERAL_TOKENS,
            [
                "Among the labels, the model prefers",
                "−7.250",
                "'bar' is scored by '␣', which is only white space",
            ],
            "The model predicts",
        ),
        (SHARED_TOKENS, ["Among the labels, the model prefers"], "only white space"),
    ],
)
def test_the_page_says_what_was_compared_and_found(paper, changes, expected, unexpected):
    text = Page(ex.changed(paper, **changes).to_html()).text
    assert [words in text for words in expected] == [True] * len(expected)
    assert unexpected not in text


def test_labels_beyond_the_colors_are_shown():
    prompt = il.Prompt(
        [il.Demonstration(f"t{i}", f"label{i}") for i in range(9)], "q", answer="label8"
    )
    text = Page(ex.made(prompt).to_html()).text
    assert all(text.count(f"label{i}") > 5 for i in range(9))


def test_the_command_names_everything_and_the_command_line_knows_it(paper, paper_page):
    words = shlex.split(command(paper))
    assert words == shlex.split(
        f"icl-lens explain '{ex.PAPER}' --model tiny --answer foo --top 5 --ablate 4 --seed 0 "
        "--final-norm frozen --bias --dtype float32"
    )
    assert command(paper) in paper_page.text
    words = shlex.split(
        command(ex.changed(paper, prepend_bos=False, bias=False, source="/my models/tiny"))
    )
    assert words[words.index("--model") + 1] == "/my models/tiny"
    program = app_with_all_options(app)
    help_text = (
        CliRunner()
        .invoke(program, ["explain", "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
        .output
    )
    assert [word for word in words if word.startswith("--") and word not in help_text] == []


def test_what_the_command_line_cannot_say_is_python():
    prompt = il.Prompt(
        [il.Demonstration("a : b", "two words"), il.Demonstration("c", "foo")], "it's", answer="foo"
    )
    explanation = ex.made(prompt)
    seen = {}

    def explain(model, prompt, **kwargs):
        seen.update(model=model, prompt=prompt, **kwargs)

    stub = SimpleNamespace(
        explain=explain,
        load_model=lambda name, dtype=torch.float32: (name, dtype),
        Prompt=il.Prompt,
        Demonstration=il.Demonstration,
        Template=il.Template,
    )
    source = command(ex.changed(explanation, source="/my models/tiny"))
    exec(source.replace("import icl_lens as il\n", ""), {"il": stub})
    assert seen["prompt"] == prompt
    assert seen.get("template", il.Template()) == explanation.input.template
    assert seen["model"] == ("/my models/tiny", torch.float32)
    assert (seen["k"], seen["n_ablated"], seen["n_random"], seen["seed"]) == (5, 4, 20, 0)
    assert seen["labels"] == list(explanation.labels)


@pytest.mark.slow
def test_python_names_whole_labels_that_begin_alike(icl_mini):
    """The scores of a decision have one column for those that still agree; the code says what was
    tokenized.
    """
    demonstrations = [
        il.Demonstration(*text_and_label)
        for text_and_label in (("love", "foo bar"), ("two", "foo foo"), ("hate", "bar"))
    ]
    prompt = il.Prompt(demonstrations, "nine", answer="bar")
    explanation = il.explain(icl_mini, prompt, k=2)
    assert {*explanation.labels} != {*prompt.labels}
    made = {}
    exec(
        command(ex.changed(explanation, source="icl-mini")).replace(
            "il.explain(", "found = il.explain("
        ),
        made,
    )
    assert made["found"].labels == explanation.labels
    assert made["found"].scores.log_probs == pytest.approx(explanation.scores.log_probs, abs=1e-5)


def test_a_frame_holds_the_whole_page(paper):
    element = html.words_by_position(paper)
    held = [a["data-page"] for a in Page(element._repr_html_()).all("b") if "data-page" in a]
    assert held == [str(element)]
    assert paper.to_html() in [a.get("data-page") for a in Page(paper._repr_html_()).all("b")]


@pytest.mark.slow
@pytest.mark.parametrize("strip", [slow(False), True])
def test_a_sanitized_notebook_shows_the_numbers_and_no_source(paper, strip):
    """`nbconvert --sanitize-html` shows what it does not allow as text: a short script, never the
    page.
    """
    sanitize = pytest.importorskip(
        "nbconvert.preprocessors.sanitize", reason="nbconvert is missing"
    )
    from nbconvert.filters import clean_html

    for displayed in (paper, html.words_by_position(paper), il.compare(paper, paper)):
        source = displayed._repr_html_()
        shown_by_default = clean_html(source).partition("&lt;script&gt;")[0]
        # nbconvert's parser adds <tbody> to every table, even a DataFrame's, but does not allow
        # this tag.
        assert set(re.findall(r"&lt;/?\w+", shown_by_default)) <= {"&lt;tbody", "&lt;/tbody"}
        assert "<table>" in shown_by_default or "Largest: " in shown_by_default
        assert "Static version" in shown_by_default
        text = stdlib_html.unescape(sanitize.SanitizeHTML(strip=strip).sanitize_html_tags(source))
        bare = re.sub(r"<[^>]*>", " ", text)
        assert len(text) < len(source) / 3
        for source in (
            "CircuitsVis",
            "box-sizing",
            "prefers-color-scheme",
            "getComputedStyle",
            "H4sI",
        ):
            assert source not in text
        assert len(max(bare.split(), key=len)) < 120
        assert displayed is not paper or all(
            f"{head.head} {signed(head.increase)} 0." in " ".join(bare.split())
            for head in paper.heads
        )


def test_attention_from_activations_is_the_pattern(gpt2_acts):
    head = il.Head(1, 2)
    element = html.attention_to_labels(gpt2_acts, [head], row=1)
    data = json.loads(Page(str(element)).scripts[0])
    n = int(gpt2_acts.batch.last[1]) + 1
    assert data["props"]["tokens"] == gpt2_acts.batch.token_strings[1]
    assert data["props"]["values"] == pytest.approx(
        gpt2_acts.pattern[1, 1, 2, :n].tolist(), rel=1e-4
    )
    batch = gpt2_acts.batch
    marked = torch.stack([batch.label_positions[1], batch.label_index[1]], dim=1)[
        :3
    ]  # three demonstrations
    assert [mark[:2] for mark in data["marks"]] == marked.tolist()


def test_a_page_opens_the_head_that_is_asked_about(paper):
    """Without `why=`, the best head."""
    first, second = paper.heads[:2]
    asked = replace(paper, settings=replace(paper.settings, why=str(second.head)))
    for explanation, report in ((paper, first), (asked, second)):
        page = explanation.to_html()
        data = re.search(r'<script type="application/json" class="data">(.*?)</script>', page)
        assert data is not None
        assert json.loads(data[1])["first"] == str(report.head)
        assert first_report(explanation) == report
        sentence = stdlib_html.escape(why_sentence(explanation, report), quote=False)
        assert sentence.split(" gives")[0] in page


def test_strips_of_a_panel_show_the_labels_in_their_colors(paper):
    """Labels are filled under attention, and underlined under increases, whose fill shows the
    sign.
    """
    report, labels = paper.heads[0], {2: "l0", 5: "l0", 8: "l1", 11: "l1"}
    attention, increases = strips(paper.to_html())[:2]
    weights, values = report.attention, report.position_increases
    assert attention == [
        (
            token,
            labels.get(i, ""),
            round(100 * weights[i] / max(weights)),
            f"{weights[i]:.3f} at position {i}",
        )
        for i, token in enumerate(paper.input.tokens)
    ]
    signs = ["p" if x >= 0 else "n" for x in values]
    assert [classes.split() for _, classes, _, _ in increases] == [
        [sign, *([labels[i]] if i in labels else [])] for i, sign in enumerate(signs)
    ]


def test_values_that_are_not_numbers_have_no_color():
    nan, inf = float("nan"), float("inf")
    (strip,) = strips(
        str(html.token_values(["a", "b", "", " \n"], torch.tensor([[nan, -0.5, 0.25, inf]]), ["x"]))
    )
    assert [(token, share) for token, _, share, _ in strip] == [
        ("a", 0),
        ("b", 100),
        ("∅", 50),
        (" ⏎", 100),
    ]


def test_text_is_legible_on_the_deepest_color_of_tokens_and_cells():
    """Contrast of at least 4.5 : 1 (WCAG AA) in both themes."""
    sheet = asset("colors.css")
    light, dark = re.findall(r":root(?:\[data-theme=dark\])? \{(.*?)\n\}", sheet, re.S)[:2]

    def variables(block):
        return dict(re.findall(r"--(\w+): (#[0-9a-f]+|\.\d+)", block))

    def rgb(name):
        digits = colors[name][1:]
        digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
        return torch.tensor([int(digits[i : i + 2], 16) for i in (0, 2, 4)]) / 255

    def luminance(color):
        linear = torch.where(color <= 0.04045, color / 12.92, ((color + 0.055) / 1.055) ** 2.4)
        return float(linear @ torch.tensor([0.2126, 0.7152, 0.0722]))

    for theme in ({}, variables(dark)):
        colors = variables(light) | theme
        deep = float(colors["deep"])
        for fill in ("pos", "neg", "soft", *(f"l{i}" for i in range(6))):
            for base in ("wash", "bg"):
                ground = deep * rgb(fill) + (1 - deep) * rgb(base)
                low, high = sorted((luminance(ground), luminance(rgb("ink"))))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (fill, base, theme)


def test_elements_show_the_chosen_heads_on_one_scale(paper):
    heads = [report.head for report in paper.heads[3:5]]
    head_strips = strips(str(html.subhead_values(paper, heads)))
    # One scale for both heads.
    reach = max(max(map(abs, report.position_increases)) for report in paper.heads[3:5])
    for strip, report in zip(head_strips, paper.heads[3:5], strict=True):
        values = report.position_increases
        assert [title for _, _, _, title in strip] == [
            f"{signed(x)} at position {i}" for i, x in enumerate(values)
        ]
        assert [share for _, _, share, _ in strip] == pytest.approx(
            [100 * abs(x) / reach for x in values], abs=0.51
        )
        assert [classes for _, classes, _, _ in strip] == ["p" if x >= 0 else "n" for x in values]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e, acts: html.attention_to_labels(e, [il.Head(0, 3)]), "got L0H3"),
        (lambda e, acts: html.attention_to_labels(acts), "heads must not be empty"),
        (lambda e, acts: html.attention_to_labels(acts, [il.Head(9, 0)]), "L9H0"),
        (lambda e, acts: html.subhead_values(e, []), "got an empty list"),
        (
            lambda e, acts: html.attention_patterns(["a"], torch.ones(1, 2, 2), [il.Head(0, 0)]),
            r"got \[1, 2, 2\]",
        ),
        (lambda e, acts: html.token_values(["a"], torch.ones(2, 1), ["x"]), r"got \[2, 1\]"),
        (lambda e, acts: html.head_heatmap(torch.ones(2)), r"\[layer head\], got \[2\]"),
        (
            lambda e, acts: html.head_heatmap(e, label="attention"),
            "label must be None for an explanation",
        ),
    ],
)
def test_wrong_sizes_and_heads_are_said(paper, gpt2_acts, call, message, no_type_checks):
    with pytest.raises(il.InputError, match=message):
        call(paper, gpt2_acts)


def twin(displayed):
    """Return a notebook's output without frames, scripts and styles; assert that nothing in it is
    interactive.
    """
    without = re.sub(r"<(iframe|script|style)\b.*?</\1>", "", displayed._repr_html_(), flags=re.S)
    page = Page(without)
    assert {"iframe", "script", "style", "button", "svg"}.isdisjoint(
        tag for tag, _ in page.elements
    )
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
    return page


def test_every_picture_has_a_static_twin_with_its_numbers(paper):
    report = paper.heads[0]
    strongest = max(range(14), key=lambda i: abs(report.position_increases[i]))
    value = f"“{paper.input.tokens[strongest]}” at {strongest} {signed(report.position_increases[strongest])}"
    seen = max(range(14), key=lambda i: report.attention[i])
    weight = f"“{paper.input.tokens[seen]}” at {seen} {report.attention[seen]:.3f}"
    cells = [signed(x, 2) for x in itertools.chain.from_iterable(paper.all_heads.increase)]
    expected = [
        [weight],
        ["“love” at 0 0.071"],
        [value],
        ["at 0 +1.000"],
        ["one, two, three"],
        cells,
        cells,
    ]
    for element, texts in zip(every_element(paper), expected, strict=True):
        twin_text = twin(element).text
        for text in texts:
            assert text in twin_text
            assert text in repr(element)
    whole = twin(paper).text
    assert "The model predicts foo" in whole
    for number in (*cells, *map(signed, paper.layers.attn), *map(signed, paper.layers.ffn)):
        assert number in whole
    assert [whole.count(f"{head.head} {signed(head.increase)} 0.") for head in paper.heads] == [
        1
    ] * 5
    assert command(paper) in whole


def test_comparing_ranks_heads_by_change(paper):
    increases = [list(row) for row in paper.all_heads.increase]
    increases[2][3] -= 5
    increases[0][1] += 3
    with_changes = ex.changed(paper, increase=tuple(map(tuple, increases)))
    page = Page(il.compare(paper, with_changes).to_html())
    changed = page.text[page.text.index("Heads whose increase changed most") :]
    assert re.findall(r"L\dH\d", changed)[:2] == ["L2H3", "L0H1"]
    assert "−5.000" in changed
    assert "+3.000" in changed
    assert "Both predict foo" in page.text
    assert "The same prompt, one model: tiny." in page.text
    cell = page.all("button", **{"data-head": "L2H3"})[0]
    assert float(cell["data-value"]) == pytest.approx(-5)


def test_comparing_models_of_other_shapes_and_prompts_of_other_labels(paper):
    wide = replace(ex.made(layers=3, heads=8), model="wide")
    text = Page(il.compare(paper, wide).to_html()).text
    assert "The same prompt, two models." in text
    assert "their heads do not correspond" in text
    of_other_labels = ex.made("cat : yes red : no dog :", answer="yes")
    text = Page(il.compare(paper, of_other_labels).to_html()).text
    assert "Two prompts, one model: tiny." in text
    assert "A explains foo, B explains yes" in text
    assert "–" in text[text.index("Attention to labels") :]  # A has no label “yes”
    text = Page(il.compare(ex.free(), ex.free("John met Mary", target="␣him")).to_html()).text
    assert "Two prompts, one model: tiny." in text
    assert "Attention to labels" not in text


def test_a_free_page_has_tokens_instead_of_labels():
    explanation = ex.free()
    page = Page(explanation.to_html())
    for text in ("Explained token: ␣Mary", "against ␣John", "attends most to"):
        assert text in page.text
    assert "Label" not in page.text
    assert explanation.verdict in page.text
    position, weight = explanation.heads[0].top_attended(1)[0]
    assert f"{explanation.input.token_names[position]}\u00a0{weight:.2f}" in page.text


def test_a_free_page_has_the_attention_to_all_tokens():
    explanation = ex.free()
    page = Page(explanation.to_html())
    data = json.loads(next(script for script in page.scripts if script.startswith('{"labels"')))
    assert [demo["position"] for demo in data["demos"]] == list(explanation.all_heads.positions)
    assert data["attention"][0][0] == pytest.approx(explanation.all_heads.attention[0][0], abs=1e-4)


def test_strips_of_a_free_page_have_all_tokens_and_dim_none():
    explanation = ex.free()
    source = explanation.to_html()
    strips_of_page = strips(source)
    assert strips_of_page
    for strip in strips_of_page:
        assert tuple(token for token, *_ in strip) == explanation.input.token_names
    classes = {attributes["class"] for attributes in Page(source).all("div", role="list")}
    assert classes == {"strip", "strip attention"}


@pytest.mark.parametrize(
    "element", ["attention_to_labels", "subhead_values", "words_by_position", "head_heatmap"]
)
def test_elements_of_free_text_show_its_tokens(element):
    explanation = ex.free()
    assert explanation.input.tokens[1] in str(getattr(html, element)(explanation))


def test_the_command_of_plain_text_names_its_answer():
    explanation = ex.free()
    words = shlex.split(command(explanation))
    text = explanation.input.text
    assert words[:8] == [
        "icl-lens",
        "explain",
        "--text",
        text,
        "--model",
        "tiny",
        "--answer",
        " Mary",
    ]
    assert words[8:10] == ["--against", " John"]
    ids = replace(explanation, settings=replace(explanation.settings, target=5, against=(6, 7)))
    assert "answer=5" in command(ids)
    assert "against=[6, 7]" in command(ids)


# Increase and contrast of a head, nats, and what it supports.
SUPPORTS = [
    (1.0, -2.276, "others"),  # raises both, the other label by 3.3
    (
        8.0,
        3.682,
        "answer",
    ),  # raises the others by 4.3 too, but makes the answer 40 times as likely as they are
    (0.5, 0.4, "answer"),
    (0.5, 0.2, "both"),
    (0.5, -0.4, "both"),
    (-1.0, -1.2, "others"),
    (-1.0, 2.0, "answer"),  # lowers the others more
    (-1.0, 0.2, "neither"),
]


def test_what_heads_support_is_decided_by_the_numbers(paper):
    """The page and the terminal show the same sentence."""
    n_heads = len(paper.all_heads.increase[0])
    places = [il.Head.from_index(index, n_heads) for index in range(len(SUPPORTS))]
    heads = tuple(
        replace(paper.heads[0], head=place, increase=increase, contrast=contrast)
        for place, (increase, contrast, _) in zip(places, SUPPORTS, strict=True)
    )
    layers = {"attn_contrast": paper.layers.attn, "ffn_contrast": paper.layers.ffn}
    largest = tuple(replace(part, contrast=0.1) for part in paper.subheads.largest)
    explanation = ex.changed(paper, heads=heads, largest=largest, compared_with=("bar",), **layers)
    named: dict[str, list[str]] = {}
    for place, (_, _, which) in zip(places, SUPPORTS, strict=True):
        named.setdefault(which, []).append(str(place))
    groups = {"foo": "answer", "bar": "others", "both": "both", "neither": "neither"}
    line = "; ".join(f"{name} in {joined(named[which])}" for name, which in groups.items())
    text = Page(explanation.to_html()).text
    assert line in text
    assert "contrast, nats" in text
    assert line in ex.terminal_text(explanation)


@pytest.mark.parametrize("by", ["contrast", "effect", "exchange"])
def test_heads_are_shown_by_the_score_that_ranks_them(paper, by):
    """The map's cells, the panels' text and the command have this score."""
    scores = tuple(map(tuple, (-np.array(paper.all_heads.increase)).tolist()))
    explanation = ex.changed(
        paper,
        by=by,
        heads=tuple(replace(report, **{by: -report.increase}) for report in paper.heads),
        **{by: scores},
    )
    page = Page(explanation.to_html())
    cells = [float(a["data-value"]) for a in page.all("button") if "data-value" in a]
    assert cells == pytest.approx(np.ravel(scores), rel=1e-4)
    assert html.head_heatmap(explanation).title == f"{by.capitalize()} by layer and head"
    first = explanation.heads[0]
    assert f"{by} {signed(-first.increase)}" in page.text
    assert f"the largest {by}" in page.text
    assert f"--by {by}" in command(explanation)
    assert f"by='{by}'" in command(
        replace(explanation, settings=replace(explanation.settings, n_random=3))
    )


def test_the_head_of_why_is_not_counted_among_the_largest(icl_mini):
    """Its panel has its rank among all heads, and every panel names first the score that ranks."""
    prompt = il.Prompt.parse(families.PROMPT, answer="foo")
    explanation = il.explain(icl_mini, prompt, k=2, by="increase", why="L0H0")
    increases = np.array(explanation.all_heads.increase)
    rank = 1 + int((increases > increases[0, 0]).sum())
    assert rank > 3
    text = " ".join(Page(explanation.to_html()).text.split())
    assert "The 2 heads with the largest increase, and L0H0" in text
    assert f"rank {rank} of {increases.size}: increase {signed(increases[0, 0])}, " in text
    assert f"rank 1 of {increases.size}: increase {signed(increases.max())}, " in text
    figure = il.plots.explanation_figures(explanation)["top_heads"]
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == [str(report.head) for report in explanation.heads[1::-1]]


def test_a_label_that_nothing_precedes_has_no_row_of_scores(icl_mini):
    """With the labels first, no query predicts the first one."""
    prompt = il.Prompt.parse(families.PROMPT, answer="foo")
    template = il.Template("{label} : {text}", "{text} :")
    explanation = il.explain(icl_mini, prompt, k=1, template=template)
    n_labels = len(prompt.demonstrations)
    assert explanation.input.prediction_positions[0] == -1
    table = explanation.to_frame("similarity")
    assert len(table) == n_labels**2
    assert (table["query_position"] >= 0).all()
    grid = head_contents._similarity(explanation, explanation.heads[0])["grid"]
    assert [chip.text for chip, _ in grid.rows] == [
        *(demonstration.text for demonstration in prompt.demonstrations[1:]),
        prompt.query,
    ]
    scores = table.set_index(["query_position", "key_position"])["score"].unstack()
    first = scores.iloc[0].to_numpy()  # predicts the second label
    assert grid.rows[0][1] == pytest.approx(list(first - np.delete(first, 1).mean()))


@pytest.mark.parametrize("against", [None, ["baz"], ["baz", "qux"]])
def test_notes_say_which_labels_the_answer_is_compared_with(icl_mini, against):
    labels = ("bar", "foo", "baz", "qux")
    texts = ("love", "eight", "dog", "red")
    demonstrations = list(map(il.Demonstration, texts, labels))
    prompt = il.Prompt(demonstrations, "one", "foo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        explanation = il.explain(icl_mini, prompt, k=1, by="effect", against=against)
    expected = {
        None: ("log Σ p(other labels)", "the log-odds of foo lost"),
        1: ("log p(baz)", "the log-odds of foo against baz lost"),
        2: ("log Σ p(baz, qux)", "the log-odds of foo against baz and qux lost"),
    }[against and len(against)]
    assert all(text in scores_note(explanation) for text in expected)


def located_in_terminal(explanation):
    """Return the texts under each name of the terminal's table of located heads."""
    (table, *_) = explanation_terminal._located(explanation)[0].renderables
    texts = {}
    for column in table.columns:
        texts[" ".join(str(column.header).split())] = [str(cell) for cell in column.cells]
    return texts


def located_in_markdown(explanation):
    """Return the texts under each name of Markdown's table, with three decimals."""
    section = sections.located_heads(explanation)
    texts = {}
    for column, cells in zip(section.columns, zip(*section.rows, strict=True), strict=True):
        name = column.name.removesuffix(", nats")
        texts[name] = [signed(cell) if column.is_number else cell for cell in cells]
    return texts


def located_on_page(explanation):
    """Return the texts under each name of the page's table."""
    table = head_contents.located_table(explanation)
    texts = {}
    for place, name in enumerate(table.columns):
        plain_name = "".join(map(str, name)).lstrip("#").removesuffix(", nats")
        texts[plain_name] = [getattr(row[place], "text", row[place]) for row in table.rows]
    return texts


@pytest.mark.parametrize("located_in", [located_in_terminal, located_in_markdown, located_on_page])
@pytest.mark.parametrize("by", ["contrast", "increase", "effect", "exchange"])
def test_every_number_of_the_located_heads_stands_under_its_name(paper, by, located_in):
    """Effects say what the answer loses; without them, it has a column of its own."""
    heads = []
    for place, report in enumerate(paper.heads):
        scores = {by: 9.0 + place, "contrast": 2.0 + place, "increase": 1.0 + place}
        heads.append(replace(report, **scores))
    explanation = ex.changed(paper, by=by, heads=tuple(heads))
    expected = {}
    for score in {by, "contrast", "increase"}:
        expected[score] = [signed(report.scores[score]) for report in heads]
    if by != "effect":
        losses = [signed(explanation.lost(report.ablated)) for report in heads]
        expected[lost_name(explanation)] = losses
    texts = located_in(explanation)
    assert {name: texts[name] for name in expected} == expected


def test_the_caller_names_what_a_heatmap_of_a_tensor_shows():
    """A tensor may be attention, an effect or a share: it is not called an increase, and its unit
    is not assumed.
    """
    for options, title in (
        ({}, "Values"),
        ({"label": "attention to labels"}, "Attention to labels"),
    ):
        element = html.head_heatmap(torch.tensor([[0.25, -0.5]]), **options)
        assert element.title == f"{title} by layer and head"
        source = str(element)
        assert 'aria-label="L0H1, −0.500"' in source or 'aria-label="L0H1, -0.500"' in source
        assert 'data-unit=""' in source
        assert "ncrease" not in source.partition("</style>")[2].partition("<script")[0]


def test_the_headline_follows_the_vocabulary():
    """A label at 1.8% is not what the model predicts if another token has 15.5%."""
    paper = ex.made()
    with_other_top_token = ex.changed(
        paper, log_probs=(-5.0, -4.0), next_tokens=(("␣Seoul", 0.155), ("␣foo", 0.018))
    )
    assert paper.headline == "The model predicts 'foo', correctly"
    assert (
        with_other_top_token.headline
        == "Most probable: 'Seoul' (15.5%); among the labels: 'foo' (1.8%), correctly"
    )
    assert (paper.scores.predicts_label, with_other_top_token.scores.predicts_label) == (
        True,
        False,
    )
    text = ex.terminal_text(with_other_top_token)
    assert with_other_top_token.headline in " ".join(text.split())
    assert "most probable label" in text
    assert (
        "Among the labels, both prefer foo"
        in Page(il.compare(paper, with_other_top_token).to_html()).text
    )
    assert "Both predict foo" in Page(il.compare(paper, paper).to_html()).text


def test_located_heads_are_shown_with_what_zeroing_them_does():
    """The first head adds most, but zeroing it lowers both labels alike, so the log-odds do not
    change.
    """
    paper = ex.made()
    first, second = paper.heads[:2]
    alike = tuple(x - 1.0 for x in paper.scores.log_probs)
    foo = paper.labels.index("foo")
    lowered = tuple(x - 1.5 * (i == foo) for i, x in enumerate(paper.scores.log_probs))
    layers = dict.fromkeys(("attn_contrast", "ffn_contrast"), paper.layers.attn)
    heads = (replace(first, ablated=alike), replace(second, ablated=lowered))
    explanation = ex.changed(
        paper, compared_with=("bar",), heads=heads, contrast=paper.all_heads.increase, **layers
    )
    assert [explanation.lost(report.ablated) for report in explanation.heads] == pytest.approx(
        [0.0, 1.5]
    )
    assert ex.changed(explanation, compared_with=()).lost(
        explanation.heads[0].ablated
    ) == pytest.approx(1.0)
    text = Page(explanation.to_html()).text
    assert "log-odds lost, nats" in text
    assert "+1.500" in text
    terminal = ex.terminal_text(explanation)
    assert (
        "log-odds lost: the log-odds of foo lost with this head alone zeroed at the last position"
        in terminal
    )
    rows = [
        line.split() for line in terminal.splitlines() if line.strip().startswith(str(second.head))
    ]
    assert "+1.500" in rows[0]


TABLE_TITLES = (
    "The model predicts",
    "What each layer adds",
    "Heads by",
    "Zeroing",
    "(Head, position) parts",
)
"""The beginnings of the tables of a terminal, in the order of the sections."""


def test_page_and_terminal_show_the_sections_in_the_order_of_their_list(paper):
    headings = re.findall(r'<section id="([^"]+)"><h2>([^<]+)</h2>', paper.to_html())
    expected = [(section.name, section.title) for section in SECTIONS]
    expected.remove(("demonstrations", "Demonstrations"))  # which this explanation does not have
    assert headings == expected
    text = ex.terminal_text(paper)
    places = [text.index(title) for title in TABLE_TITLES]
    assert places == sorted(places)


def test_the_sections_name_every_table_once():
    tables = [name for section in SECTIONS for name in section.tables]
    assert sorted(tables) == sorted(get_args(TableName))


@pytest.mark.parametrize("place", [0, 4, len(SECTIONS)])
def test_a_section_of_the_list_is_shown_everywhere(paper, monkeypatch, place):
    def label_lengths(reports):
        columns = (Column("label", is_number=False), Column("letters"))
        rows = tuple((label, len(label)) for label in reports.labels)
        return Section(columns=columns, rows=rows, notes=("Letters are counted.",))

    added = ExplanationSection("lengths", "Lengths of labels", view=label_lengths)
    names = [section.name for section in SECTIONS]
    expected = [*names[:place], "lengths", *names[place:]]
    expected.remove("demonstrations")  # which this explanation does not have
    monkeypatch.setattr(sections, "SECTIONS", (*SECTIONS[:place], added, *SECTIONS[place:]))
    page = paper.to_html()
    assert re.findall(r'<section id="([^"]+)">', page) == expected
    template, contents = explanation_page.page(paper)
    texts = {
        "page": Page(page).text,
        "static page": Page(templating.render_static(template, **contents)).text,
        "terminal": ex.terminal_text(paper),
        "Markdown": paper.to_markdown(),
    }
    for way, text in texts.items():
        for words in ("Lengths of labels", "letters", "Letters are counted."):
            assert words in text, way
