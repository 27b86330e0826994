"""The live view without a browser: its numbers are those of the public functions, and none outlives
its text.
"""

import html as html_text
import json
import math
import re
import threading
import time
from dataclasses import replace

import pytest
import torch
from cases import slow_except
from small_tokenizers import tokenizer_of
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import icl_lens as il
from icl_lens.foundation.defaults import N_RANDOM_SETS
from icl_lens.foundation.ranking_scores import SCORES
from icl_lens.models.view import ModelView
from icl_lens.report.live_view.code import python_code
from icl_lens.report.live_view.panels import Scene, compute, controls
from icl_lens.report.live_view.state import CHANGES
from icl_lens.report.live_view.static import static_html
from icl_lens.report.live_view.view import scores_of_atlas
from icl_lens.report.live_view.worker import Cancelled, Worker, cancellable

pytest.importorskip("anywidget", reason="anywidget is missing: there is no live view")

LiveState = il.results.LiveState
TEXT = "love : bar like : bar eight : foo two : foo one :"
HEADS = ("L2H0", "L1H1")
PATIENCE = 120.0


@pytest.fixture(scope="module")
def model(tiny):
    return il.load_model(str(tiny), device="cpu")


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory):
    """A tiny model whose tokenizer reads any text."""
    folder, tokenizer = tmp_path_factory.mktemp("bytes"), tokenizer_of("byte")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_layer=3, n_head=4, n_embd=32, n_positions=512)
    for part in (GPT2LMHeadModel(config), tokenizer):
        part.save_pretrained(folder)
    return il.load_model(str(folder))


@pytest.fixture
def view(model):
    view = il.live(model, il.Prompt.parse(TEXT, answer="foo"), heads=HEADS)
    yield view
    view.close()


@pytest.fixture(scope="module")
def atlas(model):
    """An atlas in which L1H2 has a kind, and with a score of a single head."""
    atlas = il.head_atlas(model, text=[TEXT, TEXT], n_sequences=3)
    atlas = atlas.with_scores({"listed": [(0, 1, 0.5)]})
    p_value = torch.ones(atlas.shape, dtype=torch.float64)
    p_value[1, 2] = 1e-6
    induction = replace(atlas["induction"], kind="induction", p_value=p_value, elsewhere=None)
    return replace(atlas, scores=atlas.scores | {"induction": induction})


def test_the_map_offers_the_scores_and_kinds_of_an_atlas(model, atlas):
    view = il.live(model, TEXT, atlas=atlas)
    view.close()
    offered = {score["name"]: score for score in view._about["atlas"]}
    assert list(offered) == list(atlas.scores)
    for name, score in offered.items():
        means = atlas[name].mean.flatten()
        numbers = [math.nan if value is None else value for value in score["values"]]
        assert numbers == pytest.approx(means.tolist(), nan_ok=True)
        assert score["texts"] == [atlas[name].format(float(value)) for value in means]
        assert score["outlined"][0] == str(atlas[name].top(1)[0]) or name == "induction"
    assert offered["induction"]["kind"] == "induction"
    assert offered["induction"]["outlined"] == ["L1H2"]
    assert offered["copying"]["outlined"] == list(map(str, atlas["copying"].top(4)))
    assert offered["listed"]["values"].count(None) == len(means) - 1  # the others have no number
    json.dumps(view._about, allow_nan=False)


def test_an_atlas_of_another_model_is_refused(model, atlas):
    with pytest.raises(il.InputError, match="atlas must be of the model of the view"):
        il.live(model, TEXT, atlas=replace(atlas, model="another"))
    with pytest.raises(il.InputError, match="atlas must be the result of"):
        scores_of_atlas(ModelView.of(model), {"induction": 1})


@pytest.fixture(scope="module")
def lasting(model):
    """A view that several tests use."""
    view = il.live(model, il.Prompt.parse(TEXT, answer="foo"), heads=HEADS)
    yield view
    view.close()


