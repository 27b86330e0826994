"""Traces of planted circuits, their sentences on made-up numbers, plain texts, and the command.
Their numbers: the sweep.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from planted import build
from shared import pair_prompts
from tolerance import assert_close
from typer.testing import CliRunner

import icl_lens as il
from icl_lens.analyses.trace_result import layers_in_words
from icl_lens.cli import app
from icl_lens.edits.reference_prompts import SamePairsWarning

ROLES = ("texts", "labels", "query", "separators", "last")


def made_up(lost, control=None, **fields):
    """Return a trace of six prompts with these losses [role layer] and a little noise."""
    noise = 0.01 * np.random.default_rng(0).standard_normal((2, 6, 1, 5, 4))
    control_lost = np.zeros((5, 4)) if control is None else np.array(control)
    values = {
        "model": "m",
        "donors": "query",
        "sites": ("resid_pre",),
        "roles": ROLES,
        "layers": (0, 2, 4, 6),
        "n_layers": 8,
        "lost": np.array(lost)[None, None] + noise[0],
        "control_lost": control_lost[None, None] + noise[1],
        "log_odds": np.full(6, 2.0),
        "donor_log_odds": np.full(6, -2.0),
        "queries": tuple("abcdef"),
        "answers": ("foo",) * 6,
        "text": "x",
    }
    return il.results.Trace(**values | fields)


def test_the_finding_names_the_layers_at_which_a_role_loses_most():
    zeros, query, last = [0.0] * 4, [4.0, 4.0, 1.0, 0.0], [0.0, 0.0, 3.0, 4.0]
    lost = [zeros, zeros, query, zeros, last]
    traced = made_up(lost)
    assert traced.finding == (
        "The query's class is in the query text in layers 0–2 and at the last position in layers 4–6 "
        "(resid_pre)."
    )
    labels = made_up(lost, donors="labels")
    assert labels.finding.startswith("Which label stands where is in the query text")
    words = ("0 ␣Mary", "1 ␣and", "2 ␣John", "3 ␣gave", "4 ␣to")
    texts = made_up(lost, donors="your donors", control_lost=None, roles=words)
    assert texts.finding == (
        "What your donors exchange is at position 2 ␣John in layers 0–2 and at position 4 ␣to in layers "
        "4–6 (resid_pre)."
    )
    assert "Measured in layers 0, 2, 4, 6 of 8." in traced.to_view().sections[0].notes


def test_nothing_is_found_where_the_control_costs_as_much_or_intervals_are_missing():
    zeros, query = [0.0] * 4, [4.0, 4.0, 1.0, 0.0]
    lost = [zeros, zeros, query, zeros, zeros]
    as_much = made_up(lost, control=lost)
    assert as_much.finding.startswith(
        "No exchange at resid_pre is shown to cost the answer much more than the control"
    )
    unmoved = made_up(lost, donor_log_odds=np.full(6, 2.0) + 0.1 * np.arange(-3, 3))
    assert unmoved.finding.startswith("It is not shown that the donors themselves lower the answer")
    assert not any(unmoved.carried.values())
    small = made_up(np.array(lost) / 12)  # the donors themselves cost 4
    assert small.finding.startswith("No exchange at resid_pre is shown")
    few = made_up(lost, queries=tuple("aabbcc"))
    assert "nothing is concluded" in few.finding
    without = replace(made_up(lost), control_lost=None, donors="your donors")
    assert (
        without.finding
        == "What your donors exchange is in the query text in layers 0–2 (resid_pre)."
    )
    assert "control" not in without.to_frame()


def test_a_large_difference_with_a_wide_interval_hides_no_smaller_one():
    lost = np.zeros((5, 4))
    lost[2, 0] = 1.5
    traced = made_up(lost)
    wide = traced.lost.copy()
    wide[:, 0, 4, 3] = [30, -10, -9, 20, 0, 0]  # 5.2, interval from below zero
    traced = replace(traced, lost=wide)
    assert traced.finding == "The query's class is in the query text in layer 0 (resid_pre)."


ZEROS, QUERY, LAST = [0.0] * 4, [4.0, 4.0, 1.0, 0.0], [0.0, 0.0, 3.0, 4.0]


def estimates(exact, n_checked=4, **fields):
    """Return estimates of six prompts, of which some were exchanged and lost `exact`."""
    lost = [ZEROS, ZEROS, QUERY, ZEROS, LAST]
    exact_lost = np.repeat(np.array(exact)[None, None], n_checked, axis=0)
    return made_up(lost, method="gradient", exact_lost=exact_lost if n_checked else None, **fields)


def test_estimates_that_are_close_say_where_and_how_far_they_are_off():
    exact = [ZEROS, ZEROS, [4.5, 4.2, 1.0, 0.0], ZEROS, [0.0, 0.0, 3.0, 3.0]]
    traced = estimates(exact)
    assert traced.finding == (
        "By estimate, the query's class is in the query text in layers 0–2 and at the last position "
        "in layers 4–6 (resid_pre)."
    )
    error = traced.estimate_error
    assert (error.n_prompts, error.role, error.layer) == (4, "last", 6)
    assert error.largest == pytest.approx(1.0, abs=0.05)
    means = traced.lost[:4].mean(0).flatten()
    assert error.correlation == pytest.approx(np.corrcoef(means, np.ravel(exact))[0, 1])
    words = str(traced)
    assert "The first 4 prompts were exchanged, too: over 20 exchanges" in words
    assert "differ most at the last position in layer 6 (resid_pre): estimate +4.0" in words
    frame = traced.to_frame().set_index(["role", "layer"])
    assert frame.loc[("last", 6), "exact"] == 3
    assert frame.loc[("last", 6), "estimated"] == pytest.approx(means[-1])
    (row,) = (row for row in traced.to_view().sections[-1].rows if row[1] == "last")
    assert row[4:] == (3.0, 6)


@pytest.mark.parametrize(
    "exact",
    [
        [ZEROS, QUERY, ZEROS, ZEROS, LAST],  # elsewhere
        [ZEROS, ZEROS, [6.5, 4.0, 1.0, 0.0], ZEROS, LAST],  # 2.5 off, of 4 that donors cost
        [ZEROS, ZEROS, [2.1, 2.1, 1.9, 1.9], ZEROS, [1.9, 1.9, 2.1, 2.1]],  # weakly correlated
        np.zeros((5, 4)),  # no correlation, and 4 off
    ],
)
def test_estimates_that_are_far_off_say_nothing_about_places(exact):
    traced = estimates(exact)
    assert traced.finding.startswith(
        "The estimates are too far from the exact losses to say where the model holds the query's "
    )
    assert not any(traced.carried.values())


def words_of(traced):
    """Return what is printed, without line breaks."""
    return " ".join(str(traced).split())


def correlated(correlation):
    """Return estimates of six prompts, whose exact losses have this correlation with them."""
    lost = estimates(np.zeros((5, 4))).lost
    means = (lost[:4].mean(0) - lost[:4].mean()).flatten()
    unrelated = np.random.default_rng(0).standard_normal(20)
    unrelated -= unrelated.mean()
    unrelated -= means * (unrelated @ means) / (means @ means)
    unrelated *= np.linalg.norm(means) / np.linalg.norm(unrelated)
    exact = correlation * means + (1 - correlation**2) ** 0.5 * unrelated
    donor_log_odds = np.full(6, -20.0)  # no difference is above half of what the donors cost
    return estimates(exact.reshape(5, 4), donor_log_odds=donor_log_odds)


@pytest.mark.parametrize(
    ("correlation", "printed", "is_far_off"),
    [
        (0.8849, "0.88", True),
        (0.8951, "0.895", True),
        (0.89996, "0.89996", True),
        (0.9001, "0.90", False),
        (0.9049, "0.90", False),
        (-0.3, "−0.30", True),
    ],
)
def test_a_correlation_below_the_limit_is_not_rounded_to_it(correlation, printed, is_far_off):
    traced = correlated(correlation)
    assert traced.estimate_error.correlation == pytest.approx(correlation)
    assert f"have a correlation of {printed}, and differ most" in words_of(traced)
    assert traced.finding.startswith("The estimates are too far") == is_far_off


@pytest.mark.parametrize("n_places", [1, 3])
@pytest.mark.parametrize(("factor", "is_far_off"), [(1.0, False), (0.51, False), (0.49, True)])
def test_estimates_without_a_correlation_are_judged_by_their_difference(
    n_places, factor, is_far_off
):
    """One place, or several that are equal; the donors themselves cost what is estimated there."""
    lost = np.zeros((6, 1, 5, 4))
    lost[:, 0, 1, :n_places] = 0.7
    traced = replace(
        estimates(np.zeros((5, 4))),
        lost=lost,
        control_lost=None,
        exact_lost=factor * lost[:1],
        donor_log_odds=np.full(6, 2.0 - 0.7),
    )
    assert np.isnan(traced.estimate_error.correlation)
    exchanges = "1 exchange" if n_places == 1 else "3 exchanges"
    words = words_of(traced)
    assert (
        f"The first prompt was exchanged, too: over {exchanges}, the correlation of estimates and "
        "exact losses is not defined, and they differ " in words
    )
    assert (
        "Without a correlation, estimates say where something is held if no estimate is off by more "
        "than 50% of what the donors themselves cost." in words
    )
    assert traced.finding.startswith("The estimates are too far") == is_far_off
    assert (
        traced.finding.startswith("By estimate, the query's class is at the labels") != is_far_off
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (0.00099, "differ nowhere by 0.001 nats or more."),
        (
            0.00101,
            "differ most at the labels in layer 0 (resid_pre): estimate +1.000, exact +1.001 nats.",
        ),
    ],
)
def test_where_estimates_differ_most_is_said_if_they_differ(error, expected):
    lost = np.zeros((6, 1, 5, 4))
    lost[:, 0, 1] = 1.0
    exact = lost.copy()
    exact[:, 0, 1, 0] += error
    traced = replace(estimates(np.zeros((5, 4))), lost=lost, exact_lost=exact)
    assert f"is not defined, and they {expected}" in words_of(traced)
    lost[:, 0, 2, 0] = exact[:, 0, 2, 0] = 3.0
    assert f"a correlation of 1.00, and {expected}" in words_of(replace(traced, lost=lost))


@pytest.mark.parametrize(("queries", "expected"), [("a", "1 prompt"), ("ab", "2 prompts")])
def test_too_few_queries_are_said_in_the_right_number(queries, expected):
    n = len(queries)
    traced = made_up(np.zeros((5, 4)))
    few = replace(
        traced,
        lost=traced.lost[:n],
        control_lost=None,
        log_odds=traced.log_odds[:n],
        donor_log_odds=traced.donor_log_odds[:n],
        queries=tuple(queries),
        answers=traced.answers[:n],
    )
    give = "gives" if n == 1 else "give"
    assert few.finding == (
        f"{expected} with fewer than 4 different queries {give} no intervals, so that nothing is "
        "concluded."
    )


def test_estimates_without_a_check_say_so():
    traced = estimates(ZEROS, n_checked=0)
    assert "no prompt was exchanged to check them" in str(traced)
    assert traced.finding.startswith("By estimate, the query's class is in the query text")
    assert "exact" not in traced.to_frame()
    nothing = made_up(np.zeros((5, 4)), method="gradient")
    assert nothing.finding.startswith("No exchange at resid_pre is estimated to cost")


def test_estimates_are_slopes_also_under_edits_that_are_active(ioi_like):
    """The donor is run without them, and the prompt with them."""
    model, texts, donors = ioi_like
    options = {"sites": ["resid_mid"], "layers": [1], "method": "gradient"}
    edit = il.AblateSite("mlp_out", 0)
    with il.edited(model, edit):
        traced = il.trace(model, texts, donors, n_checked=2, **options)
        exact = il.trace(model, texts, donors, sites=["resid_mid"], layers=[1])
    np.testing.assert_allclose(traced.exact_lost, exact.lost[:2], atol=1e-5)
    batch, source = il.tokenize(model, texts), il.tokenize(model, donors)
    answers, rivals = (model.tokenizer.convert_tokens_to_ids(word) for word in ("foo", "bar"))
    place, step = (slice(None), 2), 0.02

    def stream(tokens):
        seen = []
        hooks = [
            ("blocks.1.hook_resid_pre", lambda x, hook: seen.append(x[place].clone())),
            ("blocks.1.hook_attn_out", lambda x, hook: seen.append(x[place].clone())),
        ]
        with model.hooks(fwd_hooks=hooks):
            model(tokens)
        return seen[0] + seen[1]

    donated = stream(source.tokens)
    with il.edited(model, edit):
        change = donated - stream(batch.tokens)
        log_odds = []
        for times in (-step, step):

            def moved(x, hook, times=times):
                x = x.clone()
                x[place] += times * change
                return x

            with model.hooks(fwd_hooks=[("blocks.1.hook_attn_out", moved)]):
                logits = model(batch.tokens)[:, -1]
            log_odds.append(logits[:, answers] - logits[:, rivals])
    slopes = (log_odds[1] - log_odds[0]) / (2 * step)
    assert slopes.abs().min() > 1e-3
    np.testing.assert_allclose(traced.lost[:, 0, 2, 0], -slopes, rtol=0.02, atol=2e-4)


def test_estimates_of_controls_are_those_of_donors(ioi_like):
    """What a control costs is estimated from its own values, not from the donor's."""
    model, texts, donors = ioi_like
    controls = [*donors[1:], donors[0]]
    options = {"layers": [0, 2], "method": "gradient", "n_checked": 0}
    traced = il.trace(model, texts, donors, controls=controls, **options)
    np.testing.assert_allclose(
        traced.lost, il.trace(model, texts, donors, **options).lost, atol=1e-5
    )
    of_controls = il.trace(model, texts, controls, **options).lost
    np.testing.assert_allclose(traced.control_lost, of_controls, atol=1e-5)
    assert np.abs(traced.lost - traced.control_lost).max() > 1e-3


