"""The neighbours' claims: on made-up tables both ways, by hand on a tiny model, and where a simpler rule is wrong."""

import json
from typing import Any

import families
import numpy as np
import pandas as pd
import pytest
import torch
from test_effects import hf_twin

import icl_lens as il
from experiments.claims import anchors, function_vectors, induction, vectors_added
from experiments.claims.queries import labels_shuffled, relabelled
from experiments.lab.editing import located_for_both
from experiments.lab.frames import stack, where
from experiments.lab.repeats import random_tokens, repeat_scores
from experiments.lab.study import RANKINGS, Study, StudySettings, Variant
from icl_lens.interventions.saliency import KINDS

N = 200
OUTCOMES = ["supported", "not supported", "undecided"]


def values(mean: float, spread: float = 0.02, seed: int = 0) -> np.ndarray:
    """N values whose mean is exactly `mean`."""
    noise = np.random.default_rng(seed).normal(0, spread, N)
    return mean + noise - noise.mean()


def rows(value: np.ndarray, **axes: object) -> pd.DataFrame:
    """N prompts, four about each word."""
    return pd.DataFrame({"prompt": range(N), "query": np.arange(N) % 50, "value": value}).assign(**axes)


def anchors_table(
    gather: float = 0.5,
    read: float = 0.5,
    elsewhere: float = 0.05,
    random: float = 0.02,
    salient: float = 5.0,
    spread: float = 0.2,
) -> pd.DataFrame:
    """Four nats of log-odds, of which cuts take these shares; the flows `salient` times as salient as what is beside.

    Where they are not said to be, flows have no saliency at all.
    """
    parts = [rows(values(4.0, spread), measure="odds", cut="none", edges="", half="")]
    for flow, (own_half, beside) in anchors.FLOWS.items():
        for half, other in anchors.OTHER.items():
            taken = {"text_to_label": gather, "label_to_last": read}[flow] if half == own_half else elsewhere
            for cut, share in (("own", taken), ("random", random)):
                odds = values(4.0 * (1 - share), spread, len(parts))
                parts.append(rows(odds, measure="odds", cut=cut, edges=flow, half=half))
            here = salient if half == own_half else 0.0
            for kind, size in ((flow, here), (beside, 1.0)):
                found = np.abs(values(1e-3 * size, 1e-4 * size, len(parts)))
                parts.append(rows(found, measure="saliency", cut="none", edges=kind, half=half))
            parts.append(rows(values(1e-3, 1e-4), measure="saliency", cut="none", edges="rest", half=half))
            assert other != half
    layer = {"shallow": 0, "deep": 1, "": -1}
    return stack(*(part.assign(layer=part["half"].map(layer), answer="foo") for part in parts))


def vectors_table(
    effect: float, located: float, random: float = 0.0, spread: float = 0.2, tilt: float = 0.0
) -> pd.DataFrame:
    """Sixty words of either class; demonstrations give 4 nats. `tilt`: what all vectors give to the true class's label.

    The other assignment of labels is left out, so that only the balance of classes stands against a tilt.
    """
    means = {"none": 0.0, "demonstrations": 4.0, "effect": effect, "located": located, vectors_added.LABELS: 0.0}
    means |= dict.fromkeys(vectors_added.BESIDE.values(), random)
    means |= dict.fromkeys(vectors_added.SHUFFLED.values(), 0.0)
    parts = []
    for group, mean in means.items():
        for true, count in ((True, 45), (False, 15)):
            noise = np.random.default_rng(len(parts)).normal(0, spread, count)
            push = 0.0 if group in ("none", "demonstrations") else tilt if true else -tilt
            odds = mean + push + noise - noise.mean()
            number = np.arange(count) + 100 * (not true)
            frame = pd.DataFrame({"prompt": number, "query": number, "odds": odds, "log_prob": odds - 5})
            frame = frame.assign(right=(odds > 0).astype(float), first=0.0, true=true, layer=1, true_label="foo")
            parts.append(frame.assign(labels=vectors_added.OWN, group=group, name=group))
    return stack(*parts)


def induction_table(scores: dict[str, float], located: set[str], spread: float = 0.02) -> pd.DataFrame:
    """Heads with these mean scores."""
    parts = []
    for i, (name, mean) in enumerate(scores.items()):
        layer = int(name[1])
        group = "located" if name in located else "random"
        parts.append(rows(values(mean, spread, i), name=name, layer=layer, head=int(name[3]), group=group))
    table = stack(*parts)
    return table.assign(query=table["prompt"])


BEST = {"L0H0": 0.1, "L0H1": 0.1, "L0H2": 0.1, "L1H0": 0.9, "L1H1": 0.8, "L1H2": 0.1, "L1H3": 0.1}