def settled(view):
    assert view.wait(PATIENCE)
    assert view.error == ""
    return view.numbers


def close(values, expected):
    """Whether the view's numbers are these to 1e-5."""
    expected = torch.as_tensor(expected).as_subclass(torch.Tensor).double()
    return torch.allclose(torch.tensor(values, dtype=torch.float64), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "change",
    slow_except(("removed", "keys"), CHANGES),
)
def test_numbers_are_those_of_the_public_functions(model, view, change):
    view.state = replace(view.state, change=change, by="exchange")
    numbers = settled(view)
    batch = il.tokenize(model, il.Prompt.parse(TEXT, answer="foo"))
    check_unedited_numbers(numbers, model, batch)
    query = numbers["exchange"]["other_query"]
    assert query in ("love", "like")
    edits = edits_by_change(model, query)
    ablation = il.ablate_with_controls(model, batch, HEADS, n_random=N_RANDOM_SETS)
    for heads, after in zip(
        [HEADS, *ablation.conditions["same layers"].sets],
        [numbers["change"]["after"], *numbers["change"]["draws"]],
        strict=True,
    ):
        assert close(after, edited_log_odds(model, batch, edits[change](heads)))
    for head in ("L1H0", "L2H3"):
        layer, index = il.Head.parse(head)
        after = edited_log_odds(model, batch, edits["query"]([head]))
        lost = numbers["answer"]["outcome"] - float(after)
        assert numbers["exchange"]["exchange"][layer][index] == pytest.approx(lost, abs=1e-4)


def edited_log_odds(model, batch, edit):
    """Return the log-odds of the second label against the first under an edit."""
    with il.edited(model, edit, batch=batch):
        scores = il.score(model, batch)[0]
    return scores[1] - scores[0]


def check_unedited_numbers(numbers, model, batch):
    """Numbers of the unedited prompt, and of single heads and demonstrations."""
    scores = il.score(model, batch)[0]
    assert close(numbers["answer"]["log_probs"], scores)
    assert close(numbers["answer"]["outcome"], scores[1] - scores[0])
    acts = il.capture(model, batch)
    assert close(numbers["heads"]["increase"], il.head_log_prob_increase(acts)[0])
    assert close(
        numbers["heads"]["contrast"],
        il.head_log_prob_increase(acts, against=batch.label_tokens[:1])[0],
    )
    assert close(numbers["effect"]["effect"], il.head_effects(model, batch).log_odds[0])
    assert close(
        numbers["demonstrations"]["effects"], il.demonstration_effects(model, batch).log_odds[0]
    )
    assert close(numbers["attention"]["weights"], acts.pattern[0, 1, 1, : int(batch.last[0]) + 1])
    assert close(numbers["attention"]["to_labels"][0], acts.attention_to_labels()[0, 2, 0])


def edits_by_change(model, query):
    """Return functions of heads that return the edit of each change.

    Donors are written out by hand: another query, the texts of the two labels exchanged, the labels
    exchanged.
    """
    texts = {
        "query": f"love : bar like : bar eight : foo two : foo {query} :",
        "keys": "eight : bar two : bar love : foo like : foo one :",
        "values": "love : foo like : foo eight : bar two : bar one :",
    }
    donors = {name: il.tokenize(model, il.Prompt.parse(text)) for name, text in texts.items()}
    labels = {"positions": "last", "align": "labels"}
    return {
        "removed": lambda heads: il.Ablate(heads, positions="last"),
        "query": lambda heads: il.Patch(heads, donors["query"], activation="q", positions="last"),
        "keys": lambda heads: il.Patch(heads, donors["keys"], activation="k", **labels),
        "values": lambda heads: il.Patch(heads, donors["values"], activation="v", **labels),
    }


