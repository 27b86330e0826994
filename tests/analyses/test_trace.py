"""Traces of planted circuits, their sentences on made-up numbers, plain texts, and the command.
Their numbers: the sweep.
"""

from dataclasses import replace

import numpy as np
import pytest
from planted import build
from typer.testing import CliRunner

import icl_lens as il
from icl_lens.analyses.trace_result import layers_in_words
from icl_lens.cli import app

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


@pytest.mark.slow
def test_the_command_prints_the_map_and_writes_a_page(tmp_path):
    page = tmp_path / "trace.html"
    arguments = ["trace", "-m", "icl-mini", "-t", "sentiment-number", "-n", "8", "--layers", "2,5"]
    outcome = CliRunner().invoke(app, [*arguments, "--donors", "labels", "--html", str(page)])
    assert outcome.exit_code == 0, outcome.output
    assert "Exchanged at resid_pre" in outcome.output
    assert "<svg" in page.read_text() or "<img" in page.read_text()
