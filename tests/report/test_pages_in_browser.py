"""Pages and notebook output in a real browser without a network: no requests, no messages, all
elements drawn.

Skipped where Chromium (Debian's `chromium`) or Playwright is missing.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import explanations as ex
import pytest
from browsers import jupyter, jupyter_home, opened, served

import icl_lens as il
from icl_lens.report import html

pytestmark = pytest.mark.slow

UNDRAWN = """[...document.querySelectorAll('.cv')].filter(
    place => !place.querySelector('.colored-tokens > span, canvas')).length"""


@pytest.fixture
def show(browser, tmp_path):
    """Return a function that opens a page's source; at the end, assert that it made no requests,
    messages or errors.
    """
    seen, contexts = [], []

    def call(source, *, width=1280, scheme="light", prepare=None):
        path = tmp_path / f"page{len(contexts)}.html"
        path.write_text(source, encoding="utf-8")
        context = opened(
            browser, viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on(
            "request",
            lambda request: seen.append(request.url) if request.url != path.as_uri() else None,
        )
        page.on("console", lambda message: seen.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: seen.append(str(error)))
        page.on(
            "dialog", lambda dialog: (seen.append(f"dialog: {dialog.message}"), dialog.dismiss())
        )
        if prepare is not None:
            prepare(page)
        page.goto(path.as_uri())
        page.wait_for_function(f"document.documentElement.dataset.ready && !{UNDRAWN}")
        return page

    yield call
    for context in contexts:
        context.close()
    assert seen == []


@pytest.fixture(scope="module")
def paper():
    return ex.made()


@pytest.fixture(scope="module")
def long():
    return ex.made(ex.long_prompt(), layers=12, heads=12, k=6, seed=4)


def joined(texts):
    """Return tokens as circuitsvis shows them, without the characters that only separate others."""
    return [text.replace("\u2060", "").replace("\u00a0", " ") for text in texts]


@pytest.mark.parametrize(
    ("which", "scheme", "width"),
    [
        ("paper", "light", 1280),
        ("paper", "dark", 400),
        ("long", "dark", 1280),
        ("long", "light", 400),
    ],
)
def test_every_element_of_the_page_is_drawn(show, request, which, scheme, width):
    explanation = request.getfixturevalue(which)
    page = show(explanation.to_html(), width=width, scheme=scheme)
    n_layers, n_heads = len(explanation.all_heads.increase), len(explanation.all_heads.increase[0])
    assert page.locator(".cells button").count() == n_layers * n_heads
    assert page.locator("figure.bars rect").count() == 2 * n_layers
    assert page.locator("mark").all_inner_texts() == [
        demonstration.label for demonstration in explanation.input.prompt.demonstrations
    ]
    for report in explanation.heads:
        page.locator(f'button[data-value][data-head="{report.head}"]').click()
        check_panel(page, report.head, explanation.input)
    # Every element has a visible size, and none exceeds the page's width.
    sizes = page.evaluate(
        "[...document.querySelectorAll('.cells button, figure.bars svg, svg.dots, table')]"
        ".filter(e => e.checkVisibility()).map(e => e.getBoundingClientRect()).map(r => [r.width, r.height])"
    )
    assert min(min(size) for size in sizes) >= 5
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    color = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert color == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 21, 23)")


def check_panel(page, head, prompt):
    """Only this head's panel is open; it has the prompt's tokens twice and a row for each label."""
    panel = page.locator(f'.panel[data-head="{head}"]')
    assert panel.is_visible()
    assert page.locator(".panel:visible").count() == 1
    strips = panel.locator(".strip")
    assert strips.count() == 2
    for strip in strips.all():
        assert strip.locator("> span").all_inner_texts() == list(prompt.tokens)
    n_labels = len(prompt.label_positions)
    assert panel.locator(".weights .bar").count() == n_labels
    assert panel.locator("table.words tbody tr").count() == n_labels


def test_a_page_opens_the_panel_of_the_head_that_is_asked_about(show, paper):
    second = paper.heads[1].head
    asked = replace(paper, settings=replace(paper.settings, why=str(second)))
    for explanation, head in ((paper, paper.heads[0].head), (asked, second)):
        page = show(explanation.to_html())
        assert page.locator(".panel:visible h3").inner_text() == str(head)


def test_a_click_on_a_head_shows_its_panel(show, paper):
    """The click is in the table of located heads or, for a head that is not located, on the map."""
    page = show(paper.to_html())
    name = str(paper.heads[3].head)
    page.locator(f'[data-show="{name}"]').click()
    assert page.locator(".panel:visible h3").inner_text() == name
    assert (
        page.locator(f'button[data-value][data-head="{name}"]').get_attribute("aria-pressed")
        == "true"
    )
    located = {report.head for report in paper.heads}
    ranked = sorted(
        (-value, layer, head)
        for layer, row in enumerate(paper.all_heads.increase)
        for head, value in enumerate(row)
    )
    rank, (minus, layer, head) = next(
        (i, entry)
        for i, entry in enumerate(ranked, 1)
        if il.Head(entry[1], entry[2]) not in located
    )
    page.locator(f'button[data-value][data-head="L{layer}H{head}"]').click()
    panel = page.locator(".panel:visible")
    assert panel.locator("h3").inner_text() == f"L{layer}H{head}"
    text = panel.inner_text()
    assert f"rank {rank} of 24" in text
    assert f"{abs(minus):.3f}" in text
    assert f"--top {rank} (k={rank} in Python)" in text
    weights = panel.locator(".weights > span:nth-child(3n)").all_inner_texts()
    assert [float(x) for x in weights] == pytest.approx(
        paper.all_heads.attention[layer][head], abs=5e-4
    )


@pytest.mark.parametrize(("width", "key"), [(1280, "ArrowRight"), (400, "ArrowDown")])
def test_the_keyboard_alone_reaches_every_head(show, paper, width, key):
    page = show(paper.to_html(), width=width)
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.cells button')"):
            break
    first = paper.heads[0].head
    focused = "document.activeElement.dataset.head"
    assert page.evaluate(focused) == str(first)
    step = key if first.layer < 5 else {"ArrowRight": "ArrowLeft", "ArrowDown": "ArrowUp"}[key]
    page.keyboard.press(step)
    following = f"L{first.layer + (1 if step == key else -1)}H{first.head}"
    assert page.evaluate(focused) == following
    assert page.locator(".readout").inner_text().startswith(following)
    page.keyboard.press("Enter")
    assert page.locator(".panel:visible h3").inner_text() == following
    page.keyboard.press("Tab")
    assert not page.evaluate(
        "document.activeElement.matches('.cells button')"
    )  # one stop for the whole map


def test_a_page_as_large_as_gpt2_large_is_drawn_in_time(show):
    meter = []

    def measure(page):
        meter.append(page.context.new_cdp_session(page))
        meter[0].send("Performance.enable", {"timeDomain": "threadTicks"})

    page = show(ex.large().to_html(), prepare=measure)
    metrics = {
        entry["name"]: entry["value"]
        for entry in meter[0].send("Performance.getMetrics")["metrics"]
    }
    assert 0 < metrics["TaskDuration"] <= 1.5  # processor seconds of the page's own thread
    assert page.locator(".cells button").count() == 720


TEXTS = [*ex.HOSTILE, "שלום", "مرحبا", "👩‍👩‍👧🏽", "<0xE2>", "\ufffd", "ï¿½", "日本", "é", "—"]


@pytest.mark.parametrize("texts", [TEXTS[:4], TEXTS[4:8], TEXTS[8:12], TEXTS[12:]], ids=" ".join)
def test_any_token_is_shown_in_its_place_and_never_run(show, texts):
    """Each text is at a label, beside another text and among words; right-to-left tokens too stay
    in the order of the positions.
    """
    first, second, third, fourth = texts
    tokens = [
        "love",
        ":",
        first,
        second,
        ":",
        third,
        fourth,
        first,
        fourth,
        "two",
        third,
        second,
        "one",
        ":",
    ]
    explanation = ex.made(tokens=tokens, words=texts)
    for page in (
        show(explanation.to_html(), width=360),
        show(str(html.attention_to_labels(explanation))),
    ):
        strips = page.locator(".panel:visible .strip, .colored-tokens")
        assert strips.count() in (2, 4)
        for strip in strips.all():
            spans = strip.locator("> span")
            assert joined(spans.all_inner_texts()) == tokens
            places = [span.bounding_box() for span in spans.all()]
            for left, right in itertools.pairwise(places):
                assert right["x"] > left["x"] or right["y"] > left["y"]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if strips.count() == 4:
            for place in (2, 3, 5, 6):
                strips.first.locator("> span").nth(place).hover()  # circuitsvis' tooltip
                assert tokens[place] in joined([page.locator("strong").inner_text()])[0]
        assert page.locator("img, iframe, .panel svg[onload], b:has-text('/b')").count() == 0


@pytest.mark.parametrize("kind", ["page", "element"])
def test_tokens_need_no_script(browser, tmp_path, paper, kind):
    """White space and tokens wider than the screen too; without script, the panels of all located
    heads are open.
    """
    tokens = [*paper.input.tokens[:11], "", " ", "long" * 40]
    explanation = ex.changed(paper, tokens=tuple(tokens), token_names=tuple(tokens))
    path = tmp_path / "page.html"
    path.write_text(
        explanation.to_html() if kind == "page" else str(html.subhead_values(explanation)), "utf-8"
    )
    context = opened(
        browser, viewport={"width": 360, "height": 900}, java_script_enabled=False, offline=True
    )
    page = context.new_page()
    page.goto(path.as_uri())
    strips = page.locator(".strip:visible")
    assert strips.count() == (10 if kind == "page" else 4)
    assert page.locator(".panel.other:visible").count() == 0
    for strip in strips.all():
        spans = strip.locator("> span")
        assert spans.all_text_contents() == [token or "∅" for token in tokens]
        boxes = [span.bounding_box() for span in spans.all()]
        assert min(box["width"] for box in boxes) >= 6
        assert max(box["x"] + box["width"] for box in boxes) <= 360
    context.close()


NOTEBOOK = """
import sys
sys.path.insert(0, {tests!r})
import explanations as ex, torch
import icl_lens as il
from icl_lens import Head
from icl_lens.report import html
model = il.load_model("icl-mini", device="cpu")
il.locate(model, il.tokenize(model, il.load_task("sentiment-number", n=4)), run=il.Run(progress=True))
e = ex.made(words=["</script><script>alert(1)</script>"])
---
e
---
html.attention_to_labels(e)
---
html.attention_patterns(e.input.tokens, torch.eye(14)[None], [Head(0, 1)])
---
html.subhead_values(e)
---
html.words_by_position(e)
---
html.head_heatmap(e)
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """Return the folder of look.ipynb, which is executed and has no trust signature."""
    pytest.importorskip("nbconvert", reason="nbconvert is missing: no notebook is drawn")
    pytest.importorskip("ipykernel", reason="ipykernel is missing: no notebook is drawn")
    import nbformat

    folder = tmp_path_factory.mktemp("notebook")
    source = NOTEBOOK.format(tests=str(Path(__file__).parents[1] / "support"))
    made = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(text.strip()) for text in source.split("---")]
    )
    nbformat.write(made, folder / "look.ipynb")
    convert(folder, "--execute", "--to", "notebook", "--inplace")
    printed = json.loads((folder / "look.ipynb").read_text())["cells"][0]["outputs"]
    assert "locating heads" in str(printed), (
        "a progress bar, and without ipywidgets no warning about it"
    )
    assert "Warning" not in str(printed)
    return folder