@pytest.mark.parametrize(
    ("change", "by"),
    [
        pytest.param(*case, marks=() if case[0] == "keys" else pytest.mark.slow)
        for case in zip(CHANGES, SCORES, strict=True)
    ],
)
def test_the_copied_code_gives_the_same_numbers(view, change, by, capsys):
    view.state = replace(view.state, change=change, by=by)
    numbers, namespace = settled(view), {}
    exec(view.code, namespace)
    assert close(numbers["answer"]["log_probs"], namespace["scores"][0])
    assert close(
        [numbers["change"][name] for name in ("before", "after")], namespace["log_odds"][:2]
    )
    assert close(numbers["change"]["draws"], namespace["log_odds"][2:])
    assert close(numbers["demonstrations"]["effects"], namespace["demonstrations"].log_odds[0])
    expected_scores = {
        "contrast": lambda: namespace["contrast"][0],
        "increase": lambda: namespace["increase"][0],
        "effect": lambda: namespace["effects"].log_odds[0],
        "exchange": lambda: namespace["exchange"],
    }[by]()
    assert close(numbers["heads" if by in ("contrast", "increase") else by][by], expected_scores)
    assert f"{numbers['change']['after']:+.3f}" in capsys.readouterr().out
    assert max(map(len, view.code.splitlines())) <= 120


@pytest.mark.parametrize(
    "prompt",
    [
        il.Prompt.parse(TEXT),
        il.Prompt(
            [il.Demonstration("hot", "cold"), il.Demonstration("up", "down")],
            "big",
            "small",
            ["cold", "down", "small"],
        ),
        il.Prompt(
            [il.Demonstration("love", "very bad"), il.Demonstration("two", "very good")],
            "one",
            "very good",
        ),
        il.Prompt([il.Demonstration("love", "bar"), il.Demonstration("two", "bar")], "one"),
        il.Prompt(
            [il.Demonstration("'\"\\n{x}", "bar"), il.Demonstration("two", "foo")],
            "\u202e one",
            "bar",
        ),
    ],
    ids=["no answer", "own answer", "alike labels", "one label", "quotes"],
)
@pytest.mark.parametrize(
    "template",
    [
        il.Template(),
        pytest.param(
            il.Template("{text} -> {label}", "{text} ->", separator="\n"), marks=pytest.mark.slow
        ),
    ],
)
def test_any_prompt_has_code_that_gives_its_numbers_or_a_reason(bytes_model, prompt, template):
    view = il.live(bytes_model, prompt, template=template, heads=["L1H0"])
    numbers, namespace = settled(view), {}
    exec(view.code, namespace)
    assert close(numbers["answer"]["log_probs"], namespace["scores"][0])
    assert close(numbers["change"]["after"], namespace["log_odds"][1])
    view.state = replace(view.state, change="keys")
    change = settled(view)["change"]
    assert ("after" in change) != ("left_out" in change)
    assert ("# Left out" in view.code) == ("left_out" in change)
    view.close()


def test_random_sets_that_leave_the_layers_say_so(model, view):
    view.state = replace(view.state, heads=("L2H0", "L1H0"))
    assert re.fullmatch(
        r"20 random sets of the same layers( \(\d+ different\))?",
        settled(view)["change"]["controls"],
    )
    view.state = replace(view.state, heads=("L2H0", "L2H1", "L2H2"))
    assert "20 random sets of the same or the nearest layers" in settled(view)["change"]["controls"]
    assert "same or the nearest layers" in static_html("", view.state.to_dict(), view.numbers, "x")
    view.state = replace(view.state, heads=("L2H0",))
    assert settled(view)["change"]["controls"] == "the 3 other heads of its layer"
    few = [[il.Head(2, 1)], [il.Head(2, 1)], [il.Head(2, 3)]]
    assert controls(ModelView.of(model), [il.Head(2, 0)], few) == "2 random heads of its layer"


def test_whole_labels_have_their_probabilities(bytes_model):
    prompt = il.Prompt(
        [il.Demonstration("love", "very bad"), il.Demonstration("two", "very good")],
        "one",
        "very good",
    )
    view = il.live(bytes_model, prompt)
    answer = settled(view)["answer"]
    whole = il.whole_label_log_probs(bytes_model, il.tokenize(bytes_model, prompt))[0].exp()
    assert close(list(answer["whole_probs"].values()), whole)
    assert answer["appended"].replace("␣", " ").strip().startswith("very")
    assert answer["choices"] == [True, True]
    view.close()


