"""`icl-lens circuit` and its figures: tables equal Python's; resumed and distributed runs write the
same bytes.
"""

import json
import math
import signal
from dataclasses import replace
from itertools import chain, combinations

import pandas as pd
import pytest
from faults import call
from launches import LAUNCHES, contents, ended, forked, launched, stamps, undisturbed
from matplotlib.backends.backend_agg import FigureCanvasAgg
from page_elements import Page

import icl_lens as il
from icl_lens.cli import main
from icl_lens.cli.circuit import CircuitTask, EdgeOptions
from icl_lens.prompts.roles import EDGE_ROLES
from icl_lens.report import palette, plots, renderers
from icl_lens.result.number_format import signed

TASK = "sentiment-number"
N, CHUNKS, HEADS = 24, 130, ["L2H0", "L1H3"]  # `CHUNKS` prompts are more than one chunk
TABLES = ("edges", "curve", "groups", "layers", "scores")


@pytest.fixture(scope="module")
def inputs(words, tiny):
    task = [
        "circuit",
        "--task",
        TASK,
        "--path",
        words,
        "--no-check",
        "--edges",
        5,
        "--random-sets",
        3,
        "-n",
        N,
    ]
    return [*task, "--heads", ",".join(HEADS), "--model", tiny, "--device", "cpu"]


@pytest.fixture(scope="module")
def unbroken(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "out"
    return undisturbed(main, ["icl-lens", *inputs, "-n", CHUNKS, "--out", out], out)


@pytest.fixture(scope="module")
def located_circuit(gpt2, words):
    """What Python finds on the same prompts."""
    halves = CircuitTask(task=TASK, path=words, n=N).split_prompts(0)
    return il.locate_circuit(gpt2, *halves, HEADS, n_edges=5, n_random=3)


@pytest.mark.slow
def test_files_and_text_are_what_python_finds(
    inputs, located_circuit, tmp_path, monkeypatch, capsys
):
    out, page, numbers = tmp_path / "out", tmp_path / "page.html", tmp_path / "circuit.json"
    paths = ("--out", out, "--html", page, "--json", numbers)
    code, output, _ = call(monkeypatch, capsys, *inputs, *paths)
    assert code == 0
    check_tables(out, located_circuit)
    check_json(out, numbers, located_circuit)
    text, html_text = (" ".join(report.split()) for report in (output, Page(page.read_text()).text))
    label_words = "Label words: 'bar', 'foo'. They change classes from prompt to prompt."
    assert text.startswith(f"{label_words} First of {N} prompts:")
    assert ("intervals over more are narrower" in text) == located_circuit.is_undecided
    check_sentences_and_edges(text, located_circuit)
    check_sentences_and_edges(html_text, located_circuit)
    check_pictures(page.read_text(), located_circuit)


def check_tables(out, circuit):
    for name in TABLES:
        table = pd.read_parquet(out / f"{name}.parquet")
        pd.testing.assert_frame_equal(table, pd.read_csv(out / f"{name}.csv"))
        pd.testing.assert_frame_equal(table, getattr(circuit, name), rtol=1e-4, atol=1e-5)
    graph, drawn = (out / "circuit.svg").read_text(), circuit.edges.to_dict("records")
    assert len(drawn) == 5
    assert all(f"<!-- {edge['writer']} -->" in graph for edge in drawn)


def check_json(out, numbers, circuit):
    stored = json.loads((out / "result.json").read_text())
    written = json.loads(numbers.read_text())["summary"]
    assert written["sentences"] == stored["sentences"] == circuit.sentences()
    assert written["edges"] == stored["edges"]
    assert written["model"] == "gpt2"
    assert written["chosen"] == "named in --heads"
    assert written["task_check"] is None


def check_sentences_and_edges(text, circuit):
    for sentence in circuit.sentences():
        assert sentence in text
    for row in circuit.edges.to_dict("records"):
        assert row["edge"] in text
        assert f"{signed(row['low'])} … {signed(row['high'])}" in text
    mean = f"replaces what the writer wrote by its mean over tokens of the same role in {N} prompts"
    assert mean in text


def check_pictures(source, circuit):
    """The page's only links are pictures that it contains."""
    links = []
    for _, attributes in Page(source).elements:
        links += [attributes[name] for name in ("src", "href") if attributes.get(name)]
    assert links[0] == "data:,"
    assert len(links) == 2 + circuit.is_defined
    assert all(link.startswith("data:image/png;base64,") for link in links[1:])


@pytest.mark.slow
def test_heads_are_located_on_the_prompts_that_rank_edges(icl_mini, tmp_path, monkeypatch, capsys):
    """Heads are ranked by effect on the locating half; the folder refuses other heads and other
    prompts.
    """
    out, numbers = tmp_path / "out", tmp_path / "circuit.json"
    task = [
        "circuit",
        "-t",
        TASK,
        "-n",
        8,
        "--no-check",
        "--edges",
        2,
        "--random-sets",
        3,
        "--device",
        "cpu",
    ]
    code, output, _ = call(monkeypatch, capsys, *task, "-k", 2, "--out", out, "--json", numbers)
    assert code == 0
    locating, _ = CircuitTask(task=TASK, n=8).split_prompts(0)
    heads = list(map(str, il.locate(icl_mini, locating, k=2, by="effect").heads))
    assert json.loads(numbers.read_text())["readers"] == heads
    assert (
        f"{', '.join(heads)}, located by effect on 8 other prompts (with other queries)" in output
    )
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["by"], manifest["readers"], manifest["n_edges"], manifest["n_random"]) == (
        "circuit",
        heads,
        2,
        3,
    )
    ranked, tested = task.index("-n") + 1, ["--seed", 1]
    for arguments, named in (
        ([*task, "--heads", heads[0]], "readers="),
        ([*task, "-k", 2, *tested], "--seed 0"),
    ):
        code, _, output = call(monkeypatch, capsys, *arguments, "--out", out)
        assert (code, f"holds a run with {named}" in output) == (2, True), output
    code, _, output = call(monkeypatch, capsys, *task, "--reader-at", "label")
    assert (code, "--reader-at label needs --heads" in output) == (2, True), output
    task[ranked] = 7  # 8 prompts rank edges as before, 7 test them
    code, _, output = call(monkeypatch, capsys, *task, "-k", 2, "--out", out)
    assert (code, "holds a run with n=8, got n=7 (and 1 more differ)" in output) == (2, True), (
        output
    )


