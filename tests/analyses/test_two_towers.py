"""Exchanges as nested patches, their passes, donors, planted models, and the result. Their numbers:
the sweep.
"""

import io
import json
import shlex
import weakref
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import get_args

import numpy as np
import pytest
import torch
from cases import slow_except
from family_tables import EXACT
from planted import build
from prompt_parts import pairs_of
from rich.console import Console
from tolerance import assert_close
from typer.testing import CliRunner

import icl_lens as il
from icl_lens.analyses import two_towers
from icl_lens.analyses.two_towers import exchange_heads, n_drawn, scanned_and_tested
from icl_lens.cli import app
from icl_lens.cli.towers import TowerTask
from icl_lens.edits import interchange_donors
from icl_lens.edits.interchange import Interchange
from icl_lens.edits.interchange_donors import Prefixes, record
from icl_lens.edits.one_token_rows import prefix_cache
from icl_lens.edits.read import ReadAmong
from icl_lens.edits.score import score_sets
from icl_lens.measures import exchanges
from icl_lens.measures.exchanges import EXCHANGES, DonorName, exchange_scores, tower_prompts
from icl_lens.models.view import ModelView
from icl_lens.prompts import donors, tokenize
from icl_lens.reading.last_logits import last_log_probs
from icl_lens.result.number_format import signed

PROMPTS = [
    il.Prompt.parse("love : bar like : bar eight : foo two : foo one :", answer="foo"),
    il.Prompt.parse("happy : bar three : foo nine :", answer="foo"),
    il.Prompt.parse("two : foo cat : bar red : bar dog :", answer="bar"),
]
"""Ragged, with texts of one token, so that donors have their labels at the same positions."""
NAMES = [exchange.name for exchange in EXCHANGES]


# Families


@pytest.fixture(scope="module")
def tiny_run(load_tiny):
    model = load_tiny("llama_gqa")
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    return model, ModelView.of(model), tower_prompts(model, batch)


HEADS = [il.Head(0, 1), il.Head(1, 0), il.Head(1, 3), il.Head(2, 2)]


def test_full_passes_give_the_same_exchanges(tiny_run, monkeypatch):
    model, view, prompts = tiny_run
    sets = [(exchange, HEADS) for exchange in EXCHANGES]
    scores, _, reason = exchange_scores(view, prompts, sets)
    assert reason == ""

    def fail(*_, **__):
        raise prefix_cache.PrefixCacheUnsupported("not now")

    monkeypatch.setattr(prefix_cache.PrefixCache, "of", fail)
    slow, _, reason = exchange_scores(view, prompts, sets)
    assert reason == "not now"
    assert_close(slow.log_odds, scores.log_odds)
    batch = prompts.batch
    sets = [[Interchange((), prompts.positions)]]
    among, reason = score_sets(view, batch, sets, ReadAmong(batch.label_tokens))
    assert reason == "not now"
    assert_close(among[:, 0], torch.log_softmax(il.score(model, batch), dim=-1))


@pytest.mark.parametrize(
    "name",
    slow_except(("gpt2", "mistral"), EXACT),
)
def test_donors_run_from_the_first_token_that_differs(family_run, name, monkeypatch):
    """Rows of one pass begin with different numbers of tokens, also where attention is local
    (mistral).
    """
    model = family_run(name).model
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    view, prompts = ModelView.of(model), tower_prompts(model, batch)
    sizes = []
    run = interchange_donors._record_rows

    def count(*args, **how):
        *_, rows, pasts = (
            args if isinstance(args[-1], (interchange_donors.Pasts, type(None))) else (*args, None)
        )
        sizes.append((len(rows), [] if pasts is None else pasts.lengths))
        return run(*args, **how)

    monkeypatch.setattr(interchange_donors, "_record_rows", count)
    prefixes = Prefixes.of(view, prompts.batch)
    names = sorted(get_args(DonorName), key=lambda name_of_donor: name_of_donor != "texts")
    for donor_name in names:
        donor = prompts.donor(donor_name)
        parts = ("k", "v", "q") if donor.has_queries else ("k", "v")
        plain = record(view, donor, [0, 2], parts)
        ours = record(view, donor, [0, 2], parts, prefixes, keep=donor_name == "texts")
        for part in parts:
            for layer in (0, 2):
                assert_close(
                    getattr(ours, part)[layer],
                    getattr(plain, part)[layer],
                    msg=f"{donor_name}, {part}",
                )
        assert (ours.log_probs is None) == (plain.log_probs is None)
        if ours.log_probs is not None:
            assert_close(ours.log_probs, plain.log_probs, msg=donor_name)
    assert prefixes.is_usable
    assert prefixes.is_tested
    assert_close(prefixes.prefix_cache.log_probs, last_log_probs(model, prompts.batch))
    assert any(len({*lengths}) > 1 for _, lengths in sizes)


