"""The live view in a real browser: what is edited, clicked, pinned and copied, and that no number
outlives its text.

In a page of its own, fed by the widget in this process, and in JupyterLab, Notebook 7 and marimo,
each skipped where it is missing.
"""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from browsers import PATIENCE, jupyter, jupyter_home, opened, program, served
from live_page import LivePage

import icl_lens as il

pytest.importorskip("anywidget", reason="anywidget is missing: there is no live view")
pytestmark = pytest.mark.slow

TEXT = "love : bar like : bar eight : foo two : foo one :"
HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "{{ 1 }} ${1} `",
    "\u202eone",
    "אחת",
]


@pytest.fixture(scope="module")
def model():
    return il.load_model("icl-mini")


@pytest.fixture
def opened_live(browser, model, tmp_path):
    """Return a function that opens a view; at the end, assert that the page made no requests,
    messages or errors.
    """
    seen, made = [], []

    def call(text=TEXT, *, width=1280, theme="light", heads=("L5H0",), answer="foo", atlas=None):
        view = il.live(model, il.Prompt.parse(text, answer=answer), heads=heads, atlas=atlas)
        context = opened(browser, viewport={"width": width, "height": 1000}, offline=True)
        made.append((view, context))
        page = context.new_page()
        path = tmp_path / f"live{len(made)}.html"
        page.on(
            "request",
            lambda request: (
                seen.append(request.url) if not request.url.startswith(("file:", "data:")) else None
            ),
        )
        page.on("console", lambda message: seen.append(message.text))
        page.on("pageerror", lambda error: seen.append(str(error)))
        page.on("dialog", lambda dialog: (seen.append(dialog.message), dialog.dismiss()))
        live = LivePage.open(page, view, path, theme=theme)
        live.settle()
        return live

    yield call
    for view, context in made:
        view.close()
        context.close()
    assert seen == []


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (400, "dark")])
def test_the_map_shows_a_score_of_the_atlas_until_another_is_chosen(
    model, opened_live, width, theme
):
    """With its definition, unit and outlined heads; it stays while heads are clicked."""
    atlas = il.head_atlas(model, il.load_task("sentiment-number", n=12), n_edited=12)
    live = opened_live(atlas=atlas, width=width, theme=theme)
    page, chosen = live.page, atlas["label_difference"]
    score_list = page.get_by_label("Score of the atlas")
    assert score_list.locator("option").count() == 1 + len(atlas.scores)
    score_list.select_option("label_difference")
    named = set(map(str, chosen.heads_of_kind(atlas.rate)))
    assert named
    page.locator("[data-head=L1H1]").click()
    live.settle()
    assert live.view.state.heads == ("L5H0", "L1H1")
    for head in ("L4H0", "L0H0"):
        label = page.locator(f"[data-head={head}]").get_attribute("aria-label")
        value = chosen.format(float(chosen.mean[il.Head(head)]))
        ending = f", of the kind {chosen.kind}" if head in named else ""
        assert label == f"{head}, {chosen.title} {value} {chosen.unit}{ending}"
        strength = page.locator(f"[data-head={head}]").evaluate(
            "cell => parseFloat(cell.style.getPropertyValue('--v'))"
        )
        share = float(chosen.mean[il.Head(head)].abs() / chosen.mean.abs().max())
        assert strength == pytest.approx(100 * share, abs=0.01)
    outlined = page.locator("[data-head].top")
    assert {cell.get_attribute("data-head") for cell in outlined.all()} == named
    assert chosen.definition in page.locator("body").inner_text()
    assert "From the atlas, not from this prompt." in page.locator("body").inner_text()
    page.get_by_role("button", name="increase", exact=True).click()
    live.settle()
    label = page.locator("[data-head=L4H0]").get_attribute("aria-label")
    assert "increase" in label
    assert chosen.title not in label
    assert score_list.input_value() == ""


def numbers(text):
    return [float(number.replace("−", "-")) for number in re.findall(r"[+−]\d+\.\d+", text)]