@pytest.mark.slow
def test_heads_act_where_reader_at_says(inputs, gpt2, words, tmp_path, monkeypatch, capsys):
    page, numbers = tmp_path / "page.html", tmp_path / "circuit.json"
    options = ["--reader-at", "label", "--edges", 2, "--html", page, "--json", numbers]
    code, output, _ = call(monkeypatch, capsys, *inputs, *options)
    halves = CircuitTask(task=TASK, path=words, n=N).split_prompts(0)
    circuit = il.locate_circuit(gpt2, *halves, HEADS, reader_at="label", n_edges=2, n_random=3)
    assert code == 0
    pd.testing.assert_frame_equal(
        il.results.Circuit.load(numbers).edges, circuit.edges, rtol=1e-4, atol=1e-5
    )
    assert circuit.edges["edge"].str.endswith(" at label").all()
    for report in (" ".join(output.split()), Page(page.read_text()).text):
        assert (
            f"With all {circuit.n_all_edges} edges into {len(HEADS)} heads at label tokens"
            in report
        )


def test_ffns_read_edges_if_named(inputs, tmp_path, monkeypatch, capsys):
    page, numbers = tmp_path / "circuit.html", tmp_path / "circuit.json"
    options = ["--ffns", "0,2", "--edges", 2, "--html", page, "--json", numbers]
    code, output, _ = call(monkeypatch, capsys, *inputs, *options)
    assert code == 0
    text = " ".join(output.split())
    assert "L2H0, L1H3, F0, F2, named in --heads, and FFNs named in --ffns" in text
    assert "into 2 heads and 2 FFNs" in text
    assert "FFNs named in --ffns" in Page(page.read_text()).text
    assert il.results.Circuit.load(numbers).readers == (*HEADS, "F0", "F2")


@pytest.mark.parametrize("named", ["x", "", "F0"])
def test_ffns_are_all_or_layers(named):
    with pytest.raises(il.InputError, match="--ffns must be all, or layers such as 0,5"):
        EdgeOptions(ffns=named).ffn_names(3)
    assert EdgeOptions(ffns="all").ffn_names(3) == ["F0", "F1", "F2"]


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(inputs, unbroken, tmp_path):
    page = tmp_path / "page.html"
    arguments = [*inputs, "-n", CHUNKS, "--out", tmp_path / "out", "--html", page]
    (run,), chunks = launched(LAUNCHES["torchrun"], arguments, tmp_path / "log")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("First of") == run.stdout.count("With all") == 1
    assert [rank for rank, _ in sorted(chunks)] == [0, 1]
    assert len({process for _, process in chunks}) == 2
    computed = sorted(chain.from_iterable(chunks.values()))
    assert computed == sorted(
        name for name in unbroken if name.startswith(("estimates-", "removals-"))
    )
    assert contents(tmp_path / "out") == unbroken
    assert page.is_file()