def test_prompts_run_once_for_donors_and_rows(tiny_run, monkeypatch):
    """Neither the rows with exchanges nor the donors that begin like the prompts run these
    again.
    """
    _, view, prompts = tiny_run
    passes = []
    run = prefix_cache.last_logits
    monkeypatch.setattr(
        prefix_cache,
        "last_logits",
        lambda *args, **how: passes.append(len(args[1])) or run(*args, **how),
    )
    sets = [(exchange, HEADS) for exchange in EXCHANGES]
    scores, _, reason = exchange_scores(view, prompts, sets)
    assert (passes, reason) == ([len(prompts.batch)], "")
    monkeypatch.setattr(interchange_donors, "new_cache", lambda view: None)
    again, _, _ = exchange_scores(view, prompts, [(exchange, HEADS) for exchange in EXCHANGES])
    assert passes == [len(prompts.batch)] * 2
    assert_close(again.log_odds, scores.log_odds)


def test_a_cache_that_is_wrong_is_not_used(tiny_run):
    _, view, prompts = tiny_run
    prefixes = Prefixes.of(view, prompts.batch)
    for layer in prefixes.caches[0].layers:
        layer.keys.add_(1.0)
    donor = prompts.donor("own text")
    plain, ours = (record(view, donor, [2], ("k",), how) for how in (None, prefixes))
    assert_close(ours.k[2], plain.k[2])
    assert not prefixes.is_usable


def test_rows_of_a_model_whose_caches_are_wrong_get_a_plain_pass(tiny_run, monkeypatch):
    _, view, prompts = tiny_run
    passes, run = [], prefix_cache.last_logits

    def wrong(model, batch, hooks=(), past=None):
        output = run(model, batch, hooks, past)
        passes.append(past is not None)
        for layer in () if past is None else past.layers:
            layer.keys = layer.keys + 1.0
        return output

    monkeypatch.setattr(prefix_cache, "last_logits", wrong)
    exchange_scores(view, prompts, [(exchange, HEADS) for exchange in EXCHANGES])
    assert passes == [True, False]


# Donors


def test_donor_prompts():
    prompt = il.Prompt.parse("love : bar one : foo like : bar two : foo nine :", answer="foo")
    assert str(donors.exchange_texts(prompt)) == "one : bar love : foo two : bar like : foo nine :"
    assert str(donors.exchange_labels(prompt)) == "love : foo one : bar like : foo two : bar nine :"
    queries = donors.Queries("sad", "three")
    assert str(donors.with_own_text(prompt, 2, queries)) == "love : bar one : foo nine : bar nine :"
    assert str(donors.with_own_text(prompt, 1, queries)) == "love : bar sad : foo nine :"
    # The text that stays would be shown twice, so the other query takes its place.
    assert (
        str(donors.with_other_texts(prompt, 3, queries))
        == "one : bar love : foo nine : bar two : foo nine :"
    )
    three = il.Prompt.parse("a : x b : y c : z d : x e :", answer="y")
    assert donors.partner_label(three) == "z"
    assert str(donors.exchange_texts(three)) == "a : x c : y b : z d : x e :"
    assert str(donors.exchange_labels(three)) == "a : x b : z c : y d : x e :"


def test_queries_of_the_other_class_are_found_also_if_labels_are_exchanged():
    prompts = il.load_task("animal-country", n=40, layout="random", labels=["A", "B"])
    assert {prompt.classes["A"] for prompt in prompts} == {"animal", "country"}
    class_of = {}
    for prompt in prompts:
        for text, label in pairs_of(prompt):
            class_of[text] = prompt.classes[label]
    class_of |= {p.query: p.classes[p.answer] for p in prompts}
    without_classes = [
        il.Prompt(p.demonstrations, p.query, p.answer, p.labels) for p in prompts
    ]  # classes must be derived
    for same_prompts in (prompts, without_classes):
        for prompt, queries in zip(prompts, donors.other_queries(same_prompts), strict=True):
            demonstrated_texts = {demonstration.text for demonstration in prompt.demonstrations} | {
                prompt.query
            }
            assert class_of[queries.same] == class_of[prompt.query] != class_of[queries.other]
            assert not demonstrated_texts & {*queries}
    (only,) = donors.other_queries(
        without_classes[:1]
    )  # no other prompts: one of its own demonstrations
    assert {*only} <= {demonstration.text for demonstration in without_classes[0].demonstrations}
    assert class_of[only.same] == class_of[without_classes[0].query] != class_of[only.other]


