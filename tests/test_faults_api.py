"""The library misused: InputError with one sentence, whatever the function; and edits that cannot go wrong silently."""

import copy
import threading

import faults
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import icl_lens as il
from icl_lens import metrics
from icl_lens.interventions.controlled_ablation import ablate_with_controls, random_head_sets
from icl_lens.models.view import ModelView
from icl_lens.prompts.prompt import Template

HEADS = [il.Head(0, 1), il.Head(1, 2)]
NAN, INF = float("nan"), float("inf")
SCORES = torch.tensor([[-1.0, -2.0], [-2.0, -1.0]])
ANSWER = torch.tensor([0, 1])


def enter(block):
    with block:
        pass


def spoilt(value):
    scores = SCORES.clone()
    scores[1, 0] = value
    return scores


TEXT = [
    (lambda: il.Prompt.parse(""), "no colon standing alone"),
    (lambda: il.Prompt.parse("a : b"), "has no query"),
    (lambda: il.Prompt.parse(3), "is no text"),
    (lambda: il.Prompt.parse(None), "is no text"),
    (lambda: il.Prompt.parse(b"a : b c :"), "is no text"),
    (lambda: il.Prompt.parse("a : b \ud800 :"), "no valid Unicode"),
    (lambda: il.Demonstration("", "x"), "has an empty text"),
    (lambda: il.Demonstration("x", " "), "has an empty label"),
    (lambda: il.Demonstration(1, "x"), "is no text"),
    (lambda: il.Demonstration("x", None), "is no text"),
    (lambda: il.Demonstration("x", ["a"]), "is no text"),
    (lambda: il.Demonstration("\udcff", "x"), "no valid Unicode"),
    (lambda: il.Prompt([], "x"), "has no demonstration"),
    (lambda: il.Prompt([il.Demonstration("a", "b")], ""), "has no query"),
    (lambda: il.Prompt([il.Demonstration("a", "b")], 3), "is no text"),
    (lambda: il.Prompt([il.Demonstration("a", "b")], "x", answer="c"), "'c' is not one of the labels"),
    (lambda: il.Prompt([il.Demonstration("a", "b")], "x", labels="b"), "is one string"),
    (lambda: il.Prompt([il.Demonstration("a", "b")], "x", labels=["b", "b"]), "repeat one"),
    (lambda: il.Prompt([il.Demonstration("a", "b")], "x", labels=["c"]), "not among the labels"),
    (lambda: il.Prompt([il.Demonstration("a", "b")], "x", labels=["b", ""]), "contain an empty one"),
    (lambda: il.Prompt([il.Demonstration("a", "b")], "x", labels=["b", 1]), "is no text"),
    (lambda: Template("{text}", "{text}"), "holds {label} 0 times"),
    (lambda: Template("{text} {text} {label}", "{text}"), "holds {text} 2 times"),
    (lambda: Template("{label} {text}", ""), "before {text}"),
    (lambda: Template("{text} : {label}", "{text}"), "cut before the label"),
    (lambda: il.load_task("none"), "there is no task"),
    (lambda: il.load_task("sentiment-number", n=0), "must both be at least 1"),
    (lambda: il.load_task("sentiment-number", n=10**9), "more than the 1,000,000"),
    (lambda: il.load_task("sentiment-number", layout="x"), "is not known"),
    (lambda: il.load_task("sentiment-number", query_class="x"), "is not known"),
    (lambda: il.load_task("sentiment-number", classes="x"), "is not known"),
    (lambda: il.load_task("sentiment-number", demonstrations=0), "must both be at least 1"),
    (lambda: il.load_task("sentiment-number", labels="ab"), "2 different words"),
    (lambda: il.load_task("sentiment-number", labels=["a", "a"]), "2 different words"),
    (lambda: il.load_task("sentiment-number", max_words=0), "leaves no text"),
    (lambda: il.load_task("sentiment-number", columns="text"), "must be two names"),
    (lambda: il.load_task("sentiment-number", n=1.5), "n=1.5 is no whole number"),
    (lambda: il.load_task("sentiment-number", n="3"), "n='3' is no whole number"),
    (lambda: il.load_task("sentiment-number", demonstrations=None), "demonstrations=None is no whole number"),
    (lambda: il.load_task("sentiment-number", max_words="2"), "max_words='2' is no whole number"),
    (lambda: il.load_task("sentiment-number", seed=None), "seed=None is no whole number"),
    (lambda: il.load_task("sentiment-number", labels={"foo", "bar"}), "have no order"),
    (lambda: il.load_task("sentiment-number", labels={"number": "foo", "sentiment": "bar"}), "have no order"),
    (lambda: il.load_task("sentiment-number", path=3), "path=3 is no path"),
    (lambda: il.load_task("mine", path="x" * 300 + ".csv"), "cannot be looked at: File name too long"),
    (lambda: il.load_task(None), "is no text"),
    (lambda: il.Head.parse(None), "names no head"),
    (lambda: il.load_model("x" * 300), "File name too long; give another"),
    (lambda: il.load_model("icl-mini", device="meta"), "cannot be used here"),
    (lambda: il.load_model("icl-mini", device="xla"), "cannot be used here"),
    (lambda: il.load_model("icl-mini", dtype=torch.int32), "holds no weights that can be read"),
    (lambda: il.load_model("icl-mini", dtype="int8x"), "is not known"),
    (lambda: il.load_model("icl-mini", device="gpu"), "is no device"),
    (lambda: il.load_model("icl-mini", device="cuda:99"), "is not there"),
    (lambda: il.load_model("icl-mini", revision="x"), "no revision"),
    (lambda: il.load_model(""), "''"),
    (lambda: metrics.accuracy(spoilt(NAN), ANSWER), "prompt 1 are NaN"),
    (lambda: metrics.accuracy(spoilt(INF), ANSWER), "prompt 1 are infinite"),
    (lambda: metrics.is_correct(spoilt(NAN), ANSWER), "NaN"),
    (lambda: metrics.is_correct(torch.full((2, 2), NAN), ANSWER), "prompt 0 are NaN"),
    (lambda: metrics.is_correct(torch.full((2, 2), -INF), ANSWER), "infinite"),
    (lambda: metrics.is_correct(SCORES, torch.tensor([-1, 0])), "have no answer"),
    (lambda: metrics.spearman(torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0])), "are NaN and have no rank"),
    (lambda: metrics.bootstrap_interval([1.0, NAN]), "not finite"),
    (lambda: metrics.bootstrap_interval([1.0]), "at least two"),
    (lambda: metrics.bootstrap_interval([1.0, 2.0], level=2), "between 0 and 1"),
    (lambda: metrics.bootstrap_interval([1.0, 2.0], draws=0), "at least 1"),
    (lambda: metrics.label_log_odds(SCORES, torch.tensor([-1, 0])), "leave them out"),
    (lambda: metrics.label_log_odds(SCORES[:, :1], torch.tensor([0, 0])), "one label only"),
]
MODEL = [
    (lambda m, b, o: il.tokenize(m, []), "there is no prompt"),
    (lambda m, b, o: il.tokenize(m, "qqzz : foo two :"), "does not know"),
    (lambda m, b, o: il.tokenize(m, ["love : foo one :"], labels=["bar"]), "must name every label"),
    (lambda m, b, o: il.tokenize("icl-mini", ["love : foo one :"]), "str is no model with a tokenizer"),
    (lambda m, b, o: il.tokenize(m, None), "None is no prompt"),
    (lambda m, b, o: il.tokenize(m, ["love : foo one :", 3]), "3 is no prompt"),
    (lambda m, b, o: il.tokenize(m, "love : foo one :", template="{text} : {label}"), "is no template"),
    (lambda m, b, o: il.tokenize(m, "love : foo one :", shared_prefix="x"), "shared_prefix='x' is not known"),
    (lambda m, b, o: il.tokenize(m, "love : foo one :", prepend_bos="no"), "prepend_bos='no' must be True, False"),
    (lambda m, b, o: il.compare(il.explain(m, "love : foo one : bar two :"), 3), "3 is no explanation"),
    (lambda m, b, o: il.tokenize_text(m, 3), "3 is no text"),
    (lambda m, b, o: il.tokenize_text(m, ["love", 3]), "3 is no text"),
    (lambda m, b, o: il.tokenize_text(m, "love \ud800"), "no valid Unicode"),
    (lambda m, b, o: il.tokenize_text(m, ""), "is empty"),
    (lambda m, b, o: il.tokenize_text(m, []), "there is no text"),
    (lambda m, b, o: il.tokenize_text(m, "love", targets=10**6), "10"),
    (lambda m, b, o: il.tokenize_text(m, "love", targets=-2), "-2"),
    (lambda m, b, o: il.tokenize_text(m, "love", positions=99), "99"),
    (lambda m, b, o: il.PromptBatch.from_tokens([]), "no tokens"),
    (lambda m, b, o: il.PromptBatch.from_tokens([[]]), "no tokens"),
    (lambda m, b, o: il.PromptBatch.from_tokens([1, 2, 3]), "no rows of token ids"),
    (lambda m, b, o: il.PromptBatch.from_tokens([["a"]]), "no rows of token ids"),
    (lambda m, b, o: il.PromptBatch.from_tokens(None), "no rows of token ids"),
    (lambda m, b, o: il.PromptBatch.from_tokens([[-1]], model=m), "-1 is no token id"),
    (lambda m, b, o: il.PromptBatch.from_tokens([[10**6]], model=m), "vocabulary"),
    (lambda m, b, o: il.top_heads(il.capture(m, b), "foo", k=1), "targets='foo' are no token ids"),
    (lambda m, b, o: il.top_heads(il.capture(m, b), None, k=1), "targets=None are no token ids"),
    (lambda m, b, o: il.top_heads(il.capture(m, b), b.answer_tokens > 0, k=1), "torch.bool"),
    (lambda m, b, o: il.top_heads(il.capture(m, b), b.answer_tokens * 1j, k=1), "torch.complex64"),
    (lambda m, b, o: il.top_heads(il.capture(m, b), b.answer_tokens, k="3"), "k='3' is no whole number"),
    (lambda m, b, o: il.top_subheads(il.capture(m, b), b.answer_tokens, k=1.5), "k=1.5 is no whole number"),
    (lambda m, b, o: il.head_log_prob_increase(il.capture(m, b), b.answer_tokens, against="bar"), "against='bar' are"),
    (lambda m, b, o: il.capture(m, il.PromptBatch.from_tokens([[10**6]])), "tokenized for another model"),
    (lambda m, b, o: il.last_log_probs(m, il.PromptBatch.from_tokens([[10**6]])), "tokenized for another model"),
    (lambda m, b, o: il.capture(m, "love"), "give it il.tokenize"),
    (lambda m, b, o: il.capture(None, b), "is no model"),
    (lambda m, b, o: il.capture("icl-mini", b), "is no model"),
    (lambda m, b, o: il.capture(o, b), "another"),
    (lambda m, b, o: il.last_log_probs(o, b), "another"),
    (lambda m, b, o: il.label_log_probs(o, b), "another"),
    (lambda m, b, o: il.head_effects(o, b), "another"),
    (lambda m, b, o: ablate_with_controls(o, b, HEADS), "another"),
    (lambda m, b, o: enter(il.ablate_heads(o, HEADS, mode="mean", reference=b)), "the reference"),
    (lambda m, b, o: enter(il.patch_heads(o, HEADS, b, activation="z")), "the source"),
    (lambda m, b, o: enter(il.patch_heads(o, HEADS, b, activation="q")), "the source"),
    (lambda m, b, o: enter(il.ablate_heads(m, [il.Head(99, 0)])), "L99H0"),
    (lambda m, b, o: enter(il.ablate_heads(m, [(0, -1)])), "L0H-1"),
    (lambda m, b, o: enter(il.ablate_heads(m, None)), "heads=None are no heads"),
    (lambda m, b, o: enter(il.ablate_heads(m, HEADS, mode="x")), "is not known"),
    (lambda m, b, o: enter(il.block_attention(m, HEADS, None)), "edges must be a tensor of booleans"),
    (lambda m, b, o: enter(il.block_attention(m, HEADS, torch.zeros(1, 9, 9))), "got (1, 9, 9) torch.float32"),
    (lambda m, b, o: enter(il.scale_label_attention(m, HEADS, b, "x", renormalize=True)), "are no numbers"),
    (
        lambda m, b, o: il.choose_strength(m, HEADS, b, b, fix="majority", max_accuracy_drop=NAN),
        "max_accuracy_drop=nan must not",
    ),
    (
        lambda m, b, o: il.choose_strength(m, HEADS, b, b, fix="majority", max_accuracy_drop=-1),
        "max_accuracy_drop=-1 must not",
    ),
    (lambda m, b, o: enter(il.ablate_heads(m, HEADS, mode="mean")), "needs reference="),
    (lambda m, b, o: enter(il.ablate_heads(m, HEADS, reference=b)), "takes no reference="),
    (lambda m, b, o: enter(il.ablate_heads(m, HEADS, mode="mean", reference=[])), "no reference prompt"),
    (lambda m, b, o: enter(il.ablate_heads(m, HEADS, positions="x")), "is not known"),
    (lambda m, b, o: enter(il.patch_heads(m, HEADS, b, activation="x")), "is not known"),
    (lambda m, b, o: enter(il.patch_heads(m, HEADS, b, activation="k", positions="last")), "every position"),
    (lambda m, b, o: enter(il.patch_heads(m, HEADS, b, activation="z", align="x")), "is not known"),
    (lambda m, b, o: enter(il.patch_heads(m, HEADS, b, activation="z", align="labels")), "needs batch="),
    (lambda m, b, o: enter(il.remove_position(m, HEADS, strength=NAN)), "between 0"),
    (lambda m, b, o: enter(il.remove_position(m, HEADS, strength=2)), "between 0"),
    (lambda m, b, o: enter(il.debias(m, b, HEADS, recency=NAN)), "between 0"),
    (lambda m, b, o: enter(il.debias(m, b, HEADS, majority=NAN)), "must not be negative"),
    (lambda m, b, o: enter(il.debias(m, b, HEADS, majority=-1)), "must not be negative"),
    (lambda m, b, o: il.choose_strength(m, HEADS, b, b, fix="x"), "is not known"),
    (lambda m, b, o: il.choose_strength(m, HEADS, b, b, fix="majority", strengths=[NAN]), "must be finite"),
    (lambda m, b, o: il.choose_strength(m, HEADS, b, b[[1, 0, 2]], fix="majority"), "the same prompts"),
    (lambda m, b, o: il.choose_strength(m, HEADS, b, b[:1], fix="majority"), "not the same ones"),
    (lambda m, b, o: il.locate_heads(m, b, k=0), "1 to 12 heads"),
    (lambda m, b, o: il.locate_heads(m, b, k=13), "1 to 12 heads"),
    (lambda m, b, o: il.locate_heads(m, b, k=1, batch_size=0), "at least 1"),
    (lambda m, b, o: il.head_effects(m, b, positions="x"), "is not known"),
    (lambda m, b, o: il.head_effects(m, b, method="x"), "is not known"),
    (lambda m, b, o: il.head_effects(m, b, pass_tokens=0), "at least 1"),
    (lambda m, b, o: random_head_sets(ModelView.of(m), ModelView.of(m).heads(), draws=1, seed=0), "too few random"),
    (lambda m, b, o: il.explain(m, "love : foo one :", k=0), "at least 1"),
    (lambda m, b, o: il.explain(m, "love : foo one :", n_ablated=99), "choose 1 to"),
    (lambda m, b, o: il.explain(m, "love : foo one :", answer="z"), "is not one of the labels"),
    (lambda m, b, o: list(b.split(0)), "at least 1"),
    (lambda m, b, o: b[[]], "picks no row"),
    (lambda m, b, o: b.at(99), "99"),
]