@pytest.mark.slow
def test_killed_runs_at_labels_write_the_same_bytes(inputs, tmp_path):
    """A run dies while it ranks edges, and again while it removes them."""
    inputs, whole, out = (
        [*inputs, "-n", CHUNKS, "--reader-at", "label"],
        tmp_path / "whole",
        tmp_path / "out",
    )
    unbroken = undisturbed(main, ["icl-lens", *inputs, "--out", whole], whole)
    expected = sorted(name for name in unbroken if name.startswith(("estimates-", "removals-")))
    files_before, processes = {}, set[int]()
    for kind in ("estimates", "removals", None):
        process = forked(
            main, ["icl-lens", *inputs, "--out", out], dies_after=1 if kind else None, kind=kind
        )
        assert ended(process) == (-signal.SIGKILL if kind else 0)
        processes.add(process)
        written = stamps(out, "*-*.parquet")
        assert files_before.items() <= written.items()
        assert (max(written), "edges.parquet" in contents(out)) == (
            f"{kind}-00000.parquet" if kind else expected[-1],
            not kind,
        )
        files_before = written
    assert len(processes) == 3
    assert contents(out) == unbroken


# Figures


def made(rows):
    """Return a circuit with these edges: reader, part, writer, role, effect, and half the width of
    its interval.
    """
    edges = pd.DataFrame(
        [
            {
                "edge": str(il.Edge(reader, part, writer, role)),
                "reader": reader,
                "part": part,
                "writer": writer,
                "role": role,
                "estimate": effect,
                "effect": effect,
                "low": effect - half,
                "high": effect + half,
                "selected": 0.875,
                "needed": effect,
                "needed_low": effect - half,
                "needed_high": effect + half,
            }
            for reader, part, writer, role, effect, half in rows
        ]
    )
    curve = {
        "kept": [1, len(rows)],
        "share": [0.01, 0.1],
        "faithfulness": [0.4, 0.9],
        "low": [0.3, 0.8],
    }
    curve |= {
        "high": [0.5, 1.0],
        "random": [0.0, 0.1],
        "random_low": [-0.1, 0.0],
        "random_high": [0.1, 0.3],
    }
    curve |= {name: [0.1, 0.1] for name in ("difference", "difference_low", "difference_high")}
    groups = {"group": ["first third → query"], "control": [0.0]}
    groups |= {
        name: [0.5]
        for name in ("effect", "low", "high", "difference", "difference_low", "difference_high")
    }
    layers = {"input": ["query"], "layer": [2], "effect": [0.5], "low": [0.4], "high": [0.6]}
    names = ["all", "none", "all − none", "largest estimate left out"]
    scores = {
        "name": names,
        "value": [2.0, 0.5, 1.5, 0.01],
        "low": [1.0, 0, 1, math.nan],
        "high": [3.0, 1, 2, math.nan],
    }
    readers = tuple(dict.fromkeys(edges["reader"]))
    return il.results.Circuit(
        readers, 100, 3, 8, 8, 4, edges, *map(pd.DataFrame, (curve, groups, layers, scores))
    )


FEW = [
    ("L3H1", "k", "F0", "label", 2.0, 0.1),
    ("L3H1", "v", "F0", "label", -1.0, 0.1),
    ("L3H1", "q", "L1H0", "last", 0.5, 0.6),
    ("L1H0", "q", "embed", "last", 0.2, 0.1),
]


def edges_drawn(ax):
    return [
        (patch.get_linewidth(), patch.get_edgecolor()[:3], patch.get_linestyle())
        for patch in ax.patches
    ]


def test_the_graph_has_widths_signs_and_intervals():
    from matplotlib.colors import to_rgb

    (ax,) = plots.circuit(made(FEW)).axes
    widths, edge_colors, styles = zip(*edges_drawn(ax), strict=True)
    blue, orange = to_rgb(palette.BLUE), to_rgb(palette.ORANGE)
    assert edge_colors == (blue, orange, blue, blue)
    assert styles in (("-", "-", "--", "-"), ("solid", "solid", "dashed", "solid"))
    assert list(widths) == sorted(widths, reverse=True)
    assert widths[0] - widths[1] == pytest.approx(2 * (widths[1] - widths[2]))  # 2, 1 and 0.5 nats
    assert len(edges_drawn(plots.circuit(made(FEW), n=2).axes[0])) == 2


