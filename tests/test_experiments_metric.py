"""The claims metric and copy: made-up tables, heads and words with known answers, and slow code on the same weights."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import icl_lens as il
from experiments.claims import copy, metric
from experiments.claims.arrivals import Arrivals, arrivals, retrieved
from experiments.claims.rivals import beyond
from experiments.lab.controls import beside
from experiments.lab.frames import where
from experiments.lab.study import Study, StudySettings, Variant
from icl_lens.metrics import auroc, precision_at_1

N = 200
OUTCOMES = ["supported", "not supported", "undecided"]
SMALL = metric.MetricConfig(heads=2, controls=2, prompts=16, rotations=1, words=2)


def noisy(mean: float, spread: float = 0.02, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, spread, N)
    return mean + noise - noise.mean()


def metric_table(
    located: float = 0.9,
    *,
    cosine: float = 0.6,
    other: float = 0.5,
    rotated: float = 0.5,
    correct: float = 0.95,
    spread: float = 0.02,
) -> pd.DataFrame:
    """Two located heads with these means of both yardsticks, rivals beside them, and two other heads."""
    parts = []
    rivals = {"cosine_": cosine, "centred_": cosine, "rotated_": rotated, "pooled_": located, "pooled_cosine_": cosine}
    for group, names, own in (("located", ("L1H0", "L1H1"), located), ("random", ("L1H2", "L1H3"), other)):
        for seed, name in enumerate(names):
            frame = pd.DataFrame({"prompt": range(N), "query": np.arange(N) % 50, "correct": noisy(correct, 0.01)})
            for value in metric.YARDSTICKS:
                frame[value] = noisy(own, spread, seed)
                for rival, mean in rivals.items():
                    frame[f"{rival}{value}"] = noisy(mean, spread, 7 + seed) if group == "located" else np.nan
            parts.append(frame.assign(group=group, name=name, layer=1, task="a-b", symmetric=0.6, rank=0.9))
    words = ["cat", "$b$"]
    axes = pd.MultiIndex.from_product([words, words], names=["asked", "shown"]).to_frame(index=False)
    return pd.concat([*parts, axes.assign(score=[1.0, -1.0, -1.0, 1.0], group="matrix", name="L1H0")])


def copy_table(label: float, *, text: float = 0.5, other: float = 0.5, spread: float = 0.02) -> pd.DataFrame:
    means = {"located": {"label": label, "text": text}, "random": {"label": other, "text": 0.5}}
    parts = []
    for group, found in means.items():
        for word, mean in found.items():
            frame = pd.DataFrame({"prompt": range(N), "query": np.arange(N) % 50, "copied": noisy(mean, spread)})
            parts.append(frame.assign(word=word, group=group, name=group, layer=1, circuit=0.7, eigen=0.4))
    return pd.concat(parts)


CASES = {
    metric: (metric_table(), metric_table(cosine=0.9), metric_table(0.66, spread=0.8)),
    copy: (copy_table(0.95), copy_table(0.6), copy_table(0.8, spread=0.8)),
}


@pytest.mark.parametrize("module", CASES, ids=lambda module: module.__name__.split(".")[-1])
def test_all_three_outcomes(module: Any) -> None:
    judged = [module.EXPERIMENT.verdict(table) for table in CASES[module]]
    assert [one.outcome for one in judged] == OUTCOMES, [one.reason for one in judged]
    assert module.EXPERIMENT.figure(CASES[module][0]).axes


# When would it be supported for a trivial reason?


@pytest.mark.parametrize(
    ("population", "outcome", "decides"),
    [
        ({"rotated": 0.895}, "not supported", "keys rotated at random"),
        ({"other": 0.895}, "not supported", "2 other heads (few) of the same layers"),
        ({"located": 0.45, "cosine": 0.2, "other": 0.2, "rotated": 0.2}, "not supported", "texts by class"),
        ({"cosine": 0.895}, "not supported", "cosine"),
        ({"located": 0.99, "cosine": 0.98}, "undecided", "too little for any head to be better"),
        ({"located": 0.9, "cosine": 0.98}, "not supported", "cosine"),
        ({"correct": 0.5}, "undecided", "does not do a-b"),
    ],
)
def test_the_metric_is_judged_against_every_rival(population: dict[str, float], outcome: str, decides: str) -> None:
    """Above chance is not enough, nor is above rivals that are below it, nor by a hair."""
    judged = metric.claim(metric_table(**population))
    assert judged.outcome == outcome, judged.reason
    assert decides in judged.reason.partition(";")[0]


def test_a_task_that_the_model_does_not_do_is_left_out() -> None:
    """On average over both tasks accuracy is beyond chance, and AUROC next to nothing."""
    idle = where(metric_table(0.5, correct=0.5), task="a-b")
    table = pd.concat([metric_table(), idle.assign(task="c-d", prompt=idle["prompt"] + N, query=idle["query"] + 50)])
    judged = metric.claim(table)
    assert judged.outcome == "supported", judged.reason
    assert "judged on a-b (accuracy 95.0%); not on c-d (accuracy 50.0%), not done by the model" in judged.reason


@pytest.mark.parametrize(
    ("population", "outcome"),
    [({"label": 0.95, "text": 0.95}, "not supported"), ({"label": 0.95, "other": 0.95}, "not supported")],
)
def test_copies_of_any_word_or_of_any_head_are_no_copies_of_labels(population: dict[str, float], outcome: str) -> None:
    judged = copy.claim(copy_table(**population, spread=0.01))
    assert judged.outcome in (outcome, "undecided"), judged.reason
    assert judged.outcome != "supported"


def test_a_tenth_of_what_a_rival_leaves() -> None:
    table = where(metric_table(0.66, spread=0.005), group="located")
    heads = beside(pd.concat([table, table.assign(group="random")]), "auroc")
    for rival, outcome in ((0.60, "supported"), (0.64, "not supported")):
        judged = beyond(heads, np.full(len(heads.located), rival), unit="AUROC", what="AUROC", whom="they")
        assert judged.outcome == outcome
        assert judged.effect == pytest.approx(0.66 - rival - 0.1 * (1 - rival))


# Retrieval


def test_retrieval_agrees_with_the_library_query_by_query() -> None:
    generator = torch.Generator().manual_seed(0)
    similarity = torch.randint(4, (9, 14), generator=generator).float()  # with ties
    same = torch.rand(9, 14, generator=generator) < 0.5
    allowed = torch.rand(9, 14, generator=generator) < 0.8
    allowed[0] = same[0]  # a query without keys of the other class
    found = retrieved(similarity, same, allowed)
    assert math.isnan(found.auroc[0])
    assert math.isnan(found.first[0])
    for i in range(1, 9):
        own, kind = similarity[i, allowed[i]], same[i, allowed[i]]
        assert float(found.auroc[i]) == pytest.approx(auroc(own, kind), abs=1e-9)
        assert float(found.first[i]) == pytest.approx(precision_at_1(own[None], kind[None]), abs=1e-9)


def made_up(key_of: Any, query_of: Any) -> float:
    """Mean AUROC of `query · key` over eight words of two classes, each in two places and with both labels."""
    words = [f"w{i}" for i in range(8)]
    kind = torch.arange(8) >= 4
    shown = [(i, place, label) for i in range(8) for place in range(2) for label in range(2)]
    one = Arrivals(
        task="made-up",
        layers=(0,),
        queries=torch.zeros(8, 1, 1),
        keys=torch.zeros(len(shown), 1, 1),
        query_class=kind,
        key_class=kind[[i for i, _, _ in shown]],
        query_words=words,
        key_words=[words[i] for i, _, _ in shown],
        seen=[(words[i],) for i, _, _ in shown],
        stratum=torch.tensor([2 * place + label for _, place, label in shown]),
        distance=3,
        right=torch.ones(8),
        home=torch.device("cpu"),
    )
    queries = torch.stack([query_of(i, bool(kind[i])) for i in range(8)])
    keys = torch.stack([key_of(i, bool(kind[i]), place, label) for i, place, label in shown])
    return float(one.retrieved(queries @ keys.T).auroc.mean())


def vector(**parts: float) -> torch.Tensor:
    names = ("a", "b", "label", "place", "one")
    return torch.tensor([parts.get(name, 0.0) for name in names])


def test_only_likeness_of_class_is_found() -> None:
    def query(i: int, kind: bool) -> torch.Tensor:
        return vector(a=float(not kind), b=float(kind), label=1.0, place=1.0, one=1.0)

    def by_class(i: int, kind: bool, place: int, label: int) -> torch.Tensor:
        return vector(a=float(not kind), b=float(kind))

    def by_label_and_place(i: int, kind: bool, place: int, label: int) -> torch.Tensor:
        return vector(label=float(label), place=float(place))

    def one_class_liked(i: int, kind: bool, place: int, label: int) -> torch.Tensor:
        return vector(one=float(kind))

    def class_under_label_and_place(i: int, kind: bool, place: int, label: int) -> torch.Tensor:
        return vector(a=float(not kind), b=float(kind), label=9.0 * label, place=9.0 * place)

    assert made_up(by_class, query) == 1.0
    assert made_up(by_label_and_place, query) == 0.5
    assert made_up(one_class_liked, query) == 0.5
    assert made_up(class_under_label_and_place, query) == 1.0


def test_a_words_own_key_is_left_out() -> None:
    """Likeness of the very word tells no class: nothing but its own key is found by it."""

    def own(i: int, *_: Any) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(i), 8).float()

    assert made_up(own, own) == 0.5


# On models


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("words") / "words.json"
    categories = {
        "sentiment": ["love", "like", "hate", "happy", "sad", "good", "bad"],
        "number": ["eight", "two", "one", "nine", "three", "w40", "w41"],
        "animal": ["cat", "dog", "w50", "w51", "w52", "w53", "w54"],
        "country": ["France", "Spain", "w60", "w61", "w62", "w63", "w64"],
    }
    path.write_text(json.dumps({"categories": categories}))
    return str(path)


def study_of(model: Any, words: str, task: str = "sentiment-number") -> Study:
    return Study(model, StudySettings(model="tiny", task=task, n=24, path=words))


def test_judged_on_categories_that_heads_were_not_located_on(gpt2: Any, words: str, tmp_path: Path) -> None:
    assert metric.held_out(study_of(gpt2, words), SMALL) == ["animal-country"]
    assert metric.held_out(study_of(gpt2, words, "animal-country"), SMALL) == ["sentiment-number"]
    categories = json.loads(Path(words).read_text())["categories"]
    categories |= {"fruit": ["w65", "w66", "w67", "w68"], "instrument": ["w69", "w70", "w71", "w72"]}
    more = tmp_path / "more.json"
    more.write_text(json.dumps({"categories": categories}))
    assert metric.held_out(study_of(gpt2, str(more)), SMALL) == ["animal-country", "fruit-instrument"]
    with pytest.raises(il.InputError, match="none of the tasks number-sentiment can be asked"):
        metric.held_out(study_of(gpt2, words), replace(SMALL, others=("number-sentiment",)))


@pytest.mark.parametrize("family", ["gpt2", "gptj", "llama_bias"])
def test_every_number_of_the_metric_by_hand(family: str, load_tiny: Any, words: str) -> None:
    """Prompt by prompt and key by key, on what each prompt's own pass holds."""
    study = study_of(load_tiny(family), words)
    table = metric.table(study, SMALL)
    head = next(iter(dict.fromkeys(where(table, group="located")["name"])))
    own = where(table, group="located", name=head)
    place = il.Head.parse(head)
    queries, keys, distances = [], [], []
    for turn, cell in enumerate(metric_cells()):
        for row in range(16)[turn :: len(metric_cells())]:
            batch = study.batch(cell)[row]
            acts = il.capture(study.model, batch)
            prompt = batch.prompts[0]
            queries.append((acts.resid_pre[0, place.layer], prompt.query, cell.asked == "true"))
            true = ("bar" if cell.swapped else "foo",)
            for demo, shown in enumerate(prompt.demonstrations):
                stands = (demo, shown.label)
                before = [one.text for one in prompt.demonstrations[: demo + 1]]
                keys.append((acts.label_resid_pre[0, place.layer, demo], before, shown.label in true, stands))
                distances.append(int(batch.last[0] - batch.label_positions[0, demo]))
    distance = None if family == "gpt2" else sorted(distances)[(len(distances) - 1) // 2]
    form = il.query_key_metric(study.model, place, distance=distance)
    for i, (x, word, kind) in enumerate(queries):
        found = []
        for stands in sorted({stands for *_, stands in keys}):
            here = [(y, is_true) for y, before, is_true, at in keys if at == stands and word not in before]
            scores = torch.tensor([float(form.scores(x[None], y[None])) for y, _ in here])
            same = torch.tensor([is_true == kind for _, is_true in here])
            if same.any() and not same.all():
                found.append((auroc(scores, same), precision_at_1(scores[None], same[None])))
        expected = np.mean(found, axis=0)
        assert own["auroc"].iloc[i] == pytest.approx(expected[0], abs=1e-5)
        assert own["first"].iloc[i] == pytest.approx(expected[1], abs=1e-5)
    assert own["symmetric"].iloc[0] == pytest.approx(form.symmetric_share)
    assert ("content_auroc" in table) == (family != "gpt2")


def metric_cells() -> list[Variant]:
    return [
        Variant(layout, swapped, task="animal-country", asked=asked)
        for layout in ("order", "reorder")
        for swapped in (False, True)
        for asked in ("true", "false")
    ]


def test_what_arrives_is_taken_from_another_task(gpt2: Any, words: str) -> None:
    one = arrivals(study_of(gpt2, words), "animal-country", (1,), 16)
    assert {*one.query_words} <= {"cat", "dog", "France", "Spain", *(f"w{i}" for i in range(50, 65))}
    assert one.queries.shape == (16, 1, 32)
    assert one.keys.shape == (64, 1, 32)
    assert sorted(one.query_class.tolist()) == [False] * 8 + [True] * 8
    assert len(one.strata) == 8
    for keys in one.strata:
        assert 0 < int(one.key_class[keys].sum()) < len(keys)


@pytest.mark.parametrize("family", ["gpt2", "gptj", "llama_bias"])
def test_copies_by_hand(family: str, load_tiny: Any, words: str) -> None:
    """Values, their output and its logits, one position and one token at a time."""
    study = study_of(load_tiny(family), words)
    model, head = study.model, il.Head(1, 2)
    batch = study.batch()[:3]
    acts = il.capture(model, batch)
    found = copy.Copies((head,))(acts)[:, 0]
    _, cache = model.run_with_cache(batch.tokens, attention_mask=batch.attention_mask)
    per_group = study.view.n_heads // cache["blocks.1.attn.hook_v"].shape[2]
    for row, prompt in enumerate(batch.prompts):
        for kind in range(2):
            places, tokens = (each[row].tolist() for each in copy.places_and_tokens(batch)[kind])
            wins = []
            for own, other in ((i, j) for i in range(4) for j in range(4)):
                labels = [prompt.demonstrations[i].label for i in (own, other)]
                if labels[0] == labels[1] or tokens[own] == tokens[other]:
                    continue
                logit = []
                for read in (own, other):
                    v = cache["blocks.1.attn.hook_v"][row, places[read], head.head // per_group]
                    y = (v @ study.view.W_O(1)[head.head])[None, None]
                    scale = acts.readout.rows([row]).using(final_norm="frozen", bias=False)
                    logit.append(float(scale.logits(y)[0, 0, tokens[own]]))
                wins.append(float(logit[0] > logit[1]))
            assert float(found[row, kind]) == pytest.approx(np.mean(wins), abs=1e-5)
    (label_at, label_said), (text_at, text_said) = copy.places_and_tokens(batch)
    assert int(batch.tokens[0, label_at[0, 0]]) == int(label_said[0, 0])
    assert int(batch.tokens[0, text_at[0, 0]]) == int(text_said[0, 0])


def test_a_head_that_always_says_one_label_copies_nothing() -> None:
    """Its logit for that label is high wherever it looks: compared within the said word, that is worth nothing."""
    other = torch.tensor([[[False, True], [True, False]]])
    liked = torch.tensor([[[9.0, 0.0], [9.0, 0.0]]])
    assert float(copy.told_apart(liked, other)) == 0.5
    assert float(copy.told_apart(torch.tensor([[[2.0, 5.0], [1.0, 6.0]]]), other)) == 1.0
    assert float(copy.told_apart(torch.tensor([[[1.0, 6.0], [2.0, 5.0]]]), other)) == 0.0
    assert math.isnan(float(copy.told_apart(liked, torch.zeros_like(other))))


def test_a_label_behind_the_word_asked_about_is_left_out(icl_mini: Any) -> None:
    """Not only the label of that word: those of later demonstrations have it before them as well."""
    found = arrivals(Study(icl_mini, StudySettings(n=24)), "animal-country", (0,), 24)
    shown = 4
    assert len(found.seen) == len(found.key_words) == 24 * shown
    behind = 0
    for row, word in enumerate(found.query_words):
        for key in range(len(found.seen)):
            before = found.key_words[key - key % shown : key + 1]
            assert bool(found.other_word[row, key]) == (word not in before)
            behind += word in before[:-1]
    assert behind > 0


def test_an_untrained_metric_counts_the_way_that_is_better_for_it() -> None:
    """A rotation is as likely to put a class last as first, and a mean of both would be chance whatever it knows."""

    def made(sign: float) -> float:
        kind = torch.arange(6) >= 3
        words = list("abcdef")
        one = Arrivals(
            task="made-up",
            layers=(0,),
            queries=torch.zeros(6, 1, 1),
            keys=torch.zeros(6, 1, 1),
            query_class=kind,
            key_class=kind,
            query_words=words,
            key_words=words,
            seen=[(word,) for word in words],
            stratum=torch.zeros(6, dtype=torch.long),
            distance=1,
            right=torch.ones(6),
            home=torch.device("cpu"),
        )
        side = kind.float() * 2 - 1
        return float(metric.better_way(one, sign * side[:, None] * side).auroc.mean())

    assert made(1.0) == made(-1.0) == 1.0


def test_a_key_alone_in_its_stratum_does_not_blank_the_figure() -> None:
    similarity = torch.tensor([[1.0, 2.0, torch.nan], [3.0, 5.0, torch.nan]])
    rows, columns = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    total, count = metric.mean_parts(similarity, rows, columns)
    assert (total / count)[0, :2].tolist() == [2.0, 3.5]
    assert count.tolist() == [[2.0, 2.0, 0.0]]


def test_the_matrix_of_a_trained_model_has_a_score_for_most_pairs(icl_mini: Any) -> None:
    """Texts of many lengths make strata of a single key."""
    study = Study(icl_mini, StudySettings(n=40))
    one = arrivals(study, "animal-country", (4,), 40)
    assert min(len(keys) for keys in one.strata) == 1
    matrix = metric._matrix(study, il.Head(4, 0), one, SMALL)
    assert matrix["score"].notna().mean() > 0.5


def test_copy_of_a_tiny_model(gpt2: Any, words: str) -> None:
    table = copy.table(study_of(gpt2, words), copy.CopyConfig(heads=2, controls=2, pairs=4))
    assert {*table["word"]} == {"label", "text"}
    assert bool(table["copied"].between(0, 1).all())
    assert {*table.groupby(["name", "word"])["circuit"].nunique()} == {1}


def test_words_read_and_said_together_are_as_pair_by_pair(icl_mini: Any) -> None:
    """Of several heads: pairs of texts that share words, and the labels, whose last pieces are read."""
    study = Study(icl_mini, StudySettings(n=20))
    several = copy.text_pairs(study, study.test, 12)
    assert len({token for _, said in several for token in said}) < 2 * len(several)
    W_E = study.model.W_E.detach()
    told = set()
    for head in (il.Head(0, 1), il.Head(4, 0), il.Head(7, 5)):
        for pairs in (several, [copy.labels_as_read(study)]):
            each = [il.head_copying(study.model, head, said, inputs=W_E[torch.tensor(read)]) for read, said in pairs]
            expected = [
                np.mean([one.discrimination for one in each]),
                np.mean([one.positive_eigenvalues for one in each]),
            ]
            np.testing.assert_allclose(copy._circuit(study, head, pairs), expected, atol=1e-5)
            told.add(round(float(expected[0]), 3))
    assert len(told) > 2, "heads that differ in nothing would show nothing"


def test_keys_are_compared_only_with_those_whose_texts_are_as_long(icl_mini: Any) -> None:
    """Animals have fewer pieces than countries: a head that compares lengths would rank the classes."""
    found = arrivals(Study(icl_mini, StudySettings(n=40)), "animal-country", (0,), 40)
    lengths = torch.tensor([len(icl_mini.tokenizer(word).input_ids) for word in found.key_words])
    assert len(set(lengths.tolist())) > 1
    assert all(len(set(lengths[keys].tolist())) == 1 for keys in found.strata)


def test_a_text_of_several_pieces_is_said_by_the_piece_that_is_read(icl_mini: Any) -> None:
    batch = il.tokenize(icl_mini, il.Prompt.parse("love : bar like : bar eight : foo two : foo one :"))
    (places, labels), (ends, texts) = copy.places_and_tokens(batch)
    assert icl_mini.tokenizer.convert_ids_to_tokens(texts[0].tolist()) == ["##ve", "##ke", "##ight", "##o"]
    assert torch.equal(batch.tokens.gather(1, ends), texts)
    assert torch.equal(batch.tokens.gather(1, places), labels)
