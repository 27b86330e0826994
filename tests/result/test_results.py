"""Every public result has the same views, and comes back from its file as it was."""

import html
import inspect
import itertools
import json
import random
import re
from dataclasses import fields
from functools import cache

import pytest
from same_values import same

import icl_lens as il
from icl_lens.report import renderers
from icl_lens.result.base import Displayed, Result

TASK = "sentiment-number"


class Made:
    """Results of icl-mini, each computed when first asked for."""

    def __init__(self, model):
        self.model, self.prompts = model, il.load_task(TASK, n=8)
        self.batch = il.tokenize(model, self.prompts)
        self.acts = il.capture(model, self.batch, writers=True)

    @cache  # noqa: B019 - lives as long as the module's fixture
    def get(self, name: str) -> Displayed:
        return MAKE[name](self)


def explained(
    made: Made, text: str = "love : bar like : bar eight : foo two : foo one :"
) -> il.results.Explanation:
    return il.explain(made.model, il.Prompt.parse(text, answer="foo"), k=3, n_random=2)


MAKE = {
    "Explanation": explained,
    "Comparison": lambda m: il.compare(
        m.get("Explanation"), explained(m, "two : foo love : bar like :")
    ),
    "ModelComparison": lambda m: il.compare_models(m.model, m.model, m.prompts),
    "TwoTowers": lambda m: il.two_towers(m.model, m.prompts, ["L5H0"], n_random=3),
    "Trace": lambda m: il.trace(m.model, m.prompts, layers=[2, 5]),
    "TopHeads": lambda m: il.top_heads(il.capture(m.model, m.batch), k=3),
    "TopSubheads": lambda m: il.top_subheads(m.acts, k=3),
    "LayerIncreases": lambda m: il.layer_log_prob_increase(m.acts),
    "HeadCopying": lambda m: il.head_copying(m.model, "L2H0", [5, 8, 13]),
    "ScoreParts": lambda m: il.attention_score_parts(m.acts, "L2H0"),
    "ScoreContrast": lambda m: m.get("ScoreParts").contrast(
        m.get("ScoreParts").of_label(m.batch.answer)
    ),
    "ValueParts": lambda m: il.value_parts(m.acts, "L2H0"),
    "QueryKeyMetric": lambda m: il.query_key_metric(m.model, "L2H0"),
    "HeadEffects": lambda m: il.head_effects(m.model, m.batch),
    "Agreement": lambda m: il.metrics.agreement(
        *(m.get("HeadEffects").log_odds[i].nan_to_num() for i in (0, 1)),
        k=4,
    ),
    "DemonstrationEffects": lambda m: il.demonstration_effects(m.model, m.batch),
    "Generations": lambda m: il.generate(
        m.model, m.batch[:2], [[], [il.Ablate(["L5H0"])]], max_new_tokens=3
    ),
    "VectorGains": lambda m: il.vector_gains(
        m.model, il.task_vectors(m.model, m.batch), m.batch, replace=True
    ),
    "HeadOverlap": lambda m: il.head_overlap(m.model, ["L5H0", "L1H2"], ["L5H0", "L5H1"]),
    "HeadToHeadEffects": lambda m: il.head_to_head_effects(m.model, m.batch, ["L5H0"], part="k"),
    "SaliencyFlow": lambda m: il.saliency_flow(m.model, m.batch[:2]),
    "ControlledAblation": lambda m: il.ablate_with_controls(m.model, m.batch, ["L5H0"], n_random=2),
    "LocatedHeads": lambda m: il.locate(m.model, m.batch, by="exchange", k=5),
    "MeanScoreParts": lambda m: il.mean_score_parts(m.model, m.prompts, heads=["L5H0"]),
    "Circuit": lambda m: il.locate_circuit(
        m.model, *il.split_by_query(il.load_task(TASK, n=24), 12), ["L5H0"], n_edges=4, n_random=3
    ),
    "HeadAtlas": lambda m: il.head_atlas(m.model, n_sequences=4, k=4),
    "RepeatedTokenScores": lambda m: il.repeated_token_scores(m.model, n=2),
    "TaskCheck": lambda m: il.task_check(m.model, TASK, n=20),
    "PairCheck": lambda m: il.task_check(
        m.model,
        [
            il.Prompt(p.demonstrations, p.query, "qux", ("foo", "bar", "qux"))
            for p in il.load_task(TASK, n=20)
        ],
    ),
}
"""How each public result is made."""