@pytest.mark.parametrize(("misuse", "words"), TEXT, ids=range(len(TEXT)))
def test_without_a_model(no_type_checks, misuse, words):
    with pytest.raises(il.InputError) as caught:
        misuse()
    faults.assert_sentence(str(caught.value), words)


@pytest.mark.parametrize(("misuse", "words"), MODEL, ids=range(len(MODEL)))
def test_with_a_model(no_type_checks, gpt2, gpt2_batch, icl_mini, misuse, words):
    with pytest.raises(il.InputError) as caught:
        misuse(gpt2, gpt2_batch, icl_mini)
    faults.assert_sentence(str(caught.value), words)


# Edits


def test_blocks_end_in_any_order(gpt2, gpt2_batch):
    """The second block's edit stays when the first one ends before it, and nothing is left when both have ended."""
    plain = il.last_log_probs(gpt2, gpt2_batch)
    with il.ablate_heads(gpt2, [HEADS[1]]):
        second_only = il.last_log_probs(gpt2, gpt2_batch)
    first, second = il.ablate_heads(gpt2, [HEADS[0]]), il.ablate_heads(gpt2, [HEADS[1]])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(il.last_log_probs(gpt2, gpt2_batch), second_only)
    second.__exit__(None, None, None)
    assert torch.equal(il.last_log_probs(gpt2, gpt2_batch), plain)
    assert not torch.equal(plain, second_only)
    assert not any(len(point.fwd_hooks) for point in gpt2.hook_dict.values())


