"""Figures: what is drawn where, with which names and units, and without pyplot."""

import base64
import io
from dataclasses import replace
from itertools import combinations, pairwise, product

import explanations as ex
import matplotlib.image
import matplotlib.pyplot
import numpy as np
import pandas as pd
import pytest
import torch
from cases import slow
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import icl_lens as il
from icl_lens.analyses.atlas.definitions import DEFINITIONS
from icl_lens.analyses.atlas.head_atlas_result import HeadAtlas
from icl_lens.analyses.atlas.head_score import HeadScore
from icl_lens.report import palette, plots

NAMES = ["L3H1", "L0H2"]


def heights(ax):
    return [bar.get_height() for bar in ax.patches]


def colors(ax):
    return [to_hex(bar.get_facecolor()).upper() for bar in ax.patches]


def test_layer_bars_average_prompts_and_color_by_sign():
    rows = [
        (0, 0, "attn", 1.0),
        (1, 0, "attn", 2.0),
        (0, 1, "attn", -1.0),
        (0, 0, "ffn", 0.5),
        (0, 1, "ffn", 0.25),
    ]
    figure = plots.layer_bars(
        pd.DataFrame(rows, columns=["prompt", "layer", "component", "increase"])
    )
    attn, ffn = figure.axes
    assert heights(attn) == [1.5, -1.0]
    assert heights(ffn) == [0.5, 0.25]
    assert colors(attn) == [palette.BLUE, palette.ORANGE]
    assert attn.get_ylim() == ffn.get_ylim()  # one scale
    assert ffn.get_xlabel() == "layer"
    assert "nats" in figure.get_supylabel()


def test_heatmap_has_layers_across_and_zero_in_the_middle():
    grid = np.array([[0.0, 1.0, -2.0], [0.5, 0.0, 0.0]])
    frame = pd.DataFrame(
        [(layer, head, grid[layer, head]) for layer, head in np.ndindex(2, 3)],
        columns=["layer", "head", "increase"],
    )
    for source in (frame.sample(frac=1, random_state=0), torch.tensor(grid), grid):
        ax, bar = plots.head_heatmap(source).axes
        image = ax.collections[0]
        assert image.get_array().tolist() == grid.T.tolist()
        assert image.get_clim() == (-2.0, 2.0)
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "head")
        assert bar.get_ylabel() == (
            "log-probability increase (nats)" if isinstance(source, pd.DataFrame) else ""
        )


def test_the_caller_names_what_a_heatmap_shows():
    """An array of any quantity is never called an increase; a table has the name of its column."""
    grid = np.array([[0.0, 1.0, -2.0]])
    table = pd.DataFrame(
        {
            "layer": [0] * 3,
            "head": range(3),
            "name": list("abc"),
            "contrast": grid[0],
            "AUROC": grid[0],
        }
    )
    named = [
        (grid, {}, ""),
        (grid, {"label": "attention"}, "attention"),
        (table, {"value": "AUROC"}, "AUROC"),
    ]
    for source, options, label in [*named, (table, {"value": "contrast"}, "contrast (nats)")]:
        assert plots.head_heatmap(source, **options).axes[1].get_ylabel() == label
    assert plots.top_head_bars(table, value="contrast").axes[0].get_xlabel() == "contrast (nats)"
    explanation = ex.made()
    ranked = ex.changed(
        explanation,
        by="contrast",
        contrast=tuple(map(tuple, (-np.array(explanation.all_heads.increase)).tolist())),
    )
    heads, top = (plots.explanation_figures(ranked)[name] for name in ("heads", "top_heads"))
    assert heads.axes[1].get_ylabel() == top.axes[0].get_xlabel() == "contrast (nats)"
    assert (
        heads.axes[0].collections[0].get_array().tolist()
        == np.transpose(ranked.all_heads.contrast).tolist()
    )