def test_a_state_is_a_plain_value(view):
    state = view.state
    assert state.prompt == il.Prompt.parse(TEXT, answer="foo")
    assert LiveState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
    before = settled(view)["answer"]["outcome"]
    view.state = state.with_prompt(il.Prompt.parse(TEXT.replace("two", "happy"), answer="foo"))
    assert "change" not in view.numbers or view.numbers["answer"]["outcome"] != before
    assert settled(view)["answer"]["outcome"] != before
    assert view.state.heads == HEADS
    view.state = state
    assert settled(view)["answer"]["outcome"] == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"demonstrations": []}, "the prompt has no demonstration"),
        ({"query": " "}, "the query is empty"),
        ({"demonstrations": [["", "bar"]]}, "has an empty text"),
        ({"demonstrations": [["love"]]}, "state must be what LiveState.to_dict returns"),
        ({"answer": "baz"}, "'baz' is not one of the labels"),
        ({"heads": ["L99H0"]}, "L99H0"),
        ({"change": "doubled"}, "change must be one of"),
        ({"by": "size"}, "by must be one of"),
        ({"query": 3}, "query"),
    ],
)
def test_what_is_typed_wrong_is_said_and_shows_no_number(lasting, changes, message, no_type_checks):
    view = lasting
    settled(view)
    view._look = {"state": view._look["state"] | changes, "text": "t1", "pick": "p1"}
    assert view.wait(PATIENCE)
    assert message in view.error
    assert view.numbers == {}
    view._look = {
        "state": LiveState.of(il.Prompt.parse(TEXT)).to_dict(),
        "text": "t2",
        "pick": "p2",
    }
    assert settled(view)["answer"]["n_tokens"] == 14


@pytest.mark.parametrize(
    "message",
    [
        {"_about": {"model": "<b>"}},
        {"_status": {"error": "x"}, "_code": {"python": "import os"}, "_answer": {"text": "x"}},
        {"_look": {}},
        {"_look": None},
        {"_look": {"state": [], "text": "t", "pick": "p"}},
        {"_look": {"state": {}, "text": "t" * 1000, "pick": 3}},
        {"_pins": "x"},
        {"_pins": [None, 3, {"name": "A"}, {"name": 1, "state": {}, "answer": {}}]},
        {"_pins": [{"name": "A", "state": {"query": "x" * 200_000}, "answer": {}}]},
        {"_esm": "alert(1)", "_css": "", "unknown": 1},
    ],
)
def test_messages_that_write_what_is_pythons_are_ignored(lasting, message):
    view = lasting
    before = settled(view), view.state, repr(view), view.code, view.error, view._about, view._esm
    view.set_state(message)
    assert (
        settled(view),
        view.state,
        repr(view),
        view.code,
        view.error,
        view._about,
        view._esm,
    ) == before
    assert view.pins == []


def test_the_newest_pins_are_kept(lasting):
    pins = [{"name": "A", "state": {"query": str(number)}, "answer": {}} for number in range(40)]
    lasting.set_state({"_pins": pins})
    assert lasting.pins == pins[-12:]
    lasting.set_state({"_pins": []})
    assert lasting.pins == []


def test_a_state_that_makes_no_prompt_has_a_repr(lasting, no_type_checks):
    lasting.set_state({"_look": {"state": {"query": 3}, "text": "t", "pick": "p"}})
    assert lasting.wait(PATIENCE)
    assert "no valid prompt" in repr(lasting)
    assert "text/plain" in lasting._repr_mimebundle_()[0]
    lasting.set_state(
        {
            "_look": {
                "state": LiveState.of(il.Prompt.parse(TEXT)).to_dict(),
                "text": "t3",
                "pick": "p3",
            }
        }
    )
    assert settled(lasting)["answer"]["n_tokens"] == 14