def test_blocks_of_the_same_hooks_end_in_any_order(gpt2, gpt2_batch):
    with il.remove_position(gpt2, [HEADS[0]]):
        wanted = il.last_log_probs(gpt2, gpt2_batch)
    first, second = il.remove_position(gpt2, [il.Head(0, 3)]), il.remove_position(gpt2, [HEADS[0]])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(il.last_log_probs(gpt2, gpt2_batch), wanted)
    second.__exit__(None, None, None)


def test_another_batch_of_the_same_shape_is_refused(gpt2):
    one, other = (il.tokenize(gpt2, f"{word} : foo one : bar two :") for word in ("love", "hate"))
    with il.scale_label_attention(gpt2, HEADS, one, [[0.5, 1.0]], renormalize=True):
        il.last_log_probs(gpt2, one)
        with pytest.raises(il.InputError, match="run the same batch"):
            il.last_log_probs(gpt2, other)


def test_a_pass_that_is_shorter_than_the_batch_is_refused(gpt2):
    """Its labels would be looked for among other tokens."""
    longer, shorter = (il.tokenize(gpt2, f"love : foo one : bar {words} :") for words in ("two three", "two"))
    with (
        il.scale_label_attention(gpt2, HEADS, longer, [[0.5, 1.0]], renormalize=True),
        pytest.raises(il.InputError, match="the forward pass is shorter"),
    ):
        il.last_log_probs(gpt2, shorter)