FIRST = {
    "Explanation": ["name", "contrast", "increase"],
    "Comparison": ["name", "change", "a", "b"],
    "Trace": ["site", "role", "layer"],
    "ModelComparison": ["name", "change", "low", "high"],
    "TwoTowers": ["exchanged", "predicted", "log_odds_lost", "low", "high"],
    "TopHeads": ["name", "value"],
    "TopSubheads": ["name", "position", "token", "value"],
    "LayerIncreases": ["prompt", "layer", "component", "value"],
    "HeadCopying": ["token", "own_logit", "promoted", "logit"],
    "ScoreParts": ["writer", "position", "query_side", "key_side"],
    "ScoreContrast": ["writer", "query_side", "key_side"],
    "ValueParts": ["writer", "position", "value"],
    "QueryKeyMetric": ["direction", "singular_value", "share"],
    "HeadEffects": ["name", "log_odds", "log_prob"],
    "DemonstrationEffects": ["text", "label", "hidden", "keys", "values"],
    "Generations": ["prompt", "no edits", "L5H0 zeroed"],
    "VectorGains": ["layer", "gain", "low", "high"],
    "Agreement": ["spearman", "k", "overlap", "expected_overlap"],
    "HeadOverlap": ["common", "expected", "low", "high", "p_value"],
    "HeadToHeadEffects": ["reader", "part", "writer", "log_odds", "log_prob"],
    "SaliencyFlow": ["prompt", "layer", "text_to_label", "label_to_last"],
    "ControlledAblation": ["accuracy", "log_odds", "auroc", "over_vocabulary"],
    "LocatedHeads": ["name", "score", "low", "high", "selected"],
    "MeanScoreParts": ["name", "side", "writer", "value", "low", "high"],
    "Circuit": ["edge", "effect", "low", "high", "selected"],
    "HeadAtlas": ["name", "kinds", "previous_token", "duplicate_token"],
    "RepeatedTokenScores": ["name", "induction", "previous_token"],
    "TaskCheck": ["value", "low", "high"],
    "PairCheck": ["value", "low", "high"],
}
"""The first columns of each table."""

HEADLINE = {
    "Explanation": lambda saved: f"{saved.heads[0].head} {saved.heads[0].scores['contrast']:+.3f}",
    "Comparison": lambda saved: f"{saved.to_frame()['change'][0]:+.3f}",
    "ModelComparison": lambda saved: f"{saved.a['accuracy'].mean():.1%} of 8 prompts correctly",
    "Trace": lambda saved: saved.finding,
    "TwoTowers": lambda saved: saved.verdict,
    "LayerIncreases": lambda saved: f"{saved.attn.mean(0)[0]:+.3f}",
    "ScoreParts": lambda saved: f"{saved.query_side.flatten(0, 1).mean(0).abs().max():.3f}",
    "ScoreContrast": lambda saved: f"{saved.value.mean():+.3f}",
    "ValueParts": lambda saved: f"{saved.parts.sum(1).mean(0).abs().max():.3f}",
    "HeadOverlap": lambda saved: saved.finding,
    "HeadEffects": lambda saved: f"{saved.log_odds.mean(0).max():+.3f}",
    "DemonstrationEffects": lambda saved: f"{saved.whole_log_odds.mean(0)[0]:+.3f}",
    "Generations": lambda saved: saved.texts[0][0],
    "VectorGains": lambda saved: f"{saved.to_frame()['gain'].max():+.3f}",
    "SaliencyFlow": lambda saved: f"{saved.text_to_label.mean(0)[0]:.2e}",
    "ControlledAblation": lambda saved: f"{saved.interval('heads', 'accuracy').value:.1%}",
    "MeanScoreParts": lambda saved: saved.sentence(saved.heads[0]),
    "HeadAtlas": lambda saved: saved.finding,
    "RepeatedTokenScores": lambda saved: f"{saved.induction.max():.3f}",
    "TaskCheck": str,
    "PairCheck": str,
}
"""What `print` must say, where it is not the first value of the table."""


@pytest.fixture(scope="module")
def made(icl_mini):
    return Made(icl_mini)


def test_all_public_results_are_tested():
    named = {name: getattr(il.results, name) for name in il.results.__all__}
    public = {
        name
        for name, public_object in named.items()
        if inspect.isclass(public_object) and issubclass(public_object, Displayed)
    }
    assert not any(
        inspect.isclass(public_class := getattr(il, name)) and issubclass(public_class, Displayed)
        for name in il.__all__
    )
    assert public == set(MAKE) == set(FIRST)