def test_twenty_edits_typed_fast_show_the_last_alone(model, view):
    """Whenever a panel arrives, those of other texts do not count as the view's numbers."""
    stale = []

    def sent(change):
        text = view._look["text"]
        stale.extend(
            panel
            for panel in view.numbers.values()
            if panel["text"] != text and text == view._look["text"]
        )

    view.observe(
        sent,
        names=[
            "_answer",
            "_heads",
            "_change",
            "_attention",
            "_demonstrations",
            "_effect",
            "_code",
            "_status",
        ],
    )
    state = view.state.to_dict()
    for number in range(20):
        view._look = {
            "state": state | {"query": "one" + " two" * number},
            "text": f"t{number}",
            "pick": f"p{number}",
        }
        time.sleep(0.02)
    numbers = settled(view)
    batch = il.tokenize(
        model, il.Prompt.parse(TEXT.replace("one :", "one" + " two" * 19 + " :"), answer="foo")
    )
    assert close(numbers["answer"]["log_probs"], il.score(model, batch)[0])
    assert all(panel["text"] == "t19" for panel in numbers.values())
    assert stale == []


def test_a_newer_request_stops_a_pass_in_between():
    ran, done, started = [], [], threading.Event()

    class Slow(nn.Module):
        def forward(self, number):
            ran.append(number)
            started.set()
            time.sleep(0.02)

    modules = nn.ModuleList([Slow() for _ in range(500)])

    def compute(request, is_cancelled):
        for module in modules[: 3 if request == "second" else None]:
            module(request)
        done.append(request)

    worker = Worker(compute)
    worker.submit("first")
    assert started.wait(PATIENCE)
    worker.submit("second")
    assert worker.wait(PATIENCE)
    assert done == ["second"]
    assert 0 < ran.count("first") < 500
    assert ran.count("second") == 3
    worker.close()


def test_only_the_threads_own_passes_are_cancelled():
    module = nn.Identity()
    outputs = []
    with cancellable(lambda: True):
        thread = threading.Thread(target=lambda: outputs.append(module(1)))
        thread.start()
        thread.join()
        with pytest.raises(Cancelled):
            module(1)
    assert outputs == [1]
    assert module(2) == 2  # the hook is removed


def test_a_failed_computation_is_said_and_the_next_one_runs(view, monkeypatch, caplog):
    settled(view)
    monkeypatch.setattr("icl_lens.report.live_view.panels.capture", lambda *args, **kwargs: 1 / 0)
    view.state = view.state.with_prompt(
        il.Prompt.parse(TEXT.replace("love", "three"), answer="foo")
    )
    assert view.wait(PATIENCE)
    assert view.error == "ZeroDivisionError: division by zero"
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    view.state = view.state.with_prompt(il.Prompt.parse(TEXT.replace("love", "nine"), answer="foo"))
    settled(view)


@pytest.mark.slow
def test_going_back_costs_no_pass_unless_the_model_was_edited(model, view, monkeypatch):
    first = view.state
    before = settled(view)["answer"]["outcome"]
    view.state = first.with_prompt(il.Prompt.parse(TEXT.replace("love", "three"), answer="foo"))
    settled(view)
    passes = []
    monkeypatch.setattr(
        "icl_lens.report.live_view.panels.capture",
        lambda *args, **kwargs: passes.append(args) or il.capture(*args, **kwargs),
    )
    view.state = first
    assert settled(view)["answer"]["outcome"] == before
    assert passes == []
    model.add_hook("blocks.2.attn.hook_z", lambda z, hook: z * 0)
    try:
        view.state = first
        assert settled(view)["answer"]["outcome"] != before
    finally:
        model.reset_hooks()
    assert passes