def test_top_heads_are_ordered_with_their_intervals():
    heads = pd.DataFrame(
        {
            "name": ["L0H0", "L0H1", "L5H3"],
            "increase": [0.5, -1.0, 2.0],
            "low": [0.25, -1.5, 1.0],
            "high": [1.0, 0, 4],
        }
    )
    ax = plots.top_head_bars(heads, k=2).axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "L0H0",
        "L5H3",
    ]  # upwards: best on top
    assert [bar.get_width() for bar in ax.patches] == [0.5, 2.0]
    segments = next(c for c in ax.collections if hasattr(c, "get_segments")).get_segments()
    assert [segment[:, 0].tolist() for segment in segments] == [[0.25, 1.0], [1.0, 4.0]]
    assert "nats" in ax.get_xlabel()


def test_label_attention_pairs_true_and_false():
    rows = [
        ("L3H1", True, 0.5),
        ("L3H1", True, 0.7),
        ("L3H1", False, 0.1),
        ("L0H2", True, 0.2),
        ("L0H2", False, 0.3),
    ]
    ax = plots.label_attention_bars(
        pd.DataFrame(rows, columns=["name", "is_answer", "attention"])
    ).axes[0]
    assert heights(ax) == pytest.approx([0.6, 0.2, 0.1, 0.3])
    assert [label.get_text() for label in ax.get_xticklabels()] == NAMES  # the table's order
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "true label",
        "false label",
    ]
    assert ax.get_ylabel() == "attention probability"
    lefts = [bar.get_x() for bar in ax.patches]
    assert lefts[2] == pytest.approx(lefts[0] + 0.4)  # side by side


def test_label_attention_with_intervals_and_a_group_missing_for_a_head():
    frame = pd.DataFrame(
        {
            "name": NAMES,
            "group": ["x", "y"],
            "attention": [0.5, 0.2],
            "low": [0.4, 0.1],
            "high": [0.6, 0.4],
        }
    )
    ax = plots.label_attention_bars(frame, group="group", names={"x": "first"}).axes[0]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["y", "first"]
    segments = []
    for collection in ax.collections:
        segments += [s[:, 1].tolist() for s in collection.get_segments() if len(s)]
    assert [0.4, 0.6] in [pytest.approx(s) for s in segments]


def test_scatter_draws_every_row_by_group():
    frame = pd.DataFrame(
        {"attention": [0.1, 0.5, 0.9], "increase": [-1.0, 0.0, 2.0], "name": ["a", "b", "a"]}
    )
    ax = plots.attention_scatter(frame, hue="name").axes[0]
    points = {
        c.get_label(): c.get_offsets().tolist() for c in ax.collections if c.get_label() in "ab"
    }
    assert points == {"a": [[0.1, -1.0], [0.9, 2.0]], "b": [[0.5, 0.0]]}
    assert (ax.get_xlabel(), ax.get_ylabel()) == (
        "attention probability",
        "log-probability increase (nats)",
    )
    plain = plots.attention_scatter(frame).axes[0]
    assert plain.get_legend() is None


def test_layers_have_intervals():
    rows = [(0, "attn", 1.0, 0.5, 2.0), (1, "attn", -1.0, -1.25, -0.5), (0, "ffn", 0.5, 0.25, 0.75)]
    table = pd.DataFrame(rows, columns=["layer", "component", "contrast", "low", "high"])
    figure = plots.layer_bars(table, value="contrast")
    bars = next(c for c in figure.axes[0].collections if hasattr(c, "get_segments"))
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [
        [0.5, 2.0],
        [-1.25, -0.5],
    ]
    assert figure.get_supylabel() == "contrast (nats)"


def test_models_are_compared_on_one_scale_with_intervals_and_labels_apart():
    a, b = [0.0, 1.0, 1.01, 1.0], [0.0, 0.1, 0.1, 0.12]
    change = np.subtract(b, a)
    heads = pd.DataFrame({"name": ["L0H0", "L1H1", "L2H2", "L3H3"], "a": a, "b": b})
    figure = plots.head_scatter(
        heads.assign(low=change - 0.25, high=change + 0.5), k=3, names=("x", "y"), label="z"
    )
    (ax,) = figure.axes
    assert ax.get_xlim() == ax.get_ylim()
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("x: z", "y: z")
    bars = next(c for c in ax.collections if hasattr(c, "get_segments"))
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert ends == [pytest.approx([value - 0.25, value + 0.5]) for value in b]
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert {text.get_text() for text in ax.texts} == {"L1H1", "L2H2", "L3H3"}
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in ax.texts]
    assert not any(left.overlaps(right) for left, right in combinations(boxes, 2))