@pytest.mark.parametrize("name", MAKE)
def test_the_columns_that_matter_come_first_and_print_says_the_headline(made, name):
    displayed = made.get(name)
    frame, text = displayed.to_frame(), repr(displayed)
    assert list(frame.columns)[: len(FIRST[name])] == FIRST[name]
    numbers = frame.select_dtypes("floating")
    assert HEADLINE.get(name, lambda _: f"{numbers.iloc[0, 0]:+.3f}".lstrip("+"))(
        displayed
    ) in text.replace("−", "-")
    assert len(text) < 8000


PLAIN_WORDS = {
    *("demonstration", "position", "token"),
    *("head", "heads", "label", "layer", "condition", "probability", "nats", "interval"),
    *(
        "a",
        "b",
        "in",
        "of",
        "lost",
        "and",
        "mean",
        "range",
        "change",
        "without",
        "more",
        "than",
        "random",
        "points",
    ),
}
"""Words at the head of a table that say by themselves what a column is."""


@pytest.mark.parametrize(
    "name",
    [
        *(
            "Explanation",
            "Comparison",
            "ModelComparison",
            "TwoTowers",
            "ControlledAblation",
            "LocatedHeads",
        ),
        *("Circuit", "MeanScoreParts"),
    ],
)
def test_every_column_that_a_command_prints_is_defined(made, name):
    """The tables of checks have such a test beside them."""
    view = made.get(name).to_view()
    sections = [section for section in view.sections if section.is_printed]
    sentences = list(view.sentences) if name == "LocatedHeads" else []
    for section in sections:
        sentences += [section.title, *section.notes]
    defined = set(re.findall(r"[\w']+", " ".join(sentences).lower()))
    for section in sections:
        for column in section.columns:
            name_without_heads = re.sub(r"L\d+H\d+", "", column.name)
            words = set(re.findall(r"[a-z']+", name_without_heads.lower()))
            assert words - PLAIN_WORDS <= defined, column.name


PAGES_OF_THEIR_OWN = {
    "Explanation": ("contrast", "{:+.3f}".format),
    "Comparison": ("name", str),
    "ModelComparison": ("name", str),
    "TwoTowers": ("log_odds_lost", "{:+.2f}".format),
    "ControlledAblation": ("log_odds", "{:+.2f}".format),
    "Circuit": ("effect", "{:+.3f}".format),
}
"""A column of the table, and how the page writes its values; other pages show the cells that
`print` shows.
"""


def plain_text(source: str) -> str:
    """The text of HTML, with hyphens for minus signs."""
    text = html.unescape(re.sub("<[^>]*>", " ", source)).replace("\N{MINUS SIGN}", "-")
    return " ".join(text.split())


def cells_of(displayed: Displayed) -> list[str]:
    """The cells of a result's first table, as its page shows them."""
    cells = itertools.chain.from_iterable(displayed.to_view().sections[0].texts())
    return [" ".join(cell.replace("\N{MINUS SIGN}", "-").split()) for cell in cells]


@pytest.mark.parametrize("name", MAKE)
def test_pages_have_the_numbers(made, name, tmp_path):
    displayed = made.get(name)
    page = displayed.to_html()
    assert page.startswith("<!doctype html>")
    assert displayed.to_html(tmp_path / "page.html") is None
    assert (tmp_path / "page.html").read_text() == page
    if name in PAGES_OF_THEIR_OWN:
        column, form = PAGES_OF_THEIR_OWN[name]
        frame = displayed.to_frame()
        values = frame[column] if column in frame else frame.index.to_series()
        largest = values.head(3) if form is str else values.nlargest(3)
        cells = list(map(form, largest))
    else:
        cells = cells_of(displayed)
    text = plain_text(page)
    assert all(cell in text for cell in cells)
    assert all(figure.axes for figure in displayed.figures.values())


@pytest.mark.parametrize("name", MAKE)
def test_inline_output_is_a_page_or_a_table_with_the_numbers(made, name):
    displayed = made.get(name)
    inline = displayed._repr_html_()
    if type(displayed) in renderers.PAGES or displayed.to_view().sentences:
        assert "icl-lens-twin" in inline
        return
    text = plain_text(inline)
    assert all(cell in text for cell in cells_of(displayed))
    assert inline.startswith("<table>")
    assert "<script" not in inline
    assert "style>" not in inline


