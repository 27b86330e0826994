"""Where a bundled model learns in context, how that emerges, and what is shipped, on a model after two steps."""

import json
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.bundled_models import emergence, emergence_page, model_card, ship
from experiments.bundled_models import train as training
from experiments.bundled_models.emergence import Emergence, head_onsets, repeat_scores, steepest, summarize
from experiments.bundled_models.episodes import BUNDLED, load_words
from experiments.bundled_models.head_locations import (
    deeper_share,
    halves,
    locations_markdown,
    measure_locations,
    nearby_controls,
    training_record,
    word_episodes,
)
from experiments.bundled_models.metrics import head_values
from experiments.bundled_models.train import TrainConfig, train
from experiments.framework.locating import best_heads
from icl_lens import Head, load_model
from icl_lens.errors import InputError

pytestmark = pytest.mark.slow

WORDS = load_words()
SMALL = {"n_prompts": 2, "n_per_class": 2, "n_located": 32}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a GPT-2 after two steps of training, and its snapshots of steps 1 and 2."""
    root = tmp_path_factory.mktemp("run")
    settings = TrainConfig("gpt2", n_tokens=120, check_every=1, n_checked=4, steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            training, "make_tokenizer", lambda *args: AutoTokenizer.from_pretrained(BUNDLED / "icl-mini")
        )  # learning one takes seconds
        train(settings, root / "model", root / "kept", resume=True)
    return SimpleNamespace(folder=root / "model", kept=root / "kept", model=load_model(str(root / "model")))


def test_episodes_are_balanced_and_halves_share_no_query():
    episodes = word_episodes(WORDS, 320)
    assert len(episodes) == 320
    asked = [(episode.answer, episode.categories[1], episode.items[0].side) for episode in episodes]
    assert {asked.count(kind) for kind in asked} == {20}  # 2 labels x 4 categories x 2 orders
    chosen, tested = halves(episodes)
    queries = [{episode.items[-1].text for episode in part} for part in (chosen, tested)]
    assert not queries[0] & queries[1]
    assert len(chosen) + len(tested) == 320
    assert min(len(chosen), len(tested)) > 120


def test_near_heads_are_of_the_same_layers_or_the_nearest():
    others = [Head(*head) for head in ((0, 0), (0, 1), (5, 0), (5, 1), (6, 3))]
    located = [Head(*head) for head in ((5, 4), (5, 5), (5, 3), (0, 5))]
    chosen = nearby_controls(random.Random(0), located, others)
    assert set(chosen[:2]) == {(5, 0), (5, 1)}
    assert chosen[2] == (6, 3)
    assert chosen[3][0] == 0
    assert len(set(chosen)) == 4


def test_the_deeper_share_counts_what_is_above_zero():
    values = torch.tensor([[1.0, -9.0], [0.0, 0.0], [2.0, 1.0], [0.0, -5.0]])
    assert deeper_share(values) == pytest.approx(0.75)
    assert deeper_share(-values.abs()) == 0.0
    assert deeper_share(torch.tensor([[1.0], [1.0], [2.0]])) == pytest.approx(0.5)  # of three layers, the last


def test_where_agrees_with_hugging_face(run):
    """Accuracy, attention to true labels, and zeroing (a head's columns of the output projection) by hand."""
    found = measure_locations(run.model, training_record(run.folder), WORDS, n=32, n_draws=2)
    chosen, tested = halves(word_episodes(WORDS, 32))
    assert (found.n_chosen, found.n_tested) == (len(chosen), len(tested))
    hf = AutoModelForCausalLM.from_pretrained(run.folder, attn_implementation="eager").eval()
    tokenizer = run.model.tokenizer

    def measured(heads):
        for layer, head in heads:
            hf.transformer.h[layer].attn.c_proj.weight.data[16 * head : 16 * head + 16] = 0
        right, true, false = [], [], []
        for episode in tested:
            output = hf(torch.tensor([tokenizer(" ".join(episode.tokens[:-1])).input_ids]), output_attentions=True)
            labels = tokenizer.convert_tokens_to_ids(list(episode.labels))
            right.append(int(output.logits[0, -1, labels].argmax()) == episode.items[-1].side)
            ends, at = [], 0
            for token in episode.tokens[:-1]:
                at += len(tokenizer(token).input_ids)
                ends.append(at - 1)
            for side, kept in ((True, true), (False, false)):
                where = [ends[3 * i + 2] for i, item in enumerate(episode.items[:-1]) if (item.side == 1) == side]
                kept.append(torch.stack([layer[0, :, -1, where].sum(-1) for layer in output.attentions]).detach())
        return 100 * float(np.mean(right)), torch.stack(true).mean(0), torch.stack(false).mean(0)

    intact, true, false = measured([])
    assert found.accuracy[0] == pytest.approx(intact)
    for ranking in found.rankings:
        heads = [(int(name[1]), int(name[3])) for name in ranking.heads]
        on_true, on_false = (sum(float(some[head]) for head in heads) for some in (true, false))
        assert ranking.true_share == pytest.approx(on_true / (on_true + on_false), abs=1e-4)
        assert ranking.on_labels == pytest.approx((on_true + on_false) / 4, abs=1e-4)
        assert ranking.layers == tuple(layer for layer, _ in heads)
    by_contrast = found.rankings[1]
    best = head_values(run.model, chosen)[1]["contrast"].mean(0).flatten().topk(4).indices
    zeroed = [(int(name[1]), int(name[3])) for name in by_contrast.heads]
    assert [divmod(int(i), 6) for i in best] == zeroed
    assert found.accuracy[0] - by_contrast.cost[0] == pytest.approx(measured(zeroed)[0])
    assert locations_markdown([found]).count("icl-mini, seed 0") == 4
    with pytest.raises(InputError, match="at least 32"):
        measure_locations(run.model, {}, WORDS, n=31)


def test_a_minority_is_at_each_place_so_that_the_nearest_label_is_no_more_often_the_majoritys(monkeypatch):
    """A model that repeats the label at a fixed place says the majority's in three of four prompts, at any place."""

    def of(place):
        def said(model, episodes):
            class_1 = [episode.items[min(place, len(episode.items) - 2)].side == 1 for episode in episodes]
            right = [one == (episode.items[-1].side == 1) for one, episode in zip(class_1, episodes, strict=True)]
            return pd.DataFrame({"label": right, "word": right, "class_1": class_1})

        return said

    for place in (0, 1, 2, 3):
        monkeypatch.setattr(model_card, "answers", of(place))
        found = {bias.what: bias for bias in model_card.biases(None, WORDS, [("animal", "country")], 8)}
        assert found["majority: 3 of 4 are of class 1, all"].points == pytest.approx(50.0)
        recent = found["recency: class 1 last of 4, all"]
        assert recent.points == pytest.approx(100.0 if place > 1 else -100.0)


def finished(source, target, **changes):
    """Copy a run to `target`, with a record that says that it ended by its rule, and with `changes`."""
    shutil.copytree(source, target)
    record = json.loads((target / "training.json").read_text())
    (target / "training.json").write_text(json.dumps(record | {"finished": True} | changes))
    return target


def test_a_shipped_model_is_stored_in_half_precision_and_loaded_in_single(run, tmp_path):
    bundled = tmp_path / "bundled"
    (bundled / "icl-mini").mkdir(parents=True)
    (bundled / "icl-mini" / "old.txt").touch()
    source = finished(run.folder, tmp_path / "gpt2-0")
    other = finished(run.folder, tmp_path / "gpt2-1", seed=1)
    seeds = [measure_locations(run.model, training_record(other), WORDS, n=32, n_draws=2)]
    found = ship.ship({"gpt2": source}, seeds, bundled=bundled, **SMALL)
    assert [path.name for path in bundled.iterdir()] == ["icl-mini"]
    names = {path.name for path in (bundled / "icl-mini").iterdir()}
    assert names == {*ship.FILES, "model.safetensors", "README.md"}
    stored, whole = (load_file(folder / "model.safetensors") for folder in (bundled / "icl-mini", source))
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    assert all(torch.equal(stored[name], tensor.half()) for name, tensor in whole.items())
    model = load_model(str(bundled / "icl-mini"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {p.dtype for p in AutoModelForCausalLM.from_pretrained(bundled / "icl-mini").parameters()} == {torch.float32}
    assert 0 < found["icl-mini"].nats <= ship.MAX_NATS
    card = (bundled / "icl-mini" / "README.md").read_text()
    assert "stored in float16, loaded in float32" in card
    assert 0 < card.index("icl-mini, seed 0") < card.index("icl-mini, seed 1")


def test_half_precision_that_moves_answers_is_refused_and_nothing_is_put_in_place(run, tmp_path):
    bundled = tmp_path / "bundled"
    bundled.mkdir()
    source = finished(run.folder, tmp_path / "gpt2-0")
    weights = load_file(source / "model.safetensors")
    weights["transformer.ln_f.weight"] *= 100  # logits so large that rounding them moves log-probabilities by nats
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="half precision must"):
        ship.ship({"gpt2": source}, bundled=bundled, **SMALL)
    assert list(bundled.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "arch", "said"),
    [
        ({"seed": 1}, "gpt2", "must be 0, whatever"),
        ({}, "llama", "holds a gpt2"),
        ({"finished": False, "done": 1}, "gpt2", "before its stopping rule"),
    ],
)
def test_models_with_unfit_training_are_not_shipped(run, tmp_path, changes, arch, said):
    with pytest.raises(InputError, match="training"):
        training_record(tmp_path)
    source = finished(run.folder, tmp_path / "model", **changes)
    with pytest.raises(InputError, match=said):
        ship.ship({arch: source}, bundled=tmp_path, **SMALL)


def test_a_tokenizer_that_lacks_a_word_is_refused(no_type_checks):
    own = AutoTokenizer.from_pretrained(BUNDLED / "icl-mini")
    ship.check_tokenizer(own, WORDS)
    for fillers, labels, said in ((("naïve",), ("foo",), "naïve"), ((), ("foo", "love"), "more than one token")):
        with pytest.raises(InputError, match=said):
            ship.check_tokenizer(own, SimpleNamespace(fillers=fillers, labels=labels, categories_of={}))


def test_repeat_scores_are_attention_to_the_twins_successor_and_the_token_before():
    """A made-up model whose head 0 is an induction head, head 1 looks back by one, and head 2 spreads attention."""
    n = 4
    pattern = torch.zeros(1, 3, 2 * n, 2 * n)
    for q in range(2 * n):
        pattern[0, 0, q, max(0, q - (n - 1))] = 1
        pattern[0, 1, q, max(0, q - 1)] = 1
        pattern[0, 2, q, : q + 1] = 1 / (q + 1)
    found = repeat_scores(lambda **kwargs: SimpleNamespace(attentions=(pattern,)), torch.arange(2 * n)[None])
    most = (n + 1 + 2 * n) / 2  # the mean number of tokens that can be attended to
    torch.testing.assert_close(found["induction"], torch.tensor([[most, 0.0, 1.0]]))
    torch.testing.assert_close(found["previous"], torch.tensor([[0.0, most, 1.0]]))


def made_up(*, rises=0.6, others=0.0, induction=8.0, right=(0.5, 0.5, 0.95), all_labels=0.0, noise=0.02):
    """Return three snapshots of 40 queries: induction rises at the second, accuracy and all else at the third."""
    rng = np.random.default_rng(0)
    prompts, heads, scores = [], [], []
    located = ["L3H0", "L3H1"]
    for i, step in enumerate((100, 200, 300)):
        for prompt in range(40):
            prompts.append((step, prompt, f"q{prompt}", bool((prompt + 0.5) / 40 < right[i])))
            for name in (*located, "L3H2", "L3H3"):
                up = (rises if name in located else others) * (i == 2)
                jitter = noise * rng.normal()
                on_true = 0.1 + up + all_labels * (i == 2) + jitter
                on_false = 0.1 + all_labels * (i == 2)
                heads.append((step, prompt, f"q{prompt}", name, 3, up, up + 0.01, on_true, on_false))
        for sequence in range(20):
            score = induction if i >= 1 else 1.0
            scores.append((step, sequence, "L1H0", 1, score + 0.2 * rng.normal(), 9.0))
            scores.append((step, sequence, "L1H1", 1, 1.0, 1.0))
    return Emergence(
        pd.DataFrame(prompts, columns=["step", "prompt", "query", "correct"]),
        pd.DataFrame(
            heads,
            columns=["step", "prompt", "query", "name", "layer", "increase", "contrast", "on_true", "on_false"],
        ),
        pd.DataFrame(scores, columns=["step", "sequence", "name", "layer", "induction", "previous"]),
        {"increase": located, "contrast": located},
    )


def test_located_heads_rise_beyond_the_others_of_their_layers():
    found = summarize(made_up())
    assert (found["before"], found["after"]) == (200, 300)
    assert found["attention"]["low"] > 0.1
    assert found["induction_head"] == "L1H0"
    assert found["induction"]["low"] > 4
    # No head rises; every head of the layer does; attention to true and false labels rises alike.
    for changes in ({"rises": 0.0}, {"others": 0.6}, {"rises": 0.0, "all_labels": 0.4}):
        attention = summarize(made_up(**changes))["attention"]
        assert attention["low"] < 0 < attention["high"]
    assert summarize(made_up(induction=1.0))["induction"]["low"] < 0.2
    assert steepest(pd.Series([0.5, 0.9, 1.0], index=[1, 2, 3])) == (1, 2)


def test_a_head_appears_with_half_of_its_final_value():
    run = made_up()
    run.heads["contrast"] = run.heads["step"].map({100: 0.2, 200: 0.6, 300: 1.0}) * (run.heads["name"] != "L3H1")
    found = head_onsets(run).query("by == 'contrast'").set_index("name")["step"]
    assert found["L3H0"] == 200
    assert pd.isna(found["L3H1"])


def test_the_page_of_runs_has_each_runs_numbers_and_figure(tmp_path):
    with pytest.raises(InputError, match="no run"):
        emergence_page.page(tmp_path)
    for name, how in (("risen", {}), ("flat", {"rises": 0.0})):
        emergence_page.write(made_up(**how), tmp_path / name)
    page = emergence_page.page(tmp_path)
    assert page.index("| [flat](#flat) | step 200 to 300: 0.50 to 0.95 | ") < page.index("| [risen](#risen) |")
    assert (tmp_path / "flat" / "figure.png").stat().st_size > 10_000
    assert "](flat/figure.png)" in page
    assert "| contrast | L3H0 | 0.61 | 300 |" in page.split("## risen")[1]


def test_snapshots_are_measured_as_the_models_they_are(run, tmp_path):
    found = emergence.measure(run.kept, run.folder, n=32)
    assert sorted(set(found.prompts["step"])) == [1, 2]
    chosen, tested = halves(word_episodes(WORDS, 32))
    names = emergence.head_names(8, 6)
    best = best_heads(head_values(run.model, chosen)[1]["contrast"], 4)
    assert found.located["contrast"] == list(map(str, best))
    last = found.heads[found.heads["step"] == 2]
    means = {column: values.mean(0) for column, values in head_values(run.model, tested)[1].items()}
    for column, values in means.items():
        again = last.groupby("name")[column].mean().loc[names].to_numpy()
        np.testing.assert_allclose(again, values.flatten().numpy(), atol=5e-3)  # snapshots are kept in float16
    first = found.heads[found.heads["step"] == 1].groupby("name")["on_true"].mean().loc[names].to_numpy()
    assert np.abs(first - means["on_true"].flatten().numpy()).max() > 1e-4
    (tmp_path / "step-000001.safetensors").touch()
    with pytest.raises(InputError, match="1 snapshots"):
        emergence.measure(tmp_path, run.folder, n=32)