def test_curves_have_bands_where_the_table_has_their_ends():
    table = pd.DataFrame(
        {
            "step": [1, 2],
            "a": [0.5, 0.75],
            "b": [0.2, 0.1],
            "a_low": [0.4, 0.5],
            "a_high": [0.6, 1.0],
        }
    )
    (ax,) = plots.curves(table, {"a": "first", "b": "second"}, x="step", label="share").axes
    assert [line.get_xydata().tolist() for line in ax.lines] == [
        [[1, 0.5], [2, 0.75]],
        [[1, 0.2], [2, 0.1]],
    ]
    assert (
        len({line.get_marker() for line in ax.lines})
        == len({line.get_color() for line in ax.lines})
        == 2
    )
    (band,) = ax.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert corners == {(1, 0.4), (1, 0.6), (2, 0.5), (2, 1.0)}
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["first", "second"]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_ylim()[0]) == ("step", "share", 0)


@pytest.fixture(scope="module")
def ablations(gpt2, gpt2_batch):
    return [
        il.ablate_with_controls(gpt2, gpt2_batch, ["L0H1", "L2H3"][:k], n_random=3) for k in (2, 1)
    ]


@pytest.mark.parametrize("measure", ["log_odds", "accuracy", "auroc"])
def test_the_ablation_curve_begins_without_ablation_and_has_a_band_of_random_sets(
    ablations, measure
):
    (ax,) = plots.ablation_curve(ablations, measure=measure).axes
    located, random = (line.get_xydata() for line in ax.lines[:2])
    assert located[:, 0].tolist() == random[:, 0].tolist() == [0, 1, 2]
    assert located[0, 1] == random[0, 1]
    for i, ablation in ((1, ablations[1]), (2, ablations[0])):
        assert located[i, 1] == pytest.approx(ablation.interval("heads", measure).value)
        if measure != "auroc":
            means = ablation.per_prompt("same layers", measure).mean(1)
            assert random[i, 1] == pytest.approx(means.mean())
            assert means.min() <= random[i, 1] <= means.max()
            heights = [y for x, y in ax.collections[1].get_paths()[0].vertices if x == i]
            assert [min(heights), max(heights)] == pytest.approx([means.min(), means.max()])
    assert ax.get_xlabel() == "heads zeroed"
    assert "3 random sets" in ax.get_legend().get_texts()[1].get_text()


def test_ablations_of_other_prompts_are_not_one_curve(ablations):
    of_other_prompts = replace(ablations[0], queries=("a", "b", "c"))
    no_random = {
        name: replace(condition, sets=(), scores=())
        for name, condition in ablations[0].conditions.items()
    }
    no_random |= {name: ablations[0].conditions[name] for name in ("no ablation", "heads")}
    for results, message in (
        ([], "at least one result"),
        ([ablations[0], of_other_prompts], "of the same prompts"),
        ([replace(ablations[0], conditions=no_random)], "n_random of at least 1"),
    ):
        with pytest.raises(il.InputError, match=message):
            plots.ablation_curve(results)


@pytest.mark.slow
@pytest.mark.parametrize("width", [plots.COLUMN, plots.PAGE])
def test_an_explanation_has_three_figures_that_fit_and_are_legible(width, tmp_path):
    explanation = ex.made(layers=36, heads=20, k=10)
    figures = plots.explanation_figures(explanation, width=width)
    assert list(figures) == ["layers", "heads", "top_heads"]
    assert matplotlib.pyplot.get_fignums() == [], "pyplot keeps what it makes, and would show it"
    for name, figure in figures.items():
        assert isinstance(figure, Figure)
        assert figure.get_size_inches()[0] == width
        figure.savefig(tmp_path / f"{name}.pdf")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        for ax in figure.axes:
            check_large_enough(ax)
            check_apart(ax, canvas.get_renderer())
    top = figures["top_heads"].axes[0]
    names = [label.get_text() for label in top.get_yticklabels()]
    assert names[::-1] == [str(report.head) for report in explanation.heads]