@pytest.mark.parametrize(
    "name", [name for name in MAKE if issubclass(getattr(il.results, name), Result)]
)
def test_a_result_comes_back_from_its_file_and_other_files_are_refused(made, name, tmp_path):
    saved, path = made.get(name), tmp_path / "result.json"
    saved.save(path)
    again = il.results.load(path)
    assert same(saved, again)
    assert repr(again) == repr(saved)
    assert again.to_html() == saved.to_html()
    state = json.loads(
        path.read_text(), parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON")
    )
    assert '"NaN"' not in path.read_text(), "null stands for a missing number"
    assert {"icl-lens", "torch"} <= state["versions"].keys()
    first = fields(type(saved))[0].name
    for change, message in [
        (
            {"version": 99},
            rf"must be {saved.version}, got 99; load it with the icl-lens version that it lists",
        ),
        (
            {"format": "icl-lens other"},
            f"is not a saved {name}; pass a file written by {name}.save",
        ),
        ({first: {"no": "such"}}, f"(?s)is damaged .*; pass a file written by {name}.save"),
    ]:
        path.write_text(json.dumps(state | change))
        with pytest.raises(il.InputError, match=message):
            type(saved).load(path)
    path.write_text('{"format": "icl-lens other"}')
    with pytest.raises(il.InputError, match="is not a saved result; pass a file"):
        il.results.load(path)
    path.write_text("{")
    with pytest.raises(il.InputError, match="not valid JSON"):
        type(saved).load(path)
    with pytest.raises(il.InputError, match="cannot read"):
        type(saved).load(tmp_path / "missing.json")


WRONG = [
    None,
    "x",
    "NaN",
    "-Infinity",
    [],
    {},
    [[]],
    True,
    -1,
    0.5,
    10**400,
    1e308,
    "float128",
    "L99H99",
]


def places(value, path=()):
    """Yield the path of every value inside a JSON value."""
    if path:
        yield path
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, entry in entries:
        yield from places(entry, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def mutated(text, rng):
    """Return a file with one value removed, replaced, doubled or exchanged for another, or with its
    end cut off.
    """
    if rng.random() < 0.1:
        return text[: rng.randrange(len(text))]
    state = json.loads(text)
    paths = [path for path in places(state) if path[0] not in ("summary", "versions")]
    # Of tensors with many values, most paths lead to a number: choose among the levels first.
    depth = rng.choice(sorted({len(path) for path in paths}))
    first, second = (rng.choice([path for path in paths if len(path) == depth]) for _ in range(2))
    holder, key = at(state, first[:-1]), first[-1]
    kind = rng.choice(["remove", "replace", "replace", "exchange", "double"])
    if kind == "remove":
        del holder[key]
    elif kind == "replace":
        holder[key] = rng.choice(WRONG)
    elif kind == "exchange":
        second_holder = at(state, second[:-1])
        holder[key], second_holder[second[-1]] = second_holder[second[-1]], holder[key]
    elif isinstance(holder, list):
        holder.insert(key, holder[key])
    return json.dumps(state)


def test_a_key_that_a_file_has_twice_is_said(made, tmp_path):
    """Python's reader keeps the last one."""
    path = tmp_path / "result.json"
    text = made.get("TopHeads").to_json()
    path.write_text(text.replace('"format":', '"format": "other", "format":', 1))
    assert path.read_text() != text
    with pytest.raises(il.InputError, match="the key 'format' occurs twice in one object"):
        il.results.load(path)


@pytest.mark.parametrize(
    "name", ["TopHeads", "HeadEffects", "LayerIncreases", "Generations", "DemonstrationEffects"]
)
@pytest.mark.parametrize("has_digest", [True, False])
def test_a_damaged_result_is_refused_or_loads_as_it_was(made, name, has_digest, tmp_path):
    """Without the digest, as in files of earlier versions, what loads can at least be shown."""
    result, path, rng = made.get(name), tmp_path / "result.json", random.Random(0)
    text = result.to_json()
    if not has_digest:
        text = json.dumps(
            {key: value for key, value in json.loads(text).items() if key != "digest"}
        )
    sentences = []
    for _ in range(60 if has_digest else 25):
        path.write_text(mutated(text, rng))
        try:
            loaded = il.results.load(path)
        except il.InputError as error:
            sentences.append(str(error))
            continue
        assert repr(loaded)
        assert loaded.to_html()
        if has_digest:
            assert same(result, loaded)
    assert len(sentences) > 10
    assert not any("\n" in sentence for sentence in sentences)