def test_the_static_version_has_the_state_and_runs_nothing(bytes_model):
    hostile = "<img src=x onerror=alert(1)>"
    prompt = il.Prompt(
        [il.Demonstration(hostile, "bar"), il.Demonstration("two", "foo")], "</script>one", "foo"
    )
    state = LiveState.of(prompt, heads=["L1H0"])
    panels = dict(compute(Scene(bytes_model, prompt, il.Template()), state))
    page = static_html("a model", state.to_dict(), panels, "icl-live-1")
    text = html_text.unescape(re.sub("<[^>]*>", "", page))
    assert not re.search(
        r"<(img|script|style|iframe)|\son\w+=", " ".join(re.findall("<[^>]*>", page))
    )
    assert hostile in text
    assert "</script>one" in text
    assert f"{panels['answer']['probs'][1]:.1%}" in text
    assert "the 3 other heads of its layer" in text
    assert len(page) < 30_000
    empty = static_html("a model", state.to_dict(), {}, "icl-live-1")
    assert hostile in html_text.unescape(empty)


@pytest.mark.slow
def test_to_html_is_the_page_of_explain(view, tmp_path):
    view.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert (
        page
        == il.explain(
            view._model, il.Prompt.parse(TEXT, answer="foo"), by="contrast", why="L1H1"
        ).to_html()
    )


def test_a_missing_widget_library_is_said_in_one_sentence(model, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "anywidget", None)
    monkeypatch.delitem(
        __import__("sys").modules, "icl_lens.report.live_view.widget", raising=False
    )
    with pytest.raises(il.InputError, match="pip install anywidget"):
        il.live(model, TEXT)


@pytest.mark.parametrize("prompt", [il.Text("love bar"), 3, None])
def test_other_texts_are_refused(model, prompt, no_type_checks):
    with pytest.raises(il.InputError, match=r"prompt must be a string or an il\.Prompt"):
        il.live(model, prompt)


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["very good", "bar"])
def test_queries_are_exchanged_at_the_same_decision_of_labels_that_begin_alike(bytes_model, answer):
    """The other query's answer has one decision more, or one less, than the answer."""
    labels = {"love": "very bad", "two": "very good", "sad": "bar"}
    prompt = il.Prompt(
        [il.Demonstration(*text_and_label) for text_and_label in labels.items()], "one", answer
    )
    scene, namespace = Scene(bytes_model, prompt, il.Template()), {}
    state = replace(LiveState.of(prompt, heads=["L1H0"]), change="query")
    after = dict(compute(scene, state))["change"]["after"]
    tokenized = il.tokenize(bytes_model, replace(prompt, query=scene.source("query").query))[-1:]
    assert (tokenized.decisions.n_appended > 0).tolist() == [answer != "bar"]
    edit = il.Patch(["L1H0"], tokenized, activation="q", positions="last")
    assert close(after, scene.outcomes(il.score(bytes_model, scene.batch, [[edit]])[0])[0])
    exec(python_code(scene, state), namespace)
    assert close(after, namespace["log_odds"][1])


@pytest.mark.slow
def test_the_copied_code_loads_the_same_precision():
    prompt, namespace = il.Prompt.parse(TEXT, answer="foo"), {}
    scene = Scene(il.load_model("icl-mini", dtype=torch.float64), prompt, il.Template())
    exec(python_code(scene, LiveState.of(prompt)), namespace)
    assert namespace["model"].W_U.dtype == torch.float64


@pytest.mark.slow
def test_another_hook_at_the_same_place_gives_its_own_numbers(bytes_model):
    prompt = il.Prompt.parse(TEXT, answer="foo")
    view, batch = il.live(bytes_model, prompt), il.tokenize(bytes_model, prompt)
    settled(view)
    try:
        for factor in (0.0, 3.0):
            bytes_model.add_hook("blocks.1.attn.hook_z", lambda z, hook, factor=factor: z * factor)
            view.state = replace(view.state, heads=(f"L2H{int(factor)}",))
            assert close(settled(view)["answer"]["log_probs"], il.score(bytes_model, batch)[0])
            bytes_model.reset_hooks()
    finally:
        bytes_model.reset_hooks()
        view.close()