def test_edits_reorders_and_clicks_show_the_functions_numbers(model, opened_live):
    live = opened_live()
    page = live.page
    page.get_by_label("Text 1", exact=True).fill("happy")
    page.get_by_label("Move down, demonstration 1").click()
    page.get_by_label("Give the next label, demonstration 4").click()
    page.get_by_label("Remove, demonstration 3").click()
    page.get_by_label("Query").fill("nine")
    live.settle()
    assert live.view.state.demonstrations == (("like", "bar"), ("happy", "bar"), ("two", "bar"))
    # The answer foo is no label any more: the view says so and shows no number.
    assert "'foo' is not one of the labels" in page.locator(".status").inner_text()
    assert "%" not in page.locator("[aria-label=Answer][role=region]").inner_text()
    page.get_by_role("button", name="Add").click()
    page.get_by_label("Text 4").fill("three")
    page.get_by_label("Label 4").fill("foo")
    live.settle()
    prompt = il.Prompt.parse("like : bar happy : bar two : bar three : foo nine :", answer="foo")
    batch = il.tokenize(model, prompt)
    check_answer(page, batch, il.score(model, batch)[0])
    effects_on_page = [
        float(number.replace("−", "-"))
        for number in page.locator(".rows .effect").all_inner_texts()
    ]
    assert effects_on_page == pytest.approx(
        il.demonstration_effects(model, batch).log_odds[0].flatten().tolist(), abs=0.0051
    )
    acts = il.capture(model, batch)
    contrast = il.head_log_prob_increase(acts, against=batch.label_tokens[:1])[0]
    check_map(page, contrast, ("L0H4", "L7H5"))
    page.locator("[data-head=L5H0]").click()  # releases it
    page.locator("[data-head=L4H1]").click()
    page.locator("[data-head=L2H2]").click()
    live.settle()
    with il.edited(model, il.Ablate(["L4H1", "L2H2"], positions="last")):
        after = il.score(model, batch)[0]
    result = page.locator(".result").inner_text()
    assert numbers(result)[1] == pytest.approx(float(after[1] - after[0]), abs=0.0051)
    assert page.locator(".band .draw").count() == 20
    for by in ("increase", "effect", "query exchanged"):
        page.get_by_role("button", name=by, exact=True).first.click()
        live.settle()
        assert page.locator(".cells button.top").count() == 10
    effects = il.head_effects(model, batch).log_odds[0]
    page.get_by_role("button", name="effect", exact=True).click()
    live.settle()
    check_map(page, effects, ("L1H1",))


def check_answer(page, batch, scores):
    """The page shows each label's probability, and the log-odds of the second against the first."""
    table = page.locator("[aria-label=Answer][role=region]").inner_text()
    for label, score in zip(batch.labels, scores.tolist(), strict=True):
        assert re.search(rf"{label}\s+{100 * torch.tensor(score).exp().item():.1f} %", table)
    assert numbers(table)[0] == pytest.approx(float(scores[1] - scores[0]), abs=0.0051)


def check_map(page, values, heads):
    """The map of heads has these values [layer head] at some heads."""
    for head in heads:
        name = page.locator(f"[data-head={head}]").get_attribute("aria-label")
        assert numbers(name)[0] == pytest.approx(float(values[il.Head.parse(head)]), abs=0.00051)


def test_a_pin_of_another_answer_names_it_and_a_label_keeps_its_color(opened_live):
    live = opened_live()
    page = live.page
    page.get_by_role("button", name="Pin", exact=True).click()
    page.get_by_label("Answer", exact=True).first.select_option("bar")
    live.settle()
    now, pinned, *_ = page.locator("tr.outcome td").all_inner_texts()[::2]
    assert "(foo)" not in now
    assert "(foo)" in pinned
    color = page.get_by_label("Label 3").get_attribute("class")
    page.get_by_label("Label 1", exact=True).fill("")
    assert page.get_by_label("Label 3").get_attribute("class") == color
    options = page.get_by_label("Answer", exact=True).first.locator("option").all_inner_texts()
    assert options == ["as predicted", "bar", "foo"]
    page.locator("[data-head=L4H1]").hover()
    page.get_by_label("Label 1", exact=True).fill("bar")
    live.settle()
    for by in ("increase", "contrast"):
        page.get_by_role("button", name=by, exact=True).click()
        live.settle()
        told = page.locator(".readout").inner_text()  # of the head that the mouse was over last
        assert told == page.locator(f"[data-head={told.split(',')[0]}]").get_attribute("aria-label")
        assert by in told