def test_targets_of_any_whole_number(gpt2, gpt2_batch):
    """Token ids in few bits are the same ids."""
    acts, targets = il.capture(gpt2, gpt2_batch), gpt2_batch.answer_tokens
    wanted = il.head_log_prob_increase(acts, targets)
    for dtype in (torch.int32, torch.int16):
        assert torch.equal(il.head_log_prob_increase(acts, targets.to(dtype)), wanted)


def test_another_thread_is_refused_while_a_block_is_open(gpt2, gpt2_batch):
    said = []

    def ask():
        for ask_model in (lambda: il.capture(gpt2, gpt2_batch), lambda: gpt2(gpt2_batch.tokens)):
            try:
                ask_model()
            except il.InputError as error:
                said.append(str(error))

    with il.ablate_heads(gpt2, HEADS):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert len(said) == 2
    for sentence in said:
        faults.assert_sentence(sentence, "edited in another thread")
    il.capture(gpt2, gpt2_batch)


def test_passes_of_many_threads_wait_for_one_another(icl_mini):
    prompt = "love : bar one : foo two :"
    alone = il.explain(icl_mini, prompt, k=2)
    found = []

    def explain():
        try:
            found.append(il.explain(icl_mini, prompt, k=2))
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=explain) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.to_dict() for one in found] == [alone.to_dict()] * 6