CASES: dict[Any, list[pd.DataFrame]] = {
    anchors: [anchors_table(), anchors_table(read=0.02), anchors_table(read=0.1)],
    function_vectors: [vectors_table(2.0, 2.5), vectors_table(2.0, 0.4), vectors_table(2.0, 1.2)],
    induction: [
        induction_table(BEST, {"L1H0", "L1H1"}),
        induction_table(BEST, {"L0H0", "L1H2"}),
        induction_table({name: score / 3 for name, score in BEST.items()}, {"L1H0", "L1H1"}),
    ],
}


@pytest.mark.parametrize("module", CASES, ids=lambda module: module.__name__.split(".")[-1])
def test_all_three_outcomes(module) -> None:
    found = [module.EXPERIMENT.verdict(table) for table in CASES[module]]
    assert [one.outcome for one in found] == OUTCOMES, [one.reason for one in found]
    assert module.EXPERIMENT.figure(CASES[module][0]).axes


# Anchors


@pytest.mark.parametrize(
    "population",
    [
        {"random": 0.6},  # any tokens matter as much
        {"elsewhere": 0.6},  # the flows are everywhere
        {"salient": 1.0},  # labels are as other tokens
        {"gather": 0.02},  # nothing is gathered at labels
    ],
)
def test_labels_that_are_like_other_tokens_are_no_anchors(population: dict[str, float]) -> None:
    assert anchors.EXPERIMENT.verdict(anchors_table(**population)).outcome == "not supported"


def test_flows_of_one_depth_are_not_told_apart_by_the_last_layers_saliency() -> None:
    """In deep layers labels' saliency to the last position exceeds that of texts to labels in any model."""
    table = anchors_table(salient=1.0)
    deep = where(table, measure="saliency", half="deep")
    mean = deep.groupby("edges")["value"].mean()
    assert mean["label_to_last"] > mean["text_to_label"]
    assert anchors.EXPERIMENT.verdict(table).outcome == "not supported"


def test_cut_edges_are_the_flows_or_as_many_other_tokens(gpt2) -> None:
    batch = il.tokenize(gpt2, [il.Prompt.parse("the cat : foo dog : bar one :"), il.Prompt.parse("love : foo two :")])
    #  0 the, 1 cat, 2 :, 3 foo, 4 dog, 5 :, 6 bar, 7 one, 8 :
    into = anchors.cut_edges(batch, "text_to_label", None)
    assert {tuple(edge) for edge in into[0].nonzero().tolist()} == {(i, j) for i in (3, 6) for j in range(i)}
    onto = anchors.cut_edges(batch, "label_to_last", None)
    assert {tuple(edge) for edge in onto[0].nonzero().tolist()} == {(8, 3), (8, 6)}
    assert {tuple(edge) for edge in onto[1].nonzero().tolist()} == {(4, 2)}
    drawn = set()
    for seed in range(30):
        rng = torch.Generator().manual_seed(seed)
        other = anchors.cut_edges(batch, "text_to_label", rng)[0]
        queries = other.any(1).nonzero().flatten().tolist()
        assert len(queries) == 2
        assert not {*queries} & {0, 3, 6, 7, 8}
        assert all(other[i].nonzero().flatten().tolist() == list(range(i)) for i in queries)
        keys = anchors.cut_edges(batch, "label_to_last", rng)[0]
        assert keys.any(1).nonzero().flatten().tolist() == [8]
        drawn |= {*keys[8].nonzero().flatten().tolist()}
        assert int(keys.sum()) == 2
    assert drawn == {1, 2, 4, 5, 7}


def test_halves_share_no_layer() -> None:
    assert {name: [*layers] for name, layers in anchors.halves_of(5).items()} == {"shallow": [0, 1], "deep": [3, 4]}
    assert [*anchors.halves_of(1)["deep"]] == []


# Function vectors


def test_a_vector_that_says_one_label_gives_nothing() -> None:
    """Three in four words are of the true class: on average over words, saying its label gives back two nats."""
    table = vectors_table(0.0, 0.0, tilt=4.0)
    assert where(table, group="effect")["odds"].mean() == pytest.approx(2.0)
    found = function_vectors.EXPERIMENT.verdict(table)
    assert found.outcome == "not supported"
    assert found.effect == pytest.approx(0.0, abs=0.01)


def test_random_heads_that_give_as_much_refute_it() -> None:
    assert function_vectors.EXPERIMENT.verdict(vectors_table(1.6, 1.6, random=2.0)).outcome == "not supported"