@pytest.mark.slow
def test_a_run_in_pieces_checks_the_same_prompts(ioi_like, tmp_path):
    model, texts, donors = ioi_like
    options = {"layers": [0, 2], "method": "gradient", "n_checked": 3}
    whole = il.trace(model, texts, donors, **options)
    assert whole.exact_lost.shape == (3, 1, 5, 2)
    assert np.isfinite(whole.exact_lost).all()
    pieces = il.trace(model, texts, donors, run=il.Run(tmp_path, memory=1), **options)
    np.testing.assert_allclose(pieces.exact_lost, whole.exact_lost, atol=1e-5)
    np.testing.assert_allclose(pieces.lost, whole.lost, atol=1e-5)
    stored = tmp_path / "trace.json"
    whole.save(stored)
    assert il.results.load(stored).finding == whole.finding


def test_as_large_differences_whose_intervals_include_zero_are_said():
    """Instead of leaving out some layers of a stretch without a word."""
    lost = [ZEROS, ZEROS, [4.0, 4.0, 4.0, 0.0], ZEROS, LAST]
    certain = made_up(lost)
    assert not any(certain.undecided.values())
    assert "includes zero" not in str(certain)
    spread = certain.lost.copy()
    spread[:, 0, 2, 1] = [14.0, 14.0, -4.0, 14.0, -7.0, -7.0]
    traced = replace(certain, lost=spread)
    assert "in the query text in layers 0 and 4" in traced.finding
    assert traced.undecided["resid_pre", "query"] == (2,)
    assert (
        "The difference is as large in the query text in layer 2, but its interval includes zero "
        "(resid_pre); more prompts may decide." in str(traced)
    )