def test_the_graph_has_a_node_for_each_head_layer_above_layer():
    (ax,) = plots.circuit(made(FEW)).axes
    names = [text.get_text() for text in ax.texts]
    assert names.count("L1H0") == 1  # one node, although it is a writer and a reader
    assert names.count("F0") == 1
    places = {text.get_text(): text.get_position() for text in ax.texts}
    assert places["embed"][1] < places["F0"][1] < places["L1H0"][1] < places["L3H1"][1]
    assert places["labels"][0] == places["F0"][0] < places["last\ntoken"][0]


def test_the_graph_has_readers_in_the_column_of_the_tokens_where_they_act():
    (ax,) = plots.circuit(replace(made(FEW[:2]), reader_at="label")).axes
    places = {text.get_text(): text.get_position()[0] for text in ax.texts}
    assert "last\ntoken" not in places
    assert (
        places["F0"] < places["labels"] < places["L3H1"]
    )  # the writer at labels is in the same column


def test_the_graph_has_one_port_for_an_ffn():
    rows = [("F5", "mlp_in", "L4H1", "last", 0.5, 0.1), ("L6H0", "q", "F5", "last", 0.2, 0.1)]
    names = [text.get_text() for text in plots.circuit(made(rows)).axes[0].texts]
    assert [names.count(name) for name in ("F5", "in", "q", "k", "v")] == [1, 1, 1, 1, 1]


def many():
    """Yield edges into more heads than fit next to each other, and from five writers of one role
    and layer.
    """
    for i in range(5):
        yield "L29H1", "k", f"L17H1{i}", "label", 0.1, 0.2
    for i in range(40):
        reader = f"L{(29, 29, 28, 27, 23, 20)[i % 6]}H{i % 6 + 8}"
        part = "qkv"[i % 3]
        role = "last" if part == "q" else EDGE_ROLES[i // 6 % len(EDGE_ROLES)]
        writer = f"F{i % 4}" if i % 5 else f"L{i % 3 + 17}H{10 + i % 4}"
        yield reader, part, writer, role, 1 / (1 + i), 0.1


@pytest.mark.slow
@pytest.mark.parametrize("rows", [FEW, list(many())], ids=["few", "many"])
@pytest.mark.parametrize("width", [plots.PAGE, 10.0])
def test_no_name_covers_another(rows, width):
    figure = plots.circuit(made(rows), n=50, width=width)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (ax,) = figure.axes
    boxes = [
        (text.get_text(), (text.get_bbox_patch() or text).get_window_extent(canvas.get_renderer()))
        for text in [*ax.texts, *ax.get_yticklabels(), *figure.legends[0].get_texts()]
    ]
    covered = [
        (a, b)
        for (a, first_box), (b, second_box) in combinations(boxes, 2)
        if first_box.overlaps(second_box)
    ]
    assert covered == []
    inside = figure.bbox
    assert [
        name
        for name, box in boxes
        if box.x0 < 0 or box.x1 > inside.x1 or box.y0 < 0 or box.y1 > inside.y1
    ] == []


def test_the_curve_is_the_table():
    (ax,) = plots.circuit_curve(made(FEW)).axes
    first, random, *lines = ax.lines
    assert first.get_xydata().ravel().tolist() == pytest.approx([1.0, 0.4, 10.0, 0.9])
    assert random.get_ydata().tolist() == [0.0, 0.1]
    assert [line.get_ydata()[0] for line in lines] == [0, 1]
    assert "3" in ax.get_legend().get_texts()[1].get_text()
    assert "% of 100" in ax.get_xlabel()


def test_without_an_effect_there_is_no_curve():
    without_effect = made(FEW)
    without_effect = replace(without_effect, scores=without_effect.scores.assign(low=-1.0))
    with pytest.raises(il.InputError, match="includes 0"):
        plots.circuit_curve(without_effect)
    with pytest.raises(il.InputError, match="n must be at least 1"):
        plots.circuit(without_effect, n=0)
    page = Page(without_effect.to_html())
    assert len(page.all("img")) == 1
    assert "faithfulness is not defined" in page.text
    assert "random edges" not in page.text


def test_user_text_on_the_page_stays_text():
    word = "<img src=x onerror=alert(1)>"
    page_texts = dict.fromkeys(("model", "text", "chosen", "behavior", "command"), word)
    page = Page(renderers.page(made(FEW), **page_texts))
    assert page.text.count(word) >= 5
    assert len(page.all("img")) == 2