def test_a_pinned_state_stays_and_comes_back(opened_live):
    live = opened_live()
    page, first = live.page, live.view.state
    page.get_by_role("button", name="Pin", exact=True).click()
    before = numbers(page.locator("tr.outcome").inner_text())
    page.get_by_label("Query").fill("like")
    live.settle()
    after = numbers(page.locator("tr.outcome").inner_text())
    assert after[-2:] == before[:2]  # the pinned columns
    assert after[0] != before[0]
    assert [pin["state"]["query"] for pin in live.view.pins] == ["one"]
    page.get_by_label("Return to A", exact=True).click()
    live.settle()
    assert live.view.state == first
    assert numbers(page.locator("tr.outcome").inner_text())[:2] == before[:2]
    page.get_by_label("Remove pin A").click()
    live.settle()
    assert live.view.pins == []


def test_the_copied_python_gives_the_same(opened_live, capsys):
    live = opened_live()
    page = live.page
    page.get_by_label("Query").fill("three")
    page.get_by_role("button", name="values exchanged").click()
    live.settle()
    page.get_by_role("button", name="Copy as Python").click()
    namespace = {}
    exec(page.locator("details.code pre").inner_text(), namespace)
    numbers_on_page = numbers(page.locator(".result").inner_text())
    assert numbers_on_page[:2] == pytest.approx(namespace["log_odds"][:2].tolist(), abs=0.0051)
    assert numbers_on_page[2:4] == pytest.approx(
        [float(namespace["log_odds"][2:].min()), float(namespace["log_odds"][2:].max())], abs=0.0051
    )