def convert(folder, *options):
    command = [sys.executable, "-m", "nbconvert", *options, "look.ipynb"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def test_an_executed_notebook_shows_the_same(browser, notebook):
    convert(notebook, "--to", "html")

    def answer(route):  # requests of nbconvert's own template, not of our output
        outside.append(route.request.url)
        route.abort()

    outside, problems = [], []
    context = opened(browser, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.route("http*://**", answer)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    page.goto((notebook / "look.html").as_uri())
    page.wait_for_function("document.querySelectorAll('iframe').length === 6")
    frames = [frame for frame in page.frames if frame != page.main_frame]
    assert len(frames) == 6
    assert page.locator(".icl-lens-twin").count() == 6
    assert page.locator(".icl-lens-twin:visible").count() == 0
    for frame in frames:
        frame.wait_for_function(f"document.documentElement.dataset.ready && !{UNDRAWN}")
    check_frames(frames)
    context.close()
    assert {url.split("/")[2] for url in outside} <= {"cdnjs.cloudflare.com"}
    assert not [
        problem for problem in problems if "MathJax" not in problem and "require" not in problem
    ]


def check_frames(frames):
    """The frames of the six pictures have all elements, as high as their contents; a click on a map
    opens a panel.
    """
    count = "document.querySelectorAll('{}').length"
    drawn = [frame.evaluate(count.format(".colored-tokens, canvas")) for frame in frames]
    assert drawn == [0, 4, 2, 0, 0, 0]  # by circuitsvis
    strips = [frame.evaluate(count.format(".strip")) for frame in frames]
    assert strips == [10, 0, 0, 4, 0, 10]
    # The chosen pattern must not collapse in a frame.
    large = frames[2].locator("canvas").last.bounding_box()
    assert large["width"] >= 400
    assert large["width"] == pytest.approx(large["height"], abs=2)
    for frame in frames:  # as high as its content: a notebook needs no second scroll bar
        frame.wait_for_function("document.body.getBoundingClientRect().height <= innerHeight")
    maps = frames[5]
    maps.locator("button[data-value]").first.click()
    assert maps.locator(".panel:visible h3").inner_text() == "L0H0"


def test_a_notebook_without_scripts_shows_the_static_twins(browser, notebook):
    convert(notebook, "--to", "html", "--output", "clean")
    path = notebook / "clean.html"
    # A repository's viewer removes frames, scripts and style sheets with their content, and all
    # style attributes.
    source = re.sub(
        r"<(iframe|script|style)\b.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.S
    )
    path.write_text(re.sub(r' style="[^"]*"', "", source), encoding="utf-8")
    context = opened(
        browser, viewport={"width": 1280, "height": 900}, java_script_enabled=False, offline=True
    )
    page = context.new_page()
    page.goto((notebook / "clean.html").as_uri())
    assert page.locator("iframe").count() == 0
    assert_twins(page)
    context.close()


def assert_twins(page):
    """Assert that the static versions of all six pictures show their numbers and words, and no
    source of a script.
    """
    text = " ".join(page.locator("body").inner_text().split())
    explanation = ex.made(words=["</script><script>alert(1)</script>"])
    assert text.count("Static version") == 6
    assert f"The model predicts {explanation.predicted}" in text
    for report in explanation.heads[:4]:
        strongest = max(range(14), key=lambda i: abs(report.position_increases[i]))
        value = f"{report.position_increases[strongest]:+.3f}".replace("-", "−")
        assert f"at {strongest} {value}" in text
        seen = max(range(14), key=lambda i: report.attention[i])
        assert f"“{explanation.input.tokens[seen]}” at {seen} {report.attention[seen]:.3f}" in text
    assert "</script><script>alert(1)</script>" in text
    for number in ("CircuitsVis", "DecompressionStream", "getComputedStyle", "box-sizing"):
        assert number not in text


@pytest.mark.parametrize("attribute", ["data-jp-theme-light", "class", "data-theme"])
def test_a_picture_is_dark_where_its_notebook_is(browser, tmp_path, paper, attribute):
    dark, light = {
        "data-jp-theme-light": ("false", "true"),
        "class": ("vscode-dark", "vscode-light"),
        "data-theme": ("dark", "light"),
    }[attribute]
    host = tmp_path / "host.html"
    element = html.words_by_position(paper)._repr_html_()
    host.write_text(f'<body {attribute}="{dark}">{element}</body>', encoding="utf-8")
    for scheme in ("light", "dark"):
        context = opened(browser, color_scheme=scheme, offline=True)
        page = context.new_page()
        page.goto(host.as_uri())
        frame = page.frames[1]
        frame.wait_for_function("document.documentElement.dataset.ready")
        background = "getComputedStyle(document.documentElement).backgroundColor"
        assert frame.evaluate(background) == "rgb(20, 21, 23)"
        page.evaluate(
            f"document.body.setAttribute('{attribute}', '{light}')"
        )  # the reader switches
        frame.wait_for_function(f"{background} === 'rgb(255, 255, 255)'")
        page.evaluate(
            f"document.body.removeAttribute('{attribute}')"
        )  # no theme given: as the system
        system = "rgb(20, 21, 23)" if scheme == "dark" else "rgb(255, 255, 255)"
        frame.wait_for_function(f"{background} === '{system}'")
        context.close()


# Returns pairs of boxes (lines of text, bars; clipped where they scroll) that overlap by more than
# rounding.
OVERLAPS = """() => {
  const boxes = [];
  const add = (rect, element, what, bar) => {
    let [x0, y0, x1, y1] = [rect.left, rect.top, rect.right, rect.bottom];
    for (let at = element; at !== document.documentElement; at = at.parentElement) {
      if (getComputedStyle(at).overflowX === "visible") continue;
      const r = at.getBoundingClientRect();
      [x0, y0, x1, y1] = [Math.max(x0, r.left), Math.max(y0, r.top), Math.min(x1, r.right), Math.min(y1, r.bottom)];
    }
    if (x1 - x0 > 1 && y1 - y0 > 1) boxes.push({ x0, y0, x1, y1, what, bar });
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const parent = texts.currentNode.parentElement, range = document.createRange();
    if (!texts.currentNode.data.trim() || !parent.checkVisibility() || parent.matches("script, style")) continue;
    range.selectNodeContents(texts.currentNode);
    for (const rect of range.getClientRects()) add(rect, parent, texts.currentNode.data.trim().slice(0, 30), false);
  }
  for (const bar of document.querySelectorAll(".bar, figure.bars rect, svg.dots, .scatter circle"))
    if (bar.checkVisibility()) add(bar.getBoundingClientRect(), bar, `<${bar.getAttribute("class")}>`, true);
  const found = [];
  boxes.sort((a, b) => a.y0 - b.y0);
  boxes.forEach((a, i) => {
    for (let j = i + 1; j < boxes.length && boxes[j].y0 < a.y1; j++) {
      const b = boxes[j];
      const [width, height] = [Math.min(a.x1, b.x1) - Math.max(a.x0, b.x0), Math.min(a.y1, b.y1) - b.y0];
      if (!(a.bar && b.bar) && width > 2 && height > 5) found.push([a.what, b.what, width, height]);
    }
  });
  return found;
}"""
# CSS rules of host pages that could change the output; the last are invented, and worse than those
# of any host.
HOSTS = {
    "page": None,
    "furo": """article { max-width: 46em } table { border-radius: .2rem; border-spacing: 0; border-collapse: collapse }
        table th, table td { padding: 0 .25rem; border: 1px solid; position: static } .bar { width: 300px }""",
    "jupyterlab": """.jp-RenderedHTMLCommon { padding: 9px } table { table-layout: fixed; margin: 0 auto }
        td, th { text-align: right; vertical-align: middle; padding: .5em; line-height: normal; white-space: normal;
        max-width: none; border: none } tbody tr:nth-child(odd) { background: #f5f5f5 }""",
    "hostile": "table * { position: absolute !important; left: 0 !important; padding: 0 !important }",
}


@pytest.mark.parametrize("host", HOSTS)
def test_no_text_or_bar_overlaps_another(browser, tmp_path, paper, host):
    """In a page of its own, and under the CSS rules of host pages, whose own style the output does
    not change.
    """
    contrast = {
        "compared_with": ("bar",),
        "effect": paper.all_heads.increase,
        "heads": tuple(
            replace(content, contrast=-content.increase, effect=content.increase)
            for content in paper.heads
        ),
        "attn_contrast": paper.layers.attn,
        "ffn_contrast": paper.layers.ffn,
    }
    explanation = ex.changed(paper, **contrast)
    page_makers = {"explain": explanation, "compare": il.compare(explanation, ex.made(seed=1))}
    measured = "(() => { const s = getComputedStyle(document.querySelector('#own')); return [...s].map(n => n + s[n]) })()"
    for name, width in itertools.product(page_makers, (360, 720, 1280)):
        path, rules = tmp_path / "shown.html", HOSTS[host]
        host_table = '<table><tr><td id="own">host</td></tr></table>'
        output = f'<div class="jp-RenderedHTMLCommon">{page_makers[name]._repr_html_()}</div>'
        before, after = (
            f"<style>{rules}</style><article>{host_table}{content}</article>"
            for content in ("", output)
        )
        context = opened(browser, viewport={"width": width, "height": 900}, offline=True)
        page, style = context.new_page(), ()
        for source in (page_makers[name].to_html(),) if rules is None else (before, after):
            path.write_text(f"<!doctype html><meta charset=utf-8>{source}", encoding="utf-8")
            page.goto(path.as_uri())
            style = page.evaluate(measured) if source is before else style
        frame = page.main_frame if rules is None else page.frames[1]
        frame.wait_for_function("document.documentElement.dataset.ready")
        assert frame.evaluate(OVERLAPS) == [], (name, width)
        assert frame.evaluate("document.documentElement.scrollWidth <= innerWidth")
        cut = "[...document.querySelectorAll('.scroll:has(.located)')].some(e => e.scrollWidth > e.clientWidth)"
        assert not frame.evaluate(cut), (name, width)
        assert rules is None or page.evaluate(measured) == style
        context.close()


@pytest.fixture(scope="module")
def lab(notebook, tmp_path_factory):
    """Start a dark JupyterLab with look.ipynb (trusted) and other.ipynb (the same, not trusted);
    yield its address.
    """
    command, home = jupyter("jupyter-lab"), tmp_path_factory.mktemp("home")
    environment = jupyter_home(home)
    loaded = json.loads((notebook / "look.ipynb").read_text())
    loaded["cells"][0]["source"] = ["# another\n", *loaded["cells"][0]["source"]]
    (notebook / "other.ipynb").write_text(json.dumps(loaded))
    trust = [str(Path(command[0]).with_name("jupyter-trust")), "look.ipynb"]
    subprocess.run(
        trust, cwd=notebook, env=os.environ | environment, check=True, capture_output=True
    )
    with served(command, notebook, home, **environment) as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("name", ["look.ipynb", "other.ipynb"])
def test_a_live_jupyterlab_shows_pictures_or_their_twins(browser, lab, name):
    context = opened(browser, viewport={"width": 1280, "height": 9000}, color_scheme="light")
    page = context.new_page()
    page.goto(f"{lab}/doc/tree/{name}?reset")
    page.wait_for_function("document.querySelectorAll('.icl-lens-twin').length === 6")
    page.wait_for_function("document.body.dataset.jpThemeLight === 'false'")
    frames = [frame for frame in page.frames if frame != page.main_frame]
    if name == "other.ipynb":
        assert frames == []
        assert_twins(page)
    else:
        assert len(frames) == 6
        assert page.locator(".icl-lens-twin:visible").count() == 0
        for frame in frames:
            frame.wait_for_function(f"document.documentElement.dataset.ready && !{UNDRAWN}")
            assert frame.evaluate("document.documentElement.dataset.theme") == "dark"
    context.close()
