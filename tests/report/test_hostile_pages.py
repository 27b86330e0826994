"""Texts and labels that are markup, scripts, or turn the direction of text stay text in pages of
every kind.
"""

import xml.etree.ElementTree as ElementTree
from io import BytesIO

import pytest
import torch
from browsers import chromium, opened
from small_tokenizers import tokenizer_of
from transformers import GPT2Config, GPT2LMHeadModel

import icl_lens as il
from icl_lens.report import plots
from icl_lens.report.circuit_graph import svg
from icl_lens.report.live_view.state import LiveState
from icl_lens.report.live_view.static import static_html
from icl_lens.report.renderers import page

pytestmark = pytest.mark.slow
HOSTILE = "</script><script>window.broken=1</script><img src=x onerror=window.broken=1>"
LABELS = ("<b onclick=window.broken=1>x", "\u202e]]><svg/onload=window.broken=1>")
MODEL_NAME = "<img src=x onerror=window.broken=1>"
COMMAND = f"icl-lens '{HOSTILE}' \x1b[2J"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Kind -> page, of a tiny model whose tokenizer reads any text; and the figures as SVG."""
    folder, tokenizer = tmp_path_factory.mktemp("bytes") / MODEL_NAME, tokenizer_of("byte")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_layer=3, n_head=4, n_embd=32, n_positions=1024)
    for part in (GPT2LMHeadModel(config), tokenizer):
        part.save_pretrained(folder)
    model = il.load_model(str(folder))
    texts = [HOSTILE, "&amp;\"'`", "a\u202eb", "{{ 7 * 7 }}"]
    prompts = [
        il.Prompt(
            [
                il.Demonstration(texts[n % 4], LABELS[n % 2]),
                il.Demonstration(f"{n}", LABELS[1 - n % 2]),
            ],
            f"{texts[n % 3]} {n}",
            LABELS[n % 2],
        )
        for n in range(8)
    ]
    batch = il.tokenize(model, prompts)
    about = {
        "text": HOSTILE,
        "chosen": HOSTILE,
        "behavior": HOSTILE,
        "model": HOSTILE,
        "command": COMMAND,
    }
    circuit = il.locate_circuit(model, batch[:4], batch[4:], ["L1H0"], n_edges=3, n_random=3)
    ablation = il.ablate_with_controls(model, batch, ["L1H0"], n_random=3)
    explained = [il.explain(model, prompt, k=2, n_random=2) for prompt in prompts[:2]]
    state = LiveState.of(prompts[0], heads=["L1H0"]).to_dict()
    made = {
        "explain": explained[0].to_html(),
        "compare": il.compare(*explained).to_html(),
        "models": il.compare_models(model, model, prompts).to_html(),
        "circuit": page(circuit, **about),
        "ablation": page(ablation, **about),
        "live": f"<!doctype html><meta charset=utf-8>{static_html(HOSTILE, state, {}, 'icl-live-1')}",
    }
    figures = {"circuit": svg(plots.circuit(circuit)).decode()}
    for name, figure in explained[0].figures.items():
        buffer = BytesIO()
        figure.savefig(buffer, format="svg")
        figures[name] = buffer.getvalue().decode()
    return made, figures


KINDS = ("explain", "compare", "models", "circuit", "ablation", "live")


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_text_runs_or_becomes_an_element(pages, browser, kind, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(pages[0][kind], encoding="utf-8")
    context = opened(browser, offline=True)
    view = context.new_page()
    errors = []
    view.on("pageerror", lambda error: errors.append(str(error)))
    view.goto(path.as_uri())
    assert view.evaluate("window.broken") is None
    assert view.locator("img[src=x], [onerror], [onclick], [onload], svg[onload]").count() == 0
    assert errors == []
    assert "\x1b" not in view.locator("body").inner_text() + view.content()
    assert "\u202e" not in view.locator("body").inner_text()
    context.close()


def test_hostile_texts_are_shown_as_they_are(pages):
    for kind in ("explain", "compare", "circuit", "ablation", "live"):
        assert "&lt;script&gt;window.broken=1" in pages[0][kind], kind
    assert "&lt;img src=x onerror=window.broken=1&gt;" in pages[0]["models"]


def test_figures_are_plain_drawings(pages):
    assert len(pages[1]) > 1
    for drawing in pages[1].values():
        tree = ElementTree.fromstring(drawing)
        names = {element.tag.rpartition("}")[2] for element in tree.iter()}
        assert not names & {"script", "foreignObject", "image", "a"}
        for element in tree.iter():
            assert not any(name.lower().startswith("on") for name in element.attrib)