def test_demonstrations_that_give_nothing_leave_it_open() -> None:
    table = vectors_table(2.0, 2.0)
    table.loc[table["group"] == "demonstrations", "odds"] -= 4.0
    assert function_vectors.EXPERIMENT.verdict(table).outcome == "undecided"


@pytest.fixture(scope="module")
def study(gpt2, tmp_path_factory) -> Study:
    path = tmp_path_factory.mktemp("words") / "words.json"
    categories = {
        "sentiment": ["love", "like", "hate", "happy", "sad", "good", "bad"],
        "number": ["eight", "two", "one", "nine", "three", "w40", "w41"],
    }
    path.write_text(json.dumps({"categories": categories}))
    return Study(gpt2, StudySettings(model="tiny", n=16, path=str(path)))


def test_vectors_are_those_of_the_library_and_added_where_they_say(study) -> None:
    config = vectors_added.FunctionVectorsConfig(heads=1, random_sets=1, prompts=4)
    effect = vectors_added.Added("effect", "effect")
    sets = {effect: [il.Head(0, 1), il.Head(2, 3)]}
    labels = ("bar", "foo")
    own = vectors_added._vectors(study, config, sets, labels)
    kept = study.apart[0][:4].tolist()
    prompts = [study.prompts(vectors_added.Variant(asked=asked))[row] for asked in ("true", "false") for row in kept]
    batch = il.tokenize(study.model, relabelled(prompts, labels), labels=labels)
    expected = il.function_vector(study.model, sets[effect], batch)
    torch.testing.assert_close(own[effect], expected.cpu(), atol=1e-5, rtol=1e-5)
    shuffled = [labels_shuffled(prompt, row) for prompt, row in zip(prompts, 2 * kept, strict=True)]
    batch = il.tokenize(study.model, relabelled(shuffled, labels), labels=labels)
    other = il.function_vector(study.model, sets[effect], batch)
    found = own[vectors_added.Added(*(vectors_added.SHUFFLED["effect"],) * 2)]
    torch.testing.assert_close(found, other.cpu(), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, own[effect], atol=1e-3)

    words = vectors_added._Words.of(study)
    assert not {*np.array(words.texts)[words.choosing & words.true]} & {*np.array(words.texts)[~words.choosing]}
    vectors = [{key: 30 * vector for key, vector in own.items()}]
    nothing = vectors_added.Added("nothing", "nothing")  # is as good behind every layer
    vectors[0][nothing] = torch.zeros(study.view.d_model)
    found = vectors_added._without_demonstrations(study, words, vectors, [labels])
    assert {*where(found, group="nothing")["layer"]} == {0}
    for _, row in where(found, group="effect").iterrows():
        zero = il.tokenize_text(study.model, f"{words.texts[row['prompt']]} :")
        with il.add_vector(study.model, vectors[0][effect], int(row["layer"]), zero):
            log_probs = il.last_log_probs(study.model, zero)[0]
        answer, other = labels if row["true"] else labels[::-1]
        first, second = (float(log_probs[families.WORDS.index(label)]) for label in (answer, other))
        assert row["odds"] == pytest.approx(first - second, abs=1e-4)
        assert row["log_prob"] == pytest.approx(first, abs=1e-4)
        assert row["first"] == float(log_probs.argmax() == families.WORDS.index(answer))


def test_vectors_of_either_ranking_are_made_together_and_told_apart(study, monkeypatch) -> None:
    asked: list[str] = []
    compute = vectors_added._table
    monkeypatch.setattr(vectors_added, "_table", lambda *args: asked.append("made") or compute(*args))
    config = vectors_added.FunctionVectorsConfig(heads=1, random_sets=1, prompts=4)
    tables = {ranking: vectors_added.table(study.ranked_by(ranking), config) for ranking in RANKINGS}
    assert asked == ["made"]
    sets = vectors_added._head_sets(study, config)
    labels = study.labels
    for ranking, found in tables.items():
        assert "ranking" not in found
        own = where(found, group="located", labels=vectors_added.OWN)
        assert len(own) == len(own.drop_duplicates(["prompt", "true_label"]))
        heads = located_for_both(study.ranked_by(ranking), study.few(1))[: study.few(1)]
        assert sets[vectors_added.Added("located", "located", ranking)] == heads
        kept = study.apart[0][:4].tolist()
        prompts = [study.prompts(Variant(asked=asked))[row] for asked in ("true", "false") for row in kept]
        vector = il.function_vector(study.model, heads, study.tokenize(prompts))
        words = vectors_added._Words.of(study)
        for _, row in where(own, true_label=labels[0]).iterrows():
            zero = study.alone([words.texts[row["prompt"]]])
            with il.add_vector(study.model, vector, int(row["layer"]), zero):
                log_probs = il.last_log_probs(study.model, zero)[0]
            answer, other = labels if row["true"] else labels[::-1]
            first, second = (float(log_probs[families.WORDS.index(label)]) for label in (answer, other))
            assert row["odds"] == pytest.approx(first - second, abs=1e-4)