def check_large_enough(ax):
    labels = [*ax.get_xticklabels(), *ax.get_yticklabels(), ax.xaxis.label, ax.yaxis.label]
    assert all(label.get_fontsize() >= 6 for label in labels if label.get_text())


def check_apart(ax, renderer):
    """No label of the x axis that is within the axes lies over another."""
    boxes = []
    for label in ax.get_xticklabels():
        box = label.get_window_extent(renderer)
        center = (box.x0 + box.x1) / 2
        if label.get_text() and ax.bbox.x0 - 1 <= center <= ax.bbox.x1 + 1:
            boxes.append(box)
    assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))


def writer_rows(intervals):
    rows = [
        ("L4H0", "query", "F0", 2.0),
        ("L4H0", "query", "L1H0", -0.5),
        ("L4H0", "value", "F9", 9.0),
    ]
    rows += [
        ("L4H0", "key", "F1", 0.75),
        ("L4H0", "key", "embed", 1.5),
        ("L4H0", "key", "bias", 0.1),
    ]
    rows += [
        ("L4H0", "pair", "F0 × embed", 1.2),
        ("L4H0", "pair", "L1H0 × F1", -0.3),
        ("L4H0", "pair", "F0 × bias", 0.1),
    ]
    frame = pd.DataFrame(
        [*rows, ("L5H1", "query", "F3", 7.0)], columns=["name", "side", "writer", "value"]
    )
    return (
        frame.assign(low=frame["value"] - 0.25, high=frame["value"] + 0.25) if intervals else frame
    )


@pytest.mark.parametrize("intervals", [True, False])
def test_writers_stand_left_and_right_with_their_strongest_pairs_between(intervals, tmp_path):
    figure = plots.writer_pairs(writer_rows(intervals), name="L4H0", n=2)
    left, _, right = figure.axes
    for ax, names, values in (
        (left, ["F0", "L1H0"], [2.0, -0.5]),
        (right, ["embed", "F1"], [1.5, 0.75]),
    ):
        assert [label.get_text() for label in ax.get_yticklabels()] == names
        assert [bar.get_width() for bar in ax.patches] == values
        assert bool(ax.collections) == intervals  # error bars
    assert left.get_xlim() == right.get_xlim()[::-1]  # one scale, mirrored
    assert colors(left) == [palette.BLUE, palette.ORANGE]
    assert "L4H0" in figure.get_supxlabel()
    figure.savefig(tmp_path / "why.pdf")
    assert (tmp_path / "why.pdf").read_bytes().startswith(b"%PDF")


def test_lines_between_writers_have_the_sign_and_size_of_their_pairs():
    _, middle, _ = plots.writer_pairs(writer_rows(True), name="L4H0", n=2).axes
    lines = {tuple(line.get_ydata()): line for line in middle.lines}
    assert lines.keys() == {(0, 0), (1, 1)}  # no line to a writer that is not shown
    first, second = lines[0, 0], lines[1, 1]
    assert [first.get_color(), second.get_color()] == [palette.BLUE, palette.ORANGE]
    assert first.get_linewidth() > 2 * second.get_linewidth()


def made_atlas():
    """Return an atlas of 5 layers and 3 heads, of which one has a kind."""
    generator = torch.Generator().manual_seed(0)
    scores = {}
    for name in ("induction", "effect", "similarity"):
        scores[name] = HeadScore.of(DEFINITIONS[name], torch.rand(5, 3, generator=generator))
    p_value = torch.ones(5, 3)
    p_value[4, 1] = 1e-4
    scores["effect"] = replace(scores["effect"], kind="needed", p_value=p_value)
    scores["similarity"].mean[0, 2] = torch.nan
    return HeadAtlas("tiny", scores, {}, k=2)