# Planted models


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.rotating) for seed in (1, 2))]
)
def test_planted_two_towers_are_found_and_their_exchanges_cancel(planted, seed):
    truth, model = planted("two-tower", seed)
    towers = il.two_towers(
        model, il.WordTask("sentiment-number", truth.words), k=4, n=24, n_random=3
    )
    assert {*towers.heads} == {*truth.heads["two-tower"]}  # precision and recall 1
    assert towers.scan["query"][3] > 20 * towers.scan["query"][4]
    table = towers.to_frame().set_index("exchanged")
    assert table.index.tolist() == NAMES
    moving = table["predicted"] == "other"
    intact = towers.log_odds.mean()
    assert (table["as_predicted"] == 1).all()
    assert (table.loc[moving, "log_odds_lost"] > 1.5 * intact).all()
    assert (table.loc[~moving, "log_odds_lost"].abs() < 0.1 * intact).all()
    assert (table["random"].abs() < 0.1 * intact).all()
    assert towers.is_two_towers
    assert "work as two towers" in towers.verdict
    decoys = il.two_towers(
        model, il.WordTask("sentiment-number", truth.words), truth.heads["decoy"], n=24, n_random=3
    )
    assert not decoys.is_two_towers  # they raise all labels alike


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("compare-copy", {}),  # copiers look for a label that an earlier head has chosen
        pytest.param("last-label", {}, marks=pytest.mark.rotating),
        ("last-label", {"layout": "order"}),  # always right
        pytest.param("majority", {}, marks=pytest.mark.rotating),
        pytest.param("lookup", {"labels": ("number", "sentiment")}, marks=pytest.mark.rotating),
        ("untrained", {}),
    ],
)
def test_other_planted_models_are_not_called_two_towers(planted, kind, options):
    truth, model = planted(kind)
    heads = []
    for role, heads_of_role in truth.heads.items():
        if role not in ("mover", "decoy"):
            heads += heads_of_role
    for tested_heads in (None, heads or truth.heads.get("mover") or None):
        how = {"k": 4, "n": 24, "n_random": 3}
        towers = il.two_towers(
            model, il.WordTask("sentiment-number", truth.words), tested_heads, **how, **options
        )
        assert not towers.is_two_towers
        assert towers.is_undecided == any(
            check.difference.low <= 0 <= check.difference.high for check in towers.checks
        )
        assert "not shown" in towers.verdict or "do not show" in towers.verdict
    if options.get("layout") == "order":
        assert towers.accuracy.value == 1
        table = towers.to_frame().set_index("exchanged")["log_odds_lost"]
        assert table["values"] > 1 > abs(table["query"])
        assert table["query+values"] > 1  # nothing cancels


@pytest.mark.slow
def test_two_towers_are_found_under_a_preference(tmp_path):
    truth = build("two-tower", tmp_path, preference=6.0, preferred="bar")
    model = il.load_model(str(truth.folder), device="cpu")
    towers = il.two_towers(
        model,
        il.WordTask("sentiment-number", truth.words),
        truth.heads["two-tower"],
        n=24,
        n_random=3,
    )
    assert towers.is_two_towers
    assert towers.accuracy.value < 0.8