@pytest.mark.parametrize(
    ("carried", "words"),
    [
        ([4, 6], "in layers 4–6"),
        ([2], "in layer 2"),
        ([0, 4, 6], "in layers 0 and 4–6"),
    ],
)
def test_layers_are_said_in_words(carried, words):
    assert layers_in_words(carried, [0, 2, 4, 6]) == words


@pytest.mark.slow
def test_the_map_of_a_planted_circuit_lights_up_where_it_is_planted(tmp_path):
    """Layer 1 moves the class of a text to its label, and of the query to the last position; layers
    4 to 6 compare them and copy the label.
    """
    truth = build("two-tower", tmp_path / "model")
    model = il.load_model(str(truth.folder), device="cpu")
    tasks = ("sentiment-number", "number-sentiment")
    prompts = [prompt for name in tasks for prompt in il.load_task(name, path=truth.words, n=4)]
    where = {
        "query": {"query": (0, 1), "last": (2, 4, 7)},
        "texts": {"texts": (0, 1), "labels": (2, 4), "last": (7,)},
        "labels": {"labels": (0, 1, 2, 4), "last": (7,)},
    }
    for donors, expected in where.items():
        traced = il.trace(model, prompts, donors, layers=[0, 1, 2, 4, 7])
        assert {role: layers for (_, role), layers in traced.carried.items() if layers} == expected
        frame = traced.to_frame().set_index(["role", "layer"])["log_odds_lost"]
        for role in ROLES:
            for layer in traced.layers:
                is_planted = layer in expected.get(role, ())
                assert (frame[role, layer] > 9) if is_planted else abs(frame[role, layer]) < 0.5, (
                    donors,
                    role,
                    layer,
                )