def test_an_atlas_has_a_map_of_each_score_with_dots_at_named_heads():
    atlas = made_atlas()
    maps = plots.atlas(atlas).axes
    titles = [ax.get_title(loc="left").splitlines() for ax in maps]
    assert [title[0] for title in titles] == [score.title for score in atlas]
    effect = atlas["effect"]
    ends = [effect.format(float(end)) for end in (effect.mean.min(), effect.mean.max())]
    assert titles[1][1] == " … ".join(ends) + " nats"
    assert {(ax.get_xlim(), ax.get_ylim()) for ax in maps} == {((-0.5, 4.5), (2.5, -0.5))}
    assert [len(ax.collections) for ax in maps] == [1, 2, 1]
    assert maps[1].collections[1].get_offsets().tolist() == [[4, 1]]
    (only,) = plots.atlas(atlas, ["effect"]).axes
    assert only.get_title(loc="left").startswith(effect.title)


def test_maps_of_an_atlas_are_white_at_zero_or_at_chance():
    atlas = made_atlas()
    for ax, score, center in zip(plots.atlas(atlas).axes, atlas, (0, 0, 0.5), strict=True):
        drawn = ax.collections[0].get_array()
        assert np.allclose(drawn.filled(np.nan), score.mean.T - center, equal_nan=True)
        assert ax.collections[0].get_clim() == pytest.approx((-abs(drawn).max(), abs(drawn).max()))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda: plots.layer_bars(pd.DataFrame({"layer": [0]})),
            "columns 'component', 'increase', got",
        ),
        (
            lambda: plots.writer_pairs(writer_rows(False), name="L5H1"),
            "query and key parts of 'L5H1'",
        ),
        (
            lambda: plots.top_head_bars(pd.DataFrame({"name": [], "increase": []})),
            "at least one row",
        ),
        (lambda: plots.curves(pd.DataFrame({"a": [1.0]}), {}, x="a"), "at least one column"),
        (lambda: plots.head_heatmap(np.ones(3)), r"\[layer head\], got \[3\]"),
        (
            lambda: plots.attention_scatter(
                pd.DataFrame({"attention": [1.0], "increase": [1.0]}), hue="x"
            ),
            "'x', got",
        ),
    ],
)
def test_tables_that_do_not_fit_are_said(draw, message):
    with pytest.raises(il.InputError, match=message):
        draw()


def rgba(png):
    return matplotlib.image.imread(io.BytesIO(png), format="png")


@pytest.mark.parametrize(
    "name",
    ["heads", slow("layers"), slow("top_heads"), slow("attention")],
)
def test_a_notebook_shows_figures_on_any_background(monkeypatch, name):
    """In a notebook, the background is transparent and no opaque ink is near black or white; files
    do not change.
    """
    explanation = ex.made()
    if name == "attention":
        rows = [(head, which, 0.4, 0.2, 0.5) for head, which in product(NAMES, (True, False))]
        columns = ["name", "is_answer", "attention", "low", "high"]
        figure = plots.label_attention_bars(pd.DataFrame(rows, columns=columns))
    else:
        figure = explanation.figures[name]
    figure.draw_without_rendering()  # matplotlib's constrained layout moves a color bar between the first two draws
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert rgba(file.getvalue())[0, 0].tolist() == [1, 1, 1, 1]
    displayed = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: displayed.append(data))
    formatter = pytest.importorskip(
        "IPython.core.formatters", reason="IPython is missing"
    ).DisplayFormatter()
    assert formatter.format(figure) == ({}, {})
    (data,) = displayed
    assert data["text/plain"] == repr(figure)
    picture = rgba(base64.b64decode(data["image/png"]))
    assert picture[0, 0, 3] == picture[-1, -1, 3] == 0
    assert (picture[..., 3] == 0).mean() > (0.15 if name == "heads" else 0.4)
    ink = picture[picture[..., 3] > 0.99][:, :3]
    assert ink.max(axis=1).min() > 0.4, "black is lost in the dark"
    assert name == "heads" or ink.min(axis=1).max() < 0.75, "white is lost in the light"
    again = io.BytesIO()
    figure.savefig(again, format="png")
    assert np.array_equal(rgba(again.getvalue()), rgba(file.getvalue()))