def test_twenty_edits_typed_fast_never_show_a_stale_number(model, opened_live):
    """After every key, and after every panel that arrives, the probability shown is that of the
    text shown, or none.
    """
    live = opened_live()
    page, query = live.page, live.page.get_by_label("Query")
    expected, n_shown = {}, 0

    def check():
        nonlocal n_shown
        text, cells = page.evaluate(
            "[document.querySelector('[aria-label=Query]').value,"
            " [...document.querySelectorAll('[aria-label=Answer] td:nth-child(2)')].map(e => e.innerText)]"
        )
        if any("%" in cell for cell in cells):
            n_shown += 1
            if text not in expected:
                batch = il.tokenize(
                    model, il.Prompt.parse(TEXT.replace("one :", f"{text} :"), answer="foo")
                )
                expected[text] = [
                    f"{100 * value:.1f} %" for value in il.score(model, batch)[0].exp().tolist()
                ]
            assert cells[:2] == expected[text], text

    words = ["two", "three", "nine", "love", "like"]
    for number in range(20):
        query.fill(" ".join([words[number % 5], *["one"] * (number // 5)]))
        for _ in range(3):
            check()
            live.pump()
            time.sleep(0.02 * (number % 4))
        check()
    live.settle()
    check()
    assert n_shown > 0
    assert live.view.state.query == "like one one one"


def test_the_keyboard_reaches_everything(opened_live):
    live = opened_live()
    page = live.page
    page.locator("[data-head=L0H0]").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.head") == "L1H1"
    assert page.locator(".readout").inner_text().startswith("L1H1")
    page.keyboard.press("Enter")
    live.settle()
    assert live.view.state.heads == ("L5H0", "L1H1")
    assert page.locator("[data-head=L1H1]").get_attribute("aria-pressed") == "true"
    page.keyboard.press("Tab")
    assert not page.evaluate(
        "document.activeElement.matches('.cells button')"
    )  # one stop for the whole map
    names = page.evaluate(
        "[...document.querySelectorAll('.icl-live :is(button, input, select, progress)')].filter(e =>"
        " !(e.getAttribute('aria-label') || e.innerText || e.labels?.length)).length"
    )
    assert names == 0


@pytest.mark.parametrize("width", [1280, 400, 360])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_is_wider_than_the_page(opened_live, width, theme):
    live = opened_live(
        "love : bar like : bar eight : foo two : foo one :", width=width, theme=theme
    )
    page = live.page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    color = page.evaluate("getComputedStyle(document.querySelector('.icl-live')).backgroundColor")
    assert color == ("rgb(255, 255, 255)" if theme == "light" else "rgb(20, 21, 23)")
    sizes = page.evaluate(
        "[...document.querySelectorAll('.cells button, .rows input')].map(e => e.getBoundingClientRect())"
        ".map(r => [r.width, r.height, r.right])"
    )
    assert min(min(size[:2]) for size in sizes) >= 9
    assert max(size[2] for size in sizes) <= width


@pytest.mark.parametrize("text", HOSTILE)
def test_any_text_is_shown_and_never_run(opened_live, text):
    live = opened_live()
    page = live.page
    page.get_by_label("Text 1", exact=True).fill(text)
    page.get_by_label("Label 2", exact=True).fill(text)
    page.get_by_label("Query").fill(text)
    live.settle()  # icl-mini does not know these words, and says so
    assert page.get_by_label("Query").input_value() == text
    assert page.locator(".icl-live img, .icl-live script").count() == 0
    assert live.view.error
    assert page.evaluate("document.title") == "live"


def test_a_state_that_python_sets_is_drawn(opened_live):
    live = opened_live()
    live.view.state = replace(live.view.state, query="nine", heads=("L3H3",), by="effect")
    live.settle()
    page = live.page
    assert page.get_by_label("Query").input_value() == "nine"
    assert page.locator("[data-head=L3H3]").get_attribute("aria-pressed") == "true"
    assert (
        page.get_by_role("button", name="effect", exact=True).get_attribute("aria-pressed")
        == "true"
    )


def test_the_first_head_clicked_is_changed_as_the_map_says(opened_live):
    live = opened_live(heads=())
    live.page.get_by_role("button", name="query exchanged", exact=True).first.click()
    live.settle()
    live.page.locator("[data-head=L4H1]").click()
    live.settle()
    assert (live.view.state.heads, live.view.state.change) == (("L4H1",), "query")
    cost = live.view.numbers["exchange"]["exchange"][4][1]
    change = live.view.numbers["change"]
    assert change["before"] - change["after"] == pytest.approx(cost, abs=1e-5)


def test_labels_have_the_colors_of_the_static_version(opened_live):
    """The first demonstration shows foo, which is the second label."""
    live = opened_live("eight : foo two : foo love : bar one :")
    assert [
        live.page.get_by_label(f"Label {n}", exact=True).get_attribute("class") for n in (1, 3)
    ] == [
        "label l1",
        "label l0",
    ]
    assert live.view.numbers["answer"]["labels"] == ["bar", "foo"]


def test_nothing_moves_while_numbers_are_awaited(opened_live):
    live = opened_live()
    page = live.page
    fixed_elements = [page.get_by_role("button", name="Copy as Python"), page.locator(".columns")]
    places = [element.bounding_box() for element in fixed_elements]
    page.get_by_label("Query").fill("nine")
    assert page.locator(".icl-live").get_attribute("aria-busy") == "true"
    assert page.locator(".strip").count() == 0  # its numbers are gone
    assert [element.bounding_box() for element in fixed_elements] == places


def test_verdicts_are_those_of_the_numbers(opened_live):
    """On made-up numbers: below, within and above the random sets, and a model that is broken."""
    live = opened_live()
    page, made = live.page, live.view._change
    draws = [1.0 + number / 10 for number in range(20)]

    def told(**changes):
        page.evaluate(
            "value => receive('_change', value)", made | {"before": 2.0, "draws": draws} | changes
        )
        return page.locator(".result").inner_text()

    for after, verdict in ((1.0, "within"), (2.9, "within"), (0.99, "below"), (2.91, "above")):
        assert f"L5H0 is {verdict} this band" in told(after=after)
    assert "With 7 random heads changed alike: +1.00 to +2.90;" in told(controls="7 random heads")
    assert "broken" not in told(labels_total=0.051)
    assert "only 4.9 % now: the model is broken" in told(labels_total=0.049)
    assert told(text="another", after=0.5) == "…"  # of another text


def test_reasons_of_a_head_that_hardly_attends_to_labels_say_so(opened_live):
    """On made-up numbers: the attention at which the sentence begins, and the example of an FFN's
    name.
    """
    live = opened_live()
    page, made = live.page, live.view._attention
    why = {
        "difference": 1.0,
        "query": [["L1H0", 1.0]],
        "key": [["L2H0", 1.0]],
        "because": "L1H0 (+1.00)",
    }

    def told(total, **changes):
        weights = [[total / 4] * 4]
        page.evaluate(
            "value => receive('_attention', value)",
            made | {"to_labels": weights, "why": why | changes},
        )
        return page.locator(".attention").inner_text()

    assert "of its attention" not in told(0.051)
    assert "All labels together get only 4.9 % of its attention" in told(0.049)
    assert "is FFN" not in told(0.5)
    assert "F7 is FFN 7." in told(0.5, key=[["F7", 1.0]])


# ---- Notebooks ----

CELL = """import icl_lens as il
model = il.load_model("icl-mini")
view = il.live(model, "love : bar like : bar eight : foo two : foo one :", heads=["L5H0"])
view"""


def run_cell(page):
    """Run the first cell once the kernel takes it."""
    for _ in range(60):
        page.locator(".jp-CodeCell .cm-content").first.click()
        page.keyboard.press("Control+Enter")
        page.wait_for_timeout(2000)
        if page.locator(".jp-InputPrompt").first.inner_text().strip() != "[ ]:":
            return
    pytest.fail("the kernel does not run the cell")


def change_query_and_heads(page, model):
    """Edit and click; assert that the number shown is that of the same edit in a block."""
    page.wait_for_selector(".icl-live[aria-busy=false]", timeout=PATIENCE)
    page.get_by_label("Query").fill("three")
    page.locator("[data-head=L4H1]").click()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector(".icl-live[aria-busy=false]", timeout=PATIENCE)
    assert page.locator("[data-head=L5H1]").get_attribute("aria-pressed") == "true"
    batch = il.tokenize(
        model, il.Prompt.parse("love : bar like : bar eight : foo two : foo three :", answer="foo")
    )
    with il.edited(model, il.Ablate(["L5H0", "L4H1", "L5H1"], positions="last")):
        after = il.score(model, batch)[0]
    numbers_on_page = numbers(page.locator(".result").inner_text())
    assert numbers_on_page[1] == pytest.approx(float(after[1] - after[0]), abs=0.0051)


def exchange_values(page):
    """Exchange the values of the chosen heads, then all labels; assert that the numbers shown are
    those of the Python that the page gives.
    """
    for button in ("values exchanged", "Exchange labels"):
        page.get_by_role("button", name=button).click()
        page.wait_for_selector(".icl-live[aria-busy=false]", timeout=PATIENCE)
        page.get_by_role("button", name="Copy as Python").click()
        namespace = {}
        exec(page.locator("details.code pre").inner_text(), namespace)
        log_odds = namespace["log_odds"][:2].tolist()
        shown_numbers = numbers(page.locator(".result").inner_text())
        assert shown_numbers[:2] == pytest.approx(log_odds, abs=0.0051), button


@pytest.mark.parametrize(
    ("app", "place"),
    [
        ("jupyter-lab", "doc/tree/{}?reset"),
        pytest.param("jupyter-notebook", "notebooks/{}", marks=pytest.mark.rotating),
    ],
)
def test_jupyter_edits_and_a_reopened_notebook_shows_the_last_state(
    browser, model, tmp_path, app, place
):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is missing: no notebook is drawn")
    command, home, folder = jupyter(app), tmp_path / "home", tmp_path / "notebooks"
    home.mkdir()
    folder.mkdir()
    look, kernel = (
        folder / "look.ipynb",
        {"name": "python3", "display_name": "Python 3", "language": "python"},
    )
    cells = [nbformat.v4.new_code_cell(CELL)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), look)
    with served(command, folder, home, **jupyter_home(home)) as address:
        context = opened(browser, viewport={"width": 1280, "height": 1400})
        page = context.new_page()
        page.goto(f"{address}/{place.format('look.ipynb')}")
        run_cell(page)
        change_query_and_heads(page, model)
        static = page.locator("[id^=icl-live-]")
        assert static.count() == 1
        assert not static.is_visible()
        # Enter and arrows in the view move no cell, and Ctrl+S saves.
        assert page.locator(".jp-CodeCell").count() == 1
        page.keyboard.press("Control+s")
        for _ in range(120):
            saved = json.loads(look.read_text())
            if "L5H1" in str(saved["cells"][0]["outputs"]):
                break
            page.wait_for_timeout(500)
        else:
            pytest.fail("the static version was not saved")
        context.close()
        # Another notebook with the same output: no kernel, not trusted.
        saved["cells"][0]["source"] = "# another\n" + "".join(saved["cells"][0]["source"])
        (folder / "reopened.ipynb").write_text(json.dumps(saved))
        context = opened(browser, viewport={"width": 1280, "height": 1400})
        page = context.new_page()
        page.goto(f"{address}/{place.format('reopened.ipynb')}")
        page.wait_for_selector("text=Last state; run the cell for the live view.")
        text = page.locator(".jp-OutputArea").first.inner_text()
        assert "L5H0, L4H1, L5H1 removed at the last position" in text
        assert "Query: three" in text
        assert page.locator(".icl-live").count() == 0
        context.close()


def test_marimo_edits_too(browser, model, tmp_path):
    path = program("marimo")
    if path is None:
        pytest.skip("marimo is missing: no live notebook is drawn")
    cell = "".join(f"    {line}\n" for line in CELL.splitlines())
    source = f"import marimo\napp = marimo.App()\n@app.cell\ndef _():\n{cell}    return\n"
    (tmp_path / "app.py").write_text(source)
    command = [path, "run", "app.py", "--headless", "--no-token", "-p", "{port}"]
    with served(command, tmp_path, tmp_path) as address:
        context = opened(browser, viewport={"width": 1000, "height": 1400})
        page = context.new_page()
        page.goto(address)
        change_query_and_heads(page, model)
        context.close()


def test_the_command_serves_a_view_per_tab_and_ends_with_ctrl_c(browser, model, tmp_path):
    """Two tabs edit apart from each other; who has no token sees nothing; hostile texts stay
    text.
    """
    pytest.importorskip("marimo", reason="marimo is missing: no page is served")
    command = [sys.executable, "-m", "icl_lens", "live", "--no-open", "--heads", "L5H0"]
    server = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        address = server.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?access_token=\S{32}", address)
        context = opened(browser, viewport={"width": 1000, "height": 1400})
        requested, dialogs = [], []
        context.on("request", lambda request: requested.append(request.url))
        context.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        first, second = context.new_page(), context.new_page()
        for page in (first, second):
            page.goto(address)
        change_query_and_heads(first, model)
        exchange_values(first)
        second.wait_for_selector(".icl-live[aria-busy=false]")
        second.get_by_label("Query").fill(HOSTILE[0])
        second.wait_for_selector(".icl-live[aria-busy=false]")
        assert second.get_by_label("Query").input_value() == HOSTILE[0]
        assert first.get_by_label("Query").input_value() == "three"
        assert second.locator("[data-head=L5H1]").get_attribute("aria-pressed") == "false"
        assert dialogs == []
        local = ("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:")
        assert [url for url in requested if not url.startswith(local)] == []
        context.close()
        stranger = opened(browser)
        page = stranger.new_page()
        page.goto(address.partition("?")[0])
        page.wait_for_load_state("networkidle")
        assert page.locator(".icl-live").count() == 0
        assert page.locator("input[type=password]").count() == 1
        stranger.close()
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.stdout.close()
        server.wait(30)