def test_plain_texts_are_traced_position_by_position(ioi_like):
    model, texts, donors = ioi_like
    traced = il.trace(model, texts, donors, layers=[0, 2])
    assert [role.split()[0] for role in traced.roles] == ["0", "1", "2", "3", "4"]
    assert traced.lost.shape == (4, 1, 5, 2)
    whole = traced.log_odds - traced.donor_log_odds
    assert np.abs(whole).min() > 1e-3
    np.testing.assert_allclose(
        traced.lost[:, 0, 2, 0], whole, atol=1e-4
    )  # the only token that differs
    assert (traced.lost[:, 0, :2] == 0).all(), "nothing differs before it"


@pytest.fixture(scope="module")
def of_pairs(gpt2):
    """Prompts of pairs, and of other pairs."""
    same, unrelated = "love foo,like bar,one two", "love like,one nine,two three"
    return [
        il.tokenize(gpt2, pair_prompts(pairs), prepend_bos=False) for pairs in (same, unrelated)
    ]


def test_means_over_other_tasks_are_those_of_single_ablations(gpt2, of_pairs):
    """Role by role and layer by layer, by one edit each in a block; without everything, all roles
    of the first layer have means.
    """
    batch, unrelated = of_pairs
    sites, options = ("resid_pre", "mlp_out"), {"mode": "mean", "reference": [batch, unrelated]}

    def log_odds(*edits):
        with il.edited(gpt2, *edits, batch=batch):
            return il.metrics.label_log_odds(il.score(gpt2, batch), batch.answer)

    traced = il.trace(gpt2, batch, reference=[batch, unrelated], sites=sites, layers=[0, 2])
    assert (traced.donors, traced.control_lost) == ("means", None)
    for site, role, layer in product(range(2), range(5), range(2)):
        place = sites[site], traced.layers[layer]
        lost = log_odds() - log_odds(il.AblateSite(*place, positions=traced.roles[role], **options))
        assert_close(traced.lost[:, site, role, layer], lost, msg=f"{place} {traced.roles[role]}")
    assert np.abs(traced.lost).max() > 1e-3
    everywhere = [il.AblateSite("resid_pre", 0, positions=role, **options) for role in traced.roles]
    assert_close(traced.donor_log_odds, log_odds(*everywhere))
    assert "means over 6 prompts in 2 batches, at all roles of the first layer, give" in str(traced)