def test_dropout_is_off_in_our_passes_and_put_back(gpt2, gpt2_batch):
    plain = il.last_log_probs(gpt2, gpt2_batch)
    noisy = copy.deepcopy(gpt2)
    dropout = [module for module in noisy.original_model.modules() if isinstance(module, torch.nn.Dropout)]
    for module in dropout:
        module.p = 0.5
    noisy.train()
    assert torch.equal(il.last_log_probs(noisy, gpt2_batch), plain)
    with il.ablate_heads(noisy, HEADS, mode="mean", reference=gpt2_batch), il.ablate_heads(gpt2, HEADS):
        pass
    assert dropout
    assert all(module.training for module in (*noisy.modules(), *noisy.original_model.modules()))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.one_of(
        st.text(max_size=60),
        st.lists(st.sampled_from([":", "love", "one", "foo", "bar", " ", "\n", "[b]", "\x1b"]), max_size=12).map(
            " ".join
        ),
    ),
    answer=st.one_of(st.none(), st.sampled_from(["foo", "bar", ""]), st.text(max_size=5)),
)
def test_any_prompt_is_read_or_refused(gpt2, text, answer):
    try:
        batch = il.tokenize(gpt2, [il.Prompt.parse(text, answer=answer)])
    except il.InputError:
        return
    assert bool(il.last_log_probs(gpt2, batch).isfinite().all())


@settings(max_examples=40, deadline=None)
@given(label=st.text(max_size=8), text=st.text(max_size=8))
def test_any_label_is_kept_or_refused(label, text):
    try:
        shown = il.Prompt([il.Demonstration(text, label)], "query")
    except il.InputError:
        return
    rendered = Template().render(shown)
    assert rendered.text[slice(*rendered.label_spans[0])] == label
