"""How results display: the right numbers in short text and HTML tables without scripts; frames hold
all rows.
"""

import re
from html import unescape

import pytest
import torch

import icl_lens as il
from icl_lens.report.html.templating import render_small_table
from icl_lens.result.number_format import signed
from icl_lens.result.tables import long_frame
from icl_lens.result.view import table_view
from icl_lens.result.view_text import plain_text


@pytest.fixture(scope="module")
def displayed(gpt2, gpt2_batch, gpt2_acts):
    targets = gpt2_batch.answer_tokens
    return {
        "layers": il.layer_log_prob_increase(gpt2_acts, targets),
        "heads": il.top_heads(gpt2_acts, targets, k=5),
        "subheads": il.top_subheads(gpt2_acts, targets, k=3),
        "effects": il.head_effects(gpt2, gpt2_batch),
    }


@pytest.mark.parametrize("name", ["layers", "heads", "subheads", "effects"])
def test_text_and_html_show_the_same_rows(displayed, name):
    result = displayed[name]
    title, header, *lines = repr(result).splitlines()
    begins = "Heads by contrast" if name == "heads" else type(result).__name__
    assert title.startswith(begins)
    html = result._repr_html_()
    tags = {"table", "caption", "thead", "tbody", "tr", "th", "td", "p"}
    assert {*re.findall(r"<(\w+)", html)} <= tags, "no script, no style sheet"
    cells = re.compile(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>")
    rows = [list(map(unescape, cells.findall(row))) for row in html.split("<tr>")[1:]]
    lines = [line for line in lines if not line.startswith("…")]
    assert [" ".join(row).split() for row in rows] == [
        header.split(),
        *[line.split() for line in lines],
    ]
    assert all(len(line) < 100 for line in repr(result).splitlines())


def test_top_heads_show_their_values(displayed):
    top = displayed["heads"]
    frame = top.to_frame()
    assert list(frame.columns) == ["name", "value", "rank", "layer", "head"]
    assert frame["value"].tolist() == top.value.tolist()
    first = repr(top).splitlines()[2].split()
    assert first == ["1", str(top.heads[0]), f"{top.value[0]:+.3f}"]
    assert f"{top.n_exact} of 12 heads evaluated, certified" in repr(top)


def test_top_subheads_name_their_tokens(displayed, gpt2_batch):
    top = displayed["subheads"]
    frame = top.to_frame()
    assert list(frame.columns) == [
        "name",
        "position",
        "token",
        "value",
        "prompt",
        "rank",
        "layer",
        "head",
    ]
    for row in frame.itertuples():
        place = row.prompt, row.rank - 1
        assert (row.layer, row.head, row.position) == (
            top.layer[place],
            top.head[place],
            top.position[place],
        )
        assert row.token == gpt2_batch.token_names[row.prompt][row.position]
        assert row.value == float(top.value[place])


def test_layers_and_effects_show_their_values(displayed):
    layers, effects = displayed["layers"], displayed["effects"]
    frame = layers.to_frame()
    row = frame[(frame["prompt"] == 1) & (frame["layer"] == 2) & (frame["component"] == "attn")]
    assert row["value"].item() == float(layers.attn[1, 2])
    assert repr(layers).splitlines()[3].split() == [
        "1",
        *[f"{x[:, 1].mean():+.3f}" for x in layers],
    ]
    frame = effects.to_frame()
    row = frame[(frame["prompt"] == 2) & (frame["name"] == "L1H3")]
    assert row["log_prob"].item() == float(effects.log_prob[2, 1, 3])
    assert row["log_odds"].item() == float(effects.log_odds[2, 1, 3])
    best = effects.top(1)[0]
    expected = [
        str(best),
        f"{effects.log_odds.mean(0)[best]:+.3f}",
        f"{effects.log_prob.mean(0)[best]:+.3f}",
    ]
    assert repr(effects).splitlines()[2].split() == expected


def test_long_results_are_cut_and_say_so():
    columns = {"token": ["<b>", "␣&"], "value": ["+1.0", "–"]}
    view = table_view("T <1>", columns, 5)
    assert plain_text(view).splitlines()[-1] == "… 3 more rows: to_frame() has all"
    html = render_small_table(view.title, view.sections[0])
    assert "<b>" not in html
    assert "&lt;b&gt;" in html
    assert "3 more rows" in html
    assert signed(float("nan")) == "–"


def test_long_frame_puts_each_value_in_its_row():
    values = torch.arange(24.0).reshape(2, 3, 4)
    frame = long_frame(values, ("prompt", "layer", "head"), value="increase")
    assert list(frame.columns) == ["prompt", "layer", "head", "name", "increase"]
    for row in frame.itertuples():
        assert row.increase == values[row.prompt, row.layer, row.head]
        assert row.name == f"L{row.layer}H{row.head}"
    frame_of_prompts = long_frame(torch.tensor([5.0, 6.0]), ["prompt"])
    assert frame_of_prompts.to_dict("list") == {"prompt": [0, 1], "value": [5.0, 6.0]}
    half = long_frame(torch.tensor([1.5], dtype=torch.bfloat16), ["prompt"])
    assert half["value"].tolist() == [1.5]
    with pytest.raises(il.InputError, match="one name per axis"):
        long_frame(values, ("prompt", "layer"))