def test_a_mean_over_the_same_pairs_is_warned_of_and_said_beside_the_trace(gpt2, of_pairs):
    batch, _ = of_pairs
    with pytest.warns(SamePairsWarning, match="reference must contain other tasks"):
        traced = il.trace(gpt2, batch, reference=batch, layers=[1])
    assert "of the same task, which keeps what heads do in all of them" in traced.to_markdown()
    with pytest.raises(il.InputError, match="donors and controls must be omitted with reference"):
        il.trace(gpt2, batch, "query", reference=batch)


@pytest.fixture(scope="module")
def ioi_like(load_tiny):
    """Four texts and donors that differ in their third token."""
    words = ("love", "like", "cat", "dog")
    texts = [il.Text(f"two : {word} the a", answer=" foo", against=" bar") for word in words]
    donors = [
        il.Text(f"two : {word} the a", answer=" foo", against=" bar") for word in reversed(words)
    ]
    return load_tiny("gpt2"), texts, donors


def test_wrong_donors_are_refused(no_type_checks, ioi_like, load_tiny):
    model, texts, donors = ioi_like
    prompts = [il.Prompt.parse("two : foo cat : bar red : bar dog :", answer="bar")]
    for arguments, words in (
        ((texts, "query"), "donors must be prompts for texts without demonstrations"),
        ((texts, donors[:2]), "donors must have one prompt per prompt, 4, got 2"),
        ((prompts, "classes"), "donors must be one of"),
        ((texts, [il.Text("two : love", answer=" foo")] * 4), "same number of tokens"),
    ):
        with pytest.raises(il.InputError, match=words):
            il.trace(model, *arguments)
    with pytest.raises(il.InputError, match="sites must be a list"):
        il.trace(model, texts, donors, sites="resid_pre")
    with pytest.raises(il.InputError, match="method must be one of 'exact', 'gradient'"):
        il.trace(model, texts, donors, method="slope")
    with pytest.raises(il.InputError, match="n_checked must be"):
        il.trace(model, texts, donors, n_checked=-1)