def test_a_deep_model_is_tried_behind_some_layers_at_equal_distances() -> None:
    assert vectors_added.layers_tried(8) == list(range(8))
    assert vectors_added.layers_tried(16) == list(range(16))
    deep = vectors_added.layers_tried(36)
    assert len(deep) == vectors_added.MOST_LAYERS
    assert deep[-1] == 35
    assert {*np.diff(deep)} == {2, 3}


def test_halves_ask_about_no_text_in_common_whichever_class_is_asked(study) -> None:
    for asked in ("true", "false"):
        chosen, tested = (
            {study.prompts(Variant(asked=asked))[row].query for row in rows.tolist()} for rows in study.apart
        )
        assert chosen
        assert tested
        assert not chosen & tested
    for own, half in zip(study.apart, study.halves, strict=True):
        assert {*own.tolist()} <= {*half.tolist()}


def test_label_words_say_both_labels_and_no_other(study) -> None:
    tokens = [families.WORDS.index(label) for label in ("foo", "bar")]
    direction = vectors_added.label_direction(study, tokens)
    gain = study.view.readout(torch.ones(1, study.view.d_model)).gain
    own = study.model.W_U[:, tokens].mean(1) - study.model.W_U.mean(1)
    torch.testing.assert_close(direction, (own * gain).detach().cpu(), atol=1e-5, rtol=1e-5)


def test_labels_are_replaced_in_their_order() -> None:
    prompt = il.Prompt.parse("love : bar eight : foo two :", answer="foo")
    (other,) = relabelled([il.Prompt(prompt.demonstrations, "two", "foo", ("foo", "bar"))], ("yes", "no"))
    assert str(other) == "love : no eight : yes two :"
    assert (other.answer, other.labels) == ("yes", ("yes", "no"))


# Induction


def test_heads_of_a_layer_full_of_induction_heads_coincide_by_chance() -> None:
    """Every head of the layer is an induction head: located ones are among the best, as any of the layer would be."""
    scores = {"L0H0": 0.1, "L0H1": 0.1, "L1H0": 0.9, "L1H1": 0.9, "L1H2": 0.9}
    scores |= {"L1H3": 0.9}
    table = induction_table(scores, {"L1H0", "L1H1", "L1H2"}, spread=0.0005)
    assert induction.EXPERIMENT.verdict(table).outcome == "not supported"


@pytest.mark.parametrize("name", ["gpt2", "gptj", "llama_bias"])
def test_repeat_scores_are_hugging_faces_attention(load_tiny, family_folder, name) -> None:
    study = Study(load_tiny(name, dtype=torch.float64), StudySettings(model="tiny", n=2))
    study._batches[vectors_added.FOO] = il.tokenize(study.model, [il.Prompt.parse(families.PROMPT, answer="foo")])
    tokens = random_tokens(study, 8, seed=1)
    assert len({*tokens}) == 8
    assert tokens == random_tokens(study, 8, seed=1) != random_tokens(study, 8, seed=2)
    found = repeat_scores(study, tokens, front=[5])
    with torch.no_grad():
        patterns = hf_twin(family_folder, name)(
            torch.tensor([[5, *tokens, *tokens]]), output_attentions=True
        ).attentions
    for layer in range(families.N_LAYERS):
        for head in range(families.N_HEADS):
            pattern = patterns[layer][0, head]
            after = [float(pattern[i, i - 8 + 1]) for i in range(9, 17)]
            before = [float(pattern[i, i - 1]) for i in range(9, 17)]
            assert found["induction"][0, layer, head].item() == pytest.approx(sum(after) / 8, abs=1e-5)
            assert found["previous"][0, layer, head].item() == pytest.approx(sum(before) / 8, abs=1e-5)


def test_flow_is_by_layer_and_kind(study) -> None:
    """Saliency in the table is the library's, prompt by prompt."""
    table = anchors.table(study, anchors.AnchorsConfig(prompts=3))
    batch = study.batch(anchors.BAR)[study.test[:3]]
    flow = il.saliency_flow(study.model, batch)
    for kind in KINDS:
        own = where(table, measure="saliency", answer="bar", edges=kind, layer=1)
        assert own["value"].to_numpy() == pytest.approx(getattr(flow, kind)[:, 1].numpy(), abs=1e-5)
        assert {*own["half"]} == {"middle"}
    assert len(where(table, measure="odds")) == 2 * 9 * len(study.test)