@pytest.mark.slow
def test_the_command_tests_the_same_prompts(planted, tmp_path, monkeypatch):
    """The heads are found on as many prompts of each class and label."""
    truth, model = planted("two-tower")
    monkeypatch.setattr("icl_lens.cli.options.ModelOptions.load", lambda *_, **__: model)
    file = tmp_path / "towers.json"
    call = (
        f"towers -t sentiment-number --path {truth.words} -n 24 -k 4 --random-sets 3 --json {file}"
    )
    result = CliRunner().invoke(app, shlex.split(call))
    assert result.exit_code == 0, result.output
    assert "intervals over more are narrower" not in " ".join(result.output.split())
    towers = il.two_towers(
        model, il.WordTask("sentiment-number", truth.words), k=4, n=24, n_random=3
    )
    assert il.results.TwoTowers.load(file).heads == towers.heads
    theirs = json.loads(file.read_text())["summary"]
    ours = json.loads(json.dumps(towers.to_dict()))
    assert [theirs[name] for name in ("exchanges", "scan", "n_scanned")] == [
        ours[name] for name in ("exchanges", "scan", "n_scanned")
    ]
    scanned, _ = TowerTask(task="animal-country", n=24).split_prompts(0)
    assert {
        *Counter((prompt.answer, prompt.classes[prompt.answer]) for prompt in scanned).values()
    } == {len(scanned) // 4}


# The result


@pytest.mark.slow
def test_each_exchange_of_each_set_has_the_numbers_that_it_has_alone(tiny_run):
    _, view, prompts = tiny_run
    exchanges = [exchange for exchange in EXCHANGES if exchange.name in ("query", "keys: labels")]
    sets = [tuple(HEADS[:2]), (HEADS[3],)]
    results = exchange_heads(view, prompts, sets, exchanges=exchanges, n_random=3)
    columns = [
        prompts.batch.decisions.whole_labels.index(donors.partner_label(prompt))
        for prompt in PROMPTS
    ]
    for towers_of_heads, heads in zip(results, sets, strict=True):
        assert towers_of_heads.heads == heads
        for effects_of_exchange, exchange in zip(towers_of_heads.exchanges, exchanges, strict=True):
            assert effects_of_exchange.name == exchange.name
            all_lost = [effects_of_exchange.lost, *effects_of_exchange.random_lost]
            for lost, head_set in zip(all_lost, (heads, *towers_of_heads.random_sets), strict=True):
                scores, *_ = exchange_scores(view, prompts, [(exchange, head_set)])
                assert_close(torch.from_numpy(lost), scores.log_odds[:, 0] - scores.log_odds[:, 1])
            scores, *_ = exchange_scores(view, prompts, [(exchange, heads)])
            predicted = scores.predicted[:, 1].tolist()
            answers = prompts.batch.answer.tolist()
            assert effects_of_exchange.correct.tolist() == [
                label == answer for label, answer in zip(predicted, answers, strict=True)
            ]
            expected = answers if exchange.name == "keys: labels" else columns
            assert effects_of_exchange.as_predicted.tolist() == [
                label == expected_label
                for label, expected_label in zip(predicted, expected, strict=True)
            ]


@pytest.fixture(scope="module")
def towers(planted):
    truth, model = planted("two-tower")
    prompts = il.load_task("sentiment-number", n=24, path=truth.words, layout="random")
    return il.two_towers(model, prompts, k=2, n_random=3)


# Two exchanges of each prediction of two towers: the first must cost more than the second.
MUST_DIFFER = [
    ("keys", "keys: labels"),
    ("keys: own text", "keys: other texts"),
    *(
        (part, pair)
        for pair in ("query+keys", "query+values", "keys+values")
        for part in pair.split("+")
    ),
]


def test_the_summary_says_against_which_labels_log_odds_are(towers):
    """With more than two labels, exchanges are judged against one of the others."""
    assert "against" not in towers.summary
    of_three = replace(towers, log_odds=towers.log_odds - 1)
    against_all = signed(float(of_three.log_odds.mean()), 2)
    against_partner = signed(float(towers.partner_log_odds.mean()), 2)
    expected = f"log-odds {against_all} against all other labels, {against_partner} against the one"
    assert expected in of_three.summary
    balanced = signed(towers.answered["the prompts"].value, 2)
    says_preference = (
        f"(without what a preference for a label adds: {balanced})" in of_three.summary
    )
    assert says_preference == (balanced != against_partner)


@pytest.mark.parametrize(("larger", "smaller"), slow_except(MUST_DIFFER[:3], MUST_DIFFER))
def test_one_wrong_difference_is_enough_for_no(towers, larger, smaller):
    """The smaller one gets the losses of the larger, and nothing else changes."""
    assert towers.is_two_towers
    lost = next(exchange.lost for exchange in towers.exchanges if exchange.name == larger)
    changed = tuple(
        replace(exchange, lost=lost) if exchange.name == smaller else exchange
        for exchange in towers.exchanges
    )
    made_up = replace(towers, exchanges=changed)
    assert [check.holds for check in made_up.checks].count(False) >= 1
    assert not made_up.is_two_towers
    assert "but they are not shown to work as two towers" in made_up.verdict


def test_a_difference_that_may_be_chance_is_enough_for_no(towers):
    """Exchanged labels of keys cost a little less than texts on average, but far more or far less
    by query.
    """
    query = np.unique(towers.queries, return_inverse=True)[1]
    (texts,) = (exchange.lost for exchange in towers.exchanges if exchange.name == "keys")
    lost = texts - 0.1 + np.where(query % 2, 10, -10) * (query < query.max() // 2 * 2)
    changed = tuple(
        replace(exchange, lost=lost) if exchange.name == "keys: labels" else exchange
        for exchange in towers.exchanges
    )
    made_up = replace(towers, exchanges=changed)
    (check,) = (
        prediction
        for prediction in made_up.checks
        if prediction.difference.value == pytest.approx((texts - lost).mean())
    )
    assert check.difference.value > 0 > check.difference.low
    assert not made_up.is_two_towers


@pytest.mark.parametrize("name", ["query", "keys", "values"])
def test_an_exchange_that_random_heads_match_is_enough_for_no(towers, name):
    changed = tuple(
        replace(exchange, random_lost=np.stack([exchange.lost] * 3))
        if exchange.name == name
        else exchange
        for exchange in towers.exchanges
    )
    made_up = replace(towers, exchanges=changed)
    assert not made_up.is_two_towers
    assert "The 2 heads are not shown to work as two towers on these prompts" in made_up.verdict


@pytest.mark.parametrize("name", ["query", "keys", "values"])
def test_an_exchange_that_helps_the_answer_is_enough_for_no(towers, name):
    """Also if it helps more in random heads."""
    changed = []
    for exchange in towers.exchanges:
        if exchange.name == name:
            lost = -exchange.lost
            random_lost = np.stack([lost - 1] * 3)
            exchange = replace(exchange, lost=lost, random_lost=random_lost)
        changed.append(exchange)
    made_up = replace(towers, exchanges=tuple(changed))
    assert not made_up.is_two_towers
    assert f"exchanging the {name} costs the answer something (difference −" in made_up.verdict
    assert "lowers the log-odds" not in made_up.verdict


def test_a_scan_says_how_many_heads_its_table_leaves_out(icl_mini):
    towers = il.two_towers(icl_mini, il.load_task("sentiment-number", n=24), n_random=3)
    (scan,) = [section for section in towers.to_view().sections if "Scan" in section.title]
    assert scan.n_rows == len(towers.scan) == 48
    assert len(scan.rows) < 48
    assert f"{48 - len(scan.rows)} more rows: scan has all" in str(towers)


def test_one_head_is_one_head(towers):
    with_one_head = replace(towers, heads=towers.heads[:1], random_sets=towers.random_sets[:1])
    assert with_one_head.verdict.startswith(
        "The head works as two towers on these prompts. Exchanging its query"
    )
    assert "1 head matches queries with keys and carries labels" in with_one_head.to_html()
    assert "2 heads match queries with keys and carry labels" in towers.to_html()
    notes = list(chain.from_iterable(s.notes for s in with_one_head.to_view().sections))
    assert any("Random heads: 1 set of" in note for note in notes)
    no = replace(with_one_head, partner_log_odds=-with_one_head.partner_log_odds)
    assert "whether the head works as two towers" in no.verdict
    assert (
        "The head moves the answer in the direction"
        in weakened(with_one_head, ["query"], 0.4).verdict
    )
    lost = {exchange.name: exchange.lost for exchange in towers.exchanges}
    pair = [
        replace(exchange, lost=lost["query"]) if exchange.name == "query+keys" else exchange
        for exchange in with_one_head.exchanges
    ]
    assert "but it is not shown to work" in replace(with_one_head, exchanges=tuple(pair)).verdict


def with_preference(towers, nats):
    """Return the result of the same heads in a model that prefers "bar" by this many nats."""
    gain = nats * np.array([(answer == "bar") - (answer == "foo") for answer in towers.answers])
    exchanges = [
        replace(
            exchange,
            partner_log_odds=exchange.partner_log_odds + gain,
            donors_log_odds=None
            if exchange.donors_log_odds is None
            else exchange.donors_log_odds - gain,
            correct=exchange.partner_log_odds + gain > 0,
            as_predicted=(exchange.partner_log_odds + gain > 0) == (exchange.predicted == "same"),
        )
        for exchange in towers.exchanges
    ]
    intact = towers.partner_log_odds + gain
    return replace(
        towers,
        log_odds=intact,
        partner_log_odds=intact,
        correct=intact > 0,
        exchanges=tuple(exchanges),
    )


def weakened(towers, names, share):
    """Return the result of heads that move the answer by a share of what they do, in these
    exchanges' log-odds left.
    """
    intact = towers.partner_log_odds
    changed = [
        replace(exchange, partner_log_odds=intact - share * (intact - exchange.partner_log_odds))
        if exchange.name in names
        else exchange
        for exchange in towers.exchanges
    ]
    return replace(towers, exchanges=tuple(changed))


@pytest.mark.parametrize("nats", [2.0, 6.0, 20.0])
def test_a_preference_does_not_hide_two_towers(towers, nats):
    """It hides them from the answers: the last one is larger than what the heads add, so accuracy
    is at chance.
    """
    preferring = with_preference(towers, nats)
    assert preferring.is_two_towers
    for name, log_odds in preferring.left.items():
        assert log_odds.value == pytest.approx(towers.left[name].value)
    assert preferring.answered["the prompts"].value == pytest.approx(
        towers.partner_log_odds.mean(), abs=0.1
    )
    assert "become" in preferring.verdict
    if nats == 20:
        shares = [preferring.accuracy.value, 1 - preferring.accuracy.value]
        assert abs(shares[0] - shares[1]) < 0.5
        assert [exchange.correct.mean() for exchange in preferring.exchanges] == [shares[0]] * len(
            NAMES
        )


@pytest.mark.parametrize("names", [["query"], ["keys"], ["values"], ["query", "keys", "values"]])
def test_an_answer_that_does_not_turn_is_enough_for_no(towers, names):
    """Heads that move it by less than half of what two towers do leave it the more probable
    label.
    """
    for share, is_two_towers in ((0.4, False), (0.95, True)):
        made_up = weakened(towers, names, share)
        assert made_up.is_two_towers == is_two_towers
        assert ("are not shown to turn it" in made_up.verdict) != is_two_towers
        for name in names:
            phrase = f"{made_up.left[name].value:+.2f}".replace("-", "−")
            assert phrase in made_up.verdict
            with_interval = f"{phrase} (95% interval "
            assert (with_interval in made_up.verdict) != is_two_towers
            assert (f"with their {name} exchanged" in made_up.verdict) != is_two_towers
    with_preference_kept = weakened(with_preference(towers, 6.0), names, 0.4)
    assert "are not shown to turn it" in with_preference_kept.verdict, "the same with a preference"


@pytest.mark.parametrize("name", ["query", "keys", "values"])
def test_donors_that_the_model_does_not_answer_give_no_verdict(towers, name):
    """As with labels that name the classes: prompts are answered, and prompts with exchanged labels
    are not.
    """
    changed = [
        replace(exchange, donors_log_odds=-exchange.donors_log_odds)
        if exchange.name == name
        else exchange
        for exchange in towers.exchanges
    ]
    made_up = replace(towers, exchanges=tuple(changed))
    assert not made_up.is_two_towers
    assert made_up.verdict.startswith(
        "These prompts do not show whether the 2 heads work as two towers"
    )
    what = {
        "query": "a query of the other class",
        "keys": "exchanged texts",
        "values": "exchanged labels",
    }[name]
    assert f"it is not shown that the model answers the prompts with {what} (−" in made_up.verdict


def test_a_model_that_guesses_gets_no_verdict(towers):
    noise = np.where(np.arange(len(towers.queries)) % 2, 1.0, -1.0)
    made_up = replace(towers, partner_log_odds=noise)
    assert not made_up.is_two_towers
    assert made_up.verdict.startswith(
        "These prompts do not show whether the 2 heads work as two towers"
    )
    assert "not shown that the model answers the prompts (" in made_up.verdict


def test_log_odds_are_those_against_the_partner(tiny_run):
    """With three labels, the third one does not count; donors are judged by their own answers."""
    model, view, _ = tiny_run
    parse = il.Prompt.parse
    three = [
        parse("love : foo one : bar cat : red two :", answer="bar"),
        parse("happy : red three : foo nine : bar dog :", answer="red"),
        parse("two : foo cat : bar dog : red like :", answer="foo"),
    ]
    ready = tower_prompts(model, il.tokenize(model, three, prepend_bos=False))
    (towers,) = exchange_heads(view, ready, [HEADS[:1]], n_random=1)
    assert towers.answers == ("bar", "red", "foo")
    assert towers.partners == ("foo", "bar", "red")
    labels = ready.batch.labels

    def log_odds(prompts, answers, other_labels):
        scores = il.score(model, il.tokenize(model, prompts, prepend_bos=False, labels=labels))
        pairs = zip(scores, answers, other_labels, strict=True)
        return [
            float(row[labels.index(answer)] - row[labels.index(other_label)])
            for row, answer, other_label in pairs
        ]

    assert_close(towers.partner_log_odds, log_odds(three, towers.answers, towers.partners))
    for name, change in (("keys", donors.exchange_texts), ("values", donors.exchange_labels)):
        (exchanged,) = [exchange for exchange in towers.exchanges if exchange.name == name]
        expected = log_odds([change(prompt) for prompt in three], towers.partners, towers.answers)
        assert_close(exchanged.donors_log_odds, expected)
    scores, *_ = exchange_scores(view, ready, [(EXCHANGES[0], HEADS[:1])])
    assert_close(towers.exchanges[0].partner_log_odds, scores.partner_log_odds[:, 1])


@pytest.mark.parametrize("width", [80, 120])
def test_tables_are_whole_at_any_width(towers, width):
    """Each exchange is named in full with its numbers, also in a terminal of 80 columns."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(towers)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    for row in towers.to_frame().to_dict("records"):
        # Two lines with an older rich, whose wider borders leave no room for the last column.
        line = "".join(line for line in lines if line.startswith(f" {row['exchanged']}  "))
        assert f"{row['log_odds_lost']:+z.2f}".replace("-", "−") in line
        assert f"{100 * row['as_predicted']:.1f}%" in line


def test_own_prompts_are_scanned_on_one_half_and_tested_on_the_other(towers):
    assert towers.n_scanned + len(towers.queries) == 24
    assert towers.n_scanned > 8 < len(towers.queries)


def test_labels_of_several_tokens_are_exchanged_as_a_whole(load_tiny):
    model = load_tiny("gpt2")
    prompts = [
        il.Prompt(
            [
                il.Demonstration("love", "foo cat"),
                il.Demonstration("one", "bar dog"),
                il.Demonstration("two", "bar dog"),
            ],
            "three",
            "bar dog",
        )
    ]
    ready = tower_prompts(model, il.tokenize(model, prompts, prepend_bos=False))
    assert ready.positions[0].tolist() == [2, 3, 6, 7, 10, 11]
    for name in ("labels", "own text"):
        assert torch.equal(ready.donor(name).positions, ready.positions)


def counted(function, sizes):
    """Return a tokenizing function that also adds the number of its prompts to a list."""

    def count(model, prompts, **options):
        sizes.append(len(prompts))
        return function(model, prompts, **options)

    return count


@pytest.mark.parametrize("name", ["two_towers", "locate"])
def test_the_memory_of_a_run_is_that_of_its_exchanges(tiny_run, monkeypatch, name):
    model, _, prompts = tiny_run
    given_memory = []

    class Measured(Exception):
        """Ends the call once the memory is known."""

    def record_memory(*args, memory, **options):
        given_memory.append(memory)
        raise Measured

    monkeypatch.setattr(two_towers, "exchange_scores", record_memory)
    monkeypatch.setattr(exchanges, "exchange_scores", record_memory)
    calls = {
        "two_towers": lambda run: il.two_towers(model, PROMPTS, HEADS, run=run),
        "locate": lambda run: il.locate(model, prompts.batch, by="exchange", run=run),
    }
    with pytest.raises(Measured):
        calls[name](il.Run(memory=12_345))
    assert given_memory == [12_345]


@pytest.mark.slow
def test_memory_bounds_the_rows_of_a_pass_and_the_prompts_at_a_time(tiny_run, monkeypatch):
    """Passes over donors have one row if no more fits, caches hold one prompt and its donor, and
    no donors are tokenized but those of these prompts, with equal numbers.
    """
    model, view, _ = tiny_run
    n_tokenized = []
    monkeypatch.setattr(tokenize, "_tokenize", counted(tokenize._tokenize, n_tokenized))
    prompts = tower_prompts(model, il.tokenize(model, PROMPTS, prepend_bos=False))
    n_demonstrations = [len(prompt.demonstrations) for prompt in prompts.batch.prompts]
    assert max(n_tokenized) == len(n_demonstrations) < sum(n_demonstrations)
    sets = [(exchange, HEADS) for exchange in EXCHANGES]
    expected, _, _ = exchange_scores(view, prompts, sets)
    n_rows, n_cached = [], []
    record_rows, prefixes_of = interchange_donors._record_rows, Prefixes.of

    def count_rows(*args, **how):
        rows = args[-1] if isinstance(args[-1], list) else args[-2]
        n_rows.append(len(rows))
        return record_rows(*args, **how)

    def count_prompts(view, batch):
        n_cached.append(len(batch))
        return prefixes_of(view, batch)

    monkeypatch.setattr(interchange_donors, "_record_rows", count_rows)
    monkeypatch.setattr(Prefixes, "of", count_prompts)
    n_tokenized.clear()
    exchange_scores(view, prompts, sets)
    assert (n_cached, max(n_rows) > 1) == ([len(prompts.batch)], True)
    assert n_tokenized == [sum(n_demonstrations)] * 2
    n_rows.clear(), n_cached.clear(), n_tokenized.clear()
    monkeypatch.setattr(interchange_donors, "PASS_BYTES", 1)
    small, _, reason = exchange_scores(view, prompts, sets, memory=1)
    assert (n_cached, {*n_rows}, reason) == ([1] * len(prompts.batch), {1}, "")
    assert sorted(n_tokenized) == sorted(n_demonstrations * 2)
    assert_close(small.log_odds, expected.log_odds)


def test_a_pass_over_donors_copies_the_keys_of_one_layer_at_a_time(tiny_run):
    """The cache that rows begin with keeps none of the keys and values that it returns."""
    _, view, prompts = tiny_run
    prefixes = Prefixes.of(view, prompts.batch)
    pasts = prefixes.pasts([(0, 3), (1, 5)])
    new = torch.ones(2, view.n_kv_heads, 1, view.d_head)
    keys, values = pasts.cache.update(new, new, 1)
    stored = prefixes.caches[0].layers[1]
    assert keys.shape[2] == values.shape[2] == 6
    assert_close(keys[0, :, 2:5], stored.keys[0, :, :3])
    assert_close(values[1, :, :5], stored.values[1, :, :5])
    held = []
    for layer in pasts.cache.layers:
        held += [x for x in vars(layer).values() if isinstance(x, torch.Tensor)]
    assert not any(x.is_floating_point() for x in held)
    assert stored.keys.data_ptr() == prefixes.prefix_cache.keys[1].k.data_ptr()


def test_keys_of_donors_are_forgotten_before_those_of_the_prompts_are_kept(tiny_run, monkeypatch):
    _, view, prompts = tiny_run
    layers_of_donors, n_alive = [], []
    add, prefixes_of = Prefixes.add, Prefixes.of

    def noted(prefixes, batch, cache):
        layers_of_donors.extend(map(weakref.ref, cache.layers))
        add(prefixes, batch, cache)

    def counted_alive(view, batch):
        n_alive.append(sum(layer() is not None for layer in layers_of_donors))
        assert len(layers_of_donors) == view.n_layers
        return prefixes_of(view, batch)

    monkeypatch.setattr(Prefixes, "add", noted)
    monkeypatch.setattr(Prefixes, "of", counted_alive)
    exchange_scores(view, prompts, [(exchange, HEADS) for exchange in EXCHANGES])
    assert n_alive == [0]


@pytest.mark.slow
def test_heads_are_found_by_the_score_that_is_named(icl_mini):
    towers = il.two_towers(icl_mini, "sentiment-number", k=3, by="contrast", n=8, n_random=3)
    drawn = il.load_task("sentiment-number", n=n_drawn(8))
    scanned, _ = scanned_and_tested(drawn, 8)
    assert list(towers.heads) == il.locate(icl_mini, scanned, by="contrast", k=3).heads
    assert towers.scan is None
    assert (
        towers.scan_note
        == f"The heads have the largest mean contrast on {len(scanned)} prompts other than these."
    )
    with pytest.raises(
        il.InputError, match="by must be 'exchange', its default, if heads are passed"
    ):
        il.two_towers(icl_mini, "sentiment-number", ["L5H0"], by="effect", n=8)