@pytest.mark.slow
def test_the_command_prints_the_map_and_writes_a_page(tmp_path):
    page = tmp_path / "trace.html"
    arguments = ["trace", "-m", "icl-mini", "-t", "sentiment-number", "-n", "8", "--layers", "2,5"]
    outcome = CliRunner().invoke(app, [*arguments, "--donors", "labels", "--html", str(page)])
    assert outcome.exit_code == 0, outcome.output
    assert "Exchanged at resid_pre" in outcome.output
    estimated = CliRunner().invoke(app, [*arguments, "--method", "gradient", "--checked", "5"])
    assert "The first 5 prompts were exchanged, too" in " ".join(estimated.output.split())
    refused = CliRunner().invoke(app, [*arguments, "--checked", "5"])
    assert "--checked has no effect with --method exact" in str(refused.exception)
    assert "<svg" in page.read_text() or "<img" in page.read_text()


@pytest.mark.slow
def test_the_command_takes_means_over_other_tasks():
    arguments = ["trace", "-m", "icl-mini", "-t", "sentiment-number", "-n", "6", "--layers", "1,5"]
    outcome = CliRunner().invoke(app, [*arguments, "--mean-over", "animal-country"])
    assert outcome.exit_code == 0, outcome.output
    text = " ".join(outcome.output.split())
    assert "means over 6 prompts, at all roles of the first layer, give" in text
    for options, words in (
        (["--donors", "query"], "pass either --donors or --mean-over, not both"),
        (["--method", "gradient"], "--mean-over needs --method exact"),
    ):
        refused = CliRunner().invoke(app, [*arguments, "--mean-over", "animal-country", *options])
        assert words in str(refused.exception)
