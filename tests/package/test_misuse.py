"""Misuse raises InputError with one sentence in every function, and edits cannot go wrong
silently.
"""

import copy
import inspect
import threading

import faults
import public_edits
import pytest
import sweep
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import icl_lens as il
from icl_lens import metrics
from icl_lens.errors import short_repr
from icl_lens.measures.random_heads import random_head_sets
from icl_lens.models.view import ModelView
from icl_lens.prompts.prompt import Template
from icl_lens.reading.last_logits import last_log_probs

PROMPT = "love : bar like : bar eight : foo two : foo one :"
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


def labels(batch):
    return {"align": "labels", "batch": batch}


SHOWN = [il.Demonstration("a", "b")]
MISUSE = {
    # prompts, tasks, models, metrics
    lambda: il.html.attention_to_labels(
        None, HEADS
    ): "must be an Explanation or Activations, got None",
    lambda: il.Prompt.parse(3): "must be a string, got 3",
    lambda: il.Prompt.parse("a : b \ud800 :"): "must be valid Unicode",
    lambda: il.Demonstration("x", ["a"]): "must be a string, got ['a']",
    lambda: il.Demonstration("love", " "): "'love' has an empty label",
    lambda: il.Demonstration("\n", "bar"): "'bar' has an empty text",
    lambda: il.Prompt([], "one"): "no demonstration",
    lambda: il.Prompt(SHOWN, " "): "no query",
    lambda: il.Prompt(
        [("a", "b", "c")], "one"
    ): "must be a pair (text, label) or an il.Demonstration, got ('a', 'b', 'c')",
    lambda: Template(None): "must be a string, got None",
    lambda: il.load_model(5): "name must be a model's name or folder, got 5",
    lambda: il.Prompt(SHOWN, "one", "baz"): "answer 'baz' is not one of the labels 'b'",
    lambda: il.Prompt(SHOWN, "one", labels=("b", "foo", "b")): "contain a duplicate",
    lambda: il.Prompt(SHOWN, "one", labels=("foo",)): "use 'b', not among the labels 'foo'",
    lambda: il.Prompt(SHOWN, "one", labels="b"): "must be a sequence",
    lambda: il.load_task("sentiment-number", n=1.5): "n must be an integer, got 1.5",
    lambda: il.load_task("sentiment-number", labels={"foo", "bar"}): "labels must be a sequence",
    lambda: il.load_task("sentiment-number", path=3): "got 3",
    lambda: il.load_task(
        il.WordTask("sentiment-number")
    ): "a task has its own method, task.prompts()",
    lambda: il.load_task("mine", path="x" * 300 + ".csv"): "File name too long",
    lambda: il.TextTask("sst2", columns="text"): "must be two different names",
    lambda: il.Head.parse(None): "invalid head None",
    lambda: il.load_model("x" * 300): "File name too long",
    lambda: il.load_model(""): "''",
    lambda: il.load_model("icl-mini", device="nonsense"): "invalid device 'nonsense'",
    lambda: il.load_model("icl-mini", device="meta"): "'meta' is not available",
    lambda: il.load_model("icl-mini", device="cuda:99"): "'cuda:99' is not available",
    lambda: il.load_model("icl-mini", dtype=torch.int32): "got 'torch.int32'",
    lambda: il.load_model("icl-mini", dtype="x"): "dtype must be one of",
    lambda: metrics.accuracy(spoilt(NAN), ANSWER): "prompt 1 must be finite, got nan",
    lambda: metrics.is_correct(spoilt(INF), ANSWER): "prompt 1 must be finite, got inf",
    lambda: metrics.is_correct(SCORES, torch.tensor([-1, 0])): "must have an answer",
    lambda: metrics.bootstrap_interval([1.0]): "at least two",
    lambda: metrics.bootstrap_interval([1.0, NAN]): "must be finite",
    lambda: metrics.bootstrap_interval([1.0, 2.0], level=95): "level=95",
    lambda: metrics.bootstrap_interval([[1.0, 2.0], [3.0, 4.0]]): "statistic=",
    lambda: metrics.bootstrap_interval([1.0, 2.0], clusters=[0]): "one entry per prompt, 2, got 1",
    lambda: metrics.spearman(torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0])): "must not be NaN",
    lambda: metrics.bootstrap_interval([1.0, 2.0], draws=0): "at least 1",
    # batches: a model, its batch, and another model
    lambda m, b, o: il.tokenize(
        "icl-mini", ["love : foo one :"]
    ): "got str; load it first, with model =",
    lambda m, b, o: il.tokenize(m, ["love : foo one :", 3]): "got 3",
    lambda m, b, o: il.tokenize(
        m, "love : foo one :", template="{text} : {label}"
    ): "template must be",
    lambda m, b, o: il.tokenize(
        m, "love : foo one :", prepend_bos="no"
    ): "prepend_bos must be True, False",
    lambda m, b, o: il.tokenize(
        m, ["love : foo one :", il.Text("love")]
    ): "all il.Text or all il.Prompt, got both",
    lambda m, b, o: il.tokenize(m, il.Text("love"), labels=["foo"]): "do not apply to il.Text",
    lambda: il.Text(3): "must be a string, got 3",
    lambda: il.Text("love \ud800"): "must be valid Unicode",
    lambda m, b, o: il.PromptBatch.from_tokens([1, 2, 3]): "one list of integers per prompt",
    lambda: il.PromptBatch.from_tokens([[]]): "at least one",
    lambda: il.PromptBatch.from_tokens([[1]], targets=[1, 2]): "one per row",
    lambda: il.PromptBatch.from_tokens([[1]], targets=1, against=1): "must differ",
    lambda: il.PromptBatch.from_tokens([[4, 5, 6]], attention_mask=[[1, 1]]): "the shape of tokens",
    lambda: il.PromptBatch.from_tokens([[4, 5, 6]], attention_mask=[[1, 0, 1]]): "in row 0",
    lambda: il.PromptBatch.from_tokens([[4, 5, 6]], attention_mask=[[2, 1, 1]]): "in row 0",
    lambda m: il.PromptBatch.from_tokens([[1]], model=m, targets=97): "token id 97 is out of range",
    lambda m, b, o: list(b.split(0)): "at least 1",
    lambda m, b, o: b.at(99): "99",
    # activations and increases
    lambda m, b, o: il.capture(
        m, il.PromptBatch.from_tokens([[10**6]])
    ): "tokenized for another model",
    lambda m, b, o: il.capture(m, "love"): "pass il.tokenize",
    lambda m, b, o: il.score(m, b.prompts): "pass il.tokenize",
    lambda m, b, o: il.head_effects(m, b.prompts): "pass il.tokenize",
    lambda m, b, o: enter(
        il.ablate_heads(m, HEADS, mode="mean", reference=b.prompts)
    ): "pass il.tokenize",
    lambda m, b, o: il.head_log_prob_increase(
        b, b.answer_tokens
    ): "acts must be Activations, got PromptBatch",
    lambda m, b, o: il.capture(m, b).readout.top_tokens(torch.zeros(3)): "d_model=32], got (3,)",
    lambda m, b, o: il.capture(m, b).readout.top_tokens(
        torch.zeros(32), k=0
    ): "k must be at least 1, got 0",
    lambda m, b, o: il.capture(None, b): "model must be a TransformerLens model, got NoneType",
    lambda m, b, o: il.load_model(
        m.original_model
    ): r"GPT2LMHeadModel; write il.load_model('my-name', hf_model=model, t",
    lambda m, b, o: il.Activations.from_cache(
        m, b, {}
    ): "in this order, got TransformerBridge, PromptBatch, dict; write",
    lambda m, b, o: il.Activations.from_cache(
        {}, m, b
    ): "write il.Activations.from_cache(model, cache, batch)",
    lambda m, b, o: il.capture(o, b): "another",
    lambda m, b, o: il.capture(m, b).readout.using(
        final_norm="x", bias=True
    ): "final_norm must be one of",
    lambda m, b, o: il.top_subheads(il.capture(m, b), b.answer_tokens, k=121): "between 1 and 120",
    lambda m, b, o: il.head_log_prob_increase(
        il.capture(m, b), b.answer_tokens - 9
    ): "prompt without an answer",
    lambda m, b, o: il.Run(batch_size=0): "batch_size must be at least 1",
    lambda m, b, o: il.Run(memory=0): "memory must be at least 1",
    lambda m, b, o: il.Run(batch_size=2.5): "batch_size must be an integer",
    lambda m, b, o: il.Run(processes=4): "start several with torchrun",
    lambda m, b, o: il.explain(m, PROMPT, against="baz"): "against must be one of the labels",
    lambda m, b, o: il.explain(
        m, il.Prompt.parse(PROMPT, answer="foo"), against="foo"
    ): "differ from the explained label",
    lambda m, b, o: il.explain(m, PROMPT, against=[]): "against must not be empty",
    lambda m, b, o: il.explain(m, "love like"): "for plain text pass il.Text(...)",
    lambda m, b, o: il.explain(
        m, il.Text("love like", answer=" foo"), by="contrast"
    ): "without tokens to compare with",
    lambda m, b, o: il.explain(
        m, il.Text("love like", answer=" foo"), labels=["foo"]
    ): "do not apply to il.Text",
    lambda m, b, o: il.explain(
        m, il.Text("love"), against=" foo"
    ): "against must be None for il.Text",
    lambda m, b, o: il.explain(m, b): "one row, got 3 rows",
    lambda m, b, o: il.explain(
        m, b[0], against="bar"
    ): "against must be None for a tokenized prompt",
    lambda m, b, o: il.compare(
        il.explain(m, "love : foo one : bar two :"), 3
    ): "expected an explanation, got 3",
    lambda m, b, o: il.label_similarity(
        m, il.tokenize(m, il.Text("love like")), ["L0H0"]
    ): "label position",
    lambda m, b, o: il.head_copying(
        m, (0, 0), [3, 4], inputs=torch.zeros(3, 32)
    ): "one residual stream per token",
    # edits
    lambda m, b, o: il.function_vector(m, [], HEADS): "reference must contain at least one",
    lambda m, b, o: il.head_effects(m, b, mode="mean"): "reference must be given for mode='mean'",
    lambda m, b, o: il.head_effects(m, b, reference=b): "reference must be omitted for mode='zero'",
    lambda m, b, o: il.head_effects(
        m, b, positions="all", mode="mean", reference=b
    ): "'mean' with positions='all'",
    lambda m, b, o: il.head_effects(m, b).top(
        1, outcome="odds"
    ): "outcome must be one of 'log_odds', 'log_prob'",
    lambda m, b, o: il.head_effects(o, b): "another",
    lambda m, b, o: random_head_sets(m, ModelView.of(m).heads()[:7]): "at most half",
    lambda m, b, o: il.ablate_with_controls(
        m, b, HEADS, mode="mean"
    ): "reference must be given for mode='mean'",
    lambda m, b, o: enter(
        il.ablate_heads(m, il.locate(m, b, k=1))
    ): "iterable of heads, got LocatedHeads",
    lambda m, b, o: enter(il.ablate_heads(m, [(INF, 0)])): "invalid head (inf, 0)",
    lambda m, b, o: enter(il.ablate_heads(m, HEADS, mode="mean")): "reference must be given",
    lambda m, b, o: enter(il.ablate_heads(m, HEADS, reference=b)): "reference must be omitted",
    lambda m, b, o: enter(il.ablate_heads(o, HEADS, mode="mean", reference=b)): "reference was",
    lambda m, b, o: enter(il.patch_heads(o, HEADS, b, activation="z")): "source was",
    lambda m, b, o: enter(
        il.patch_heads(m, HEADS, b, activation="k", positions="last")
    ): "positions must be 'all'",
    lambda m, b, o: enter(
        il.patch_heads(m, HEADS, b, activation="v", align="labels")
    ): "batch must be the prompts",
    lambda m, b, o: enter(
        il.patch_heads(m, HEADS, b[[0, 2, 1]], activation="v", **labels(b))
    ): "got 2 and 3 in row 1",
    lambda m, b, o: enter(
        il.patch_heads(m, HEADS, b[:2], activation="v", **labels(b))
    ): "per row of the pass, 3, got",
    lambda m, b, o: il.score(m, b, [il.debias_edits(b, [(9, 0)], recency=0.5)]): "L9H0",
    lambda m, b, o: il.score(m, b, il.Ablate(HEADS)): "write [[Ablate(",
    lambda m, b, o: enter(il.edited(m, HEADS)): "edits must be values such as il.Ablate",
    lambda m, b, o: enter(il.edited(m, [il.Ablate(HEADS)])): "*edits",
    lambda: il.AddVector([1.0], 1): "vector",
    lambda: il.AddVector(torch.zeros(4), 1.0): "layer",
    lambda m, b, o: il.Patch(HEADS, b.prompts, activation="z"): "must be a PromptBatch",
    lambda m, b, o: il.vector_gains(
        m, torch.zeros(3, 32), b, layers=[]
    ): "layers must be between 0 and",
    lambda m, b, o: il.vector_gains(
        m, torch.zeros(3, 32), b, layers=[-1]
    ): "layers must be between 0 and",
    lambda m, b, o: il.calibrated_scores(
        m, b, inputs=[]
    ): "inputs must be a list of at least one text",
    lambda m, b, o: il.demonstration_effects(
        m, il.tokenize(m, il.Text("love", answer=" bar"))
    ): "no demonstration",
    lambda m, b, o: enter(
        il.edited(m, il.AddVector(torch.zeros(32), 0))
    ): "batch must be the prompts",
    lambda: il.RemovePosition(HEADS, strength=2): "between 0 (no change) and 1, got 2",
    lambda m, b, o: il.Ablate(HEADS, mode="resample", reference=b): "positions must be 'last'",
    lambda m, b, o: il.score(
        m, b[:1], [[il.Ablate(HEADS, mode="resample", reference=b[:1], positions="last")]]
    ): ("other than prompt 0"),
    lambda m, b, o: il.score(m, il.tokenize(m, il.Text("love one")), [[]]): "no label",
}


@pytest.mark.parametrize(("misuse", "words"), MISUSE.items(), ids=range(len(MISUSE)))
def test_misuse_is_refused_in_one_sentence(
    no_type_checks, gpt2, gpt2_batch, icl_mini, misuse, words
):
    faults.assert_refused(
        words, misuse, *(gpt2, gpt2_batch, icl_mini)[: misuse.__code__.co_argcount]
    )


CHOICES = ("positions", "mode", "method", "by", "part", "activation", "align", "fix")
COUNTS = ("k", "n", "n_tokens", "n_edges", "n_strongest", "demonstrations", "pass_tokens")
HEADS_AND_WORSE = ([(99, 0)], [(1.5, 0)], ["x"], "L0H1", il.Head(0, 1))
WRONG = {
    **dict.fromkeys(CHOICES, ("x",)),
    **dict.fromkeys(COUNTS, (0, -1, "2")),
    **dict.fromkeys(("n_ablated", "distance"), (-1, 10**6)),
    "n_tokens": (0, 10**6),
    "heads": (None, *HEADS_AND_WORSE),
    "readers": ([], *HEADS_AND_WORSE),
    "head": (None, "x", (99, 0), (1.5, 0)),
    "writers": ([], ["L2H0"], ["F9"], ["x"]),
    **dict.fromkeys(("at", "reader_at"), ("labels", 99)),
    "n_random": (-1, "2"),
    "strength": ("x", NAN),
    "strengths": ([NAN], [2]),
    "recency": (2, NAN),
    "majority": (-1, NAN),
    "max_accuracy_drop": (-1,),
    "weights": ("x", torch.ones(2, 4), -torch.ones(3, 8)),
    "blocked": (None, "x", ["x"]),
    "edges": (None, "x", ["x"]),
    "vector": (torch.zeros(33), torch.full((32,), NAN), "x"),
    "layer": (3, -1, "1"),
    "layers": ([3],),
    "site": (None, "x"),
    "neurons": ([-1], [1.5]),
    "directions": ("x", torch.ones(32, 2)),
    "source": (None, 3, [3]),
    "seed": (None, "x", 1.5),
    "vectors": (torch.zeros(2, 32),),
    "max_new_tokens": (0, 10_000),
    "temperature": (-1.0,),
    "stop": ("",),
    "top_k": (0,),
    "top_p": (1.5,),
    "ways": ([], ["x"]),
    "targets": (
        "foo",
        torch.zeros(2, dtype=torch.long),
        torch.full((3,), 97),
        torch.ones(3, dtype=torch.bool),
    ),
    "against": (
        *(
            "bar",
            torch.zeros(2, dtype=torch.long),
            torch.full((3,), 97),
            torch.tensor([7.0, 8.0, 9.0]),
        ),
        torch.tensor([7, -1, 8]),  # none for a prompt
        torch.tensor([[7, 8], [9, 4], [9, -1]]),  # the answer
        torch.tensor([[7, 8, 7], [9, -1, -1], [9, 10, -1]]),  # a duplicate
    ),
    "sets": ([], [il.Ablate(HEADS)], [["L0H1"]]),
    "tokens": ([3, 3], [3, 10**6], "x"),
    **dict.fromkeys(("batch", "acts", "prompt", "prompts"), (3, [3])),
    **dict.fromkeys(("favored", "unfavored", "reference"), ([3],)),
    "run": ("folder",),
}
"""Wrong values of arguments, by name, for every public function that has them."""

ELSEWHERE = {
    ("explain", "against"),
    ("Text", "against"),
    ("two_towers", "k"),
    ("two_towers", "demonstrations"),
}
"""Arguments that are of another kind, or without effect, in the right call."""
ANY_VALUE = {
    "replace": "any value counts as true or false",
    "renormalize": "any value counts as true or false",
    "recorded_z": "the values that the package has recorded of `reference`",
}
"""Arguments of edits that have no wrong value in `WRONG`, and why."""
NEED_HEADS = {"ablate_with_controls", "label_similarity", "mean_score_parts", "two_towers"}
"""Functions that refuse an empty list of heads."""


def test_every_argument_of_an_edit_has_wrong_values():
    """Other tests then try them: those of `WRONG` run for every name of `sweep.CALLS`."""
    for name, edit in public_edits.by_name().items():
        untried = public_edits.arguments(edit) - WRONG.keys() - ANY_VALUE.keys()
        assert not untried, f"add wrong values of these arguments of {name} to WRONG"


class _Called(Exception):
    pass


@pytest.mark.parametrize("name", sorted(name for name in sweep.CALLS if "." not in name))
def test_a_wrong_argument_is_refused_in_one_sentence_that_names_it(
    no_type_checks, gpt2, monkeypatch, name
):
    """Every public function that takes a model × every argument with wrong values; the rest of its
    call is right.
    """
    case, function, seen = sweep.Case(gpt2, sweep.PROMPTS, sweep.OTHERS), getattr(il, name), []

    def called(*args, **kwargs):
        seen.append(inspect.signature(function).bind(*args, **kwargs))
        raise _Called

    with monkeypatch.context() as patch:
        patch.setattr(il, name, called)
        with pytest.raises(_Called):
            sweep.CALLS[name].function(case)
    (right,) = seen
    for argument in right.signature.parameters.keys() & WRONG.keys():
        values = () if (name, argument) in ELSEWHERE else WRONG[argument]
        for value in (*values, *([[]] if argument == "heads" and name in NEED_HEADS else [])):
            wrong = copy.copy(right)
            arguments = right.arguments | {argument: value}
            wrong.arguments = {
                parameter: arguments[parameter]
                for parameter in right.signature.parameters
                if parameter in arguments
            }

            def ask(wrong=wrong):
                returned = function(*wrong.args, **wrong.kwargs)
                edits = returned if isinstance(returned, list) else [returned]
                enter(
                    il.edited(gpt2, *edits, batch=case.batch)
                    if isinstance(edits[0], il.Edit)
                    else returned
                )

            with pytest.raises(il.InputError) as caught:
                ask()
            faults.assert_sentence(str(caught.value), "")
            expected_words = (
                argument,
                argument.removesuffix("s"),
                repr(value).strip("[]"),
                "head must be in layers",
            )
            assert any(words in str(caught.value) for words in expected_words), (
                argument,
                value,
                str(caught.value),
            )


@pytest.mark.parametrize(
    ("edit", "heads"),
    [
        (il.ablate_heads, HEADS),
        (lambda model, heads: il.edited(model, il.RemovePosition(heads)), [(0, 3), (0, 1)]),
    ],
    ids=["hooks apart", "shared"],
)
def test_blocks_end_in_any_order(gpt2, gpt2_batch, edit, heads):
    """The second block's edit stays when the first one ends before it, and nothing is left when
    both have ended.
    """
    plain = last_log_probs(gpt2, gpt2_batch)
    first, second = (edit(gpt2, [head]) for head in heads)
    with edit(gpt2, heads[1:]):
        second_only = last_log_probs(gpt2, gpt2_batch)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(last_log_probs(gpt2, gpt2_batch), second_only)
    second.__exit__(None, None, None)
    assert torch.equal(last_log_probs(gpt2, gpt2_batch), plain)
    assert not torch.equal(plain, second_only)
    assert not any(len(point.fwd_hooks) for point in gpt2.hook_dict.values())


@pytest.mark.parametrize(
    ("passed", "words"),
    [
        ("hate : foo one : bar two three", "row 0 is a different prompt"),
        ("love : foo one : bar two", "at least"),
    ],
)
def test_another_batch_is_refused_inside_a_block_of_a_batch(gpt2, passed, words):
    """In a shorter batch, label positions would point to other tokens."""
    edited, passed_batch = (
        il.tokenize(gpt2, f"{text} :") for text in ("love : foo one : bar two three", passed)
    )
    with il.edited(gpt2, il.Reweight(HEADS, [[0.5, 1.0]], renormalize=True), batch=edited):
        last_log_probs(gpt2, edited)
        with pytest.raises(il.InputError, match=words):
            last_log_probs(gpt2, passed_batch)


def test_targets_of_any_whole_number(gpt2, gpt2_batch):
    """Token ids in few bits are the same ids."""
    acts, targets = il.capture(gpt2, gpt2_batch), gpt2_batch.answer_tokens
    wanted = il.head_log_prob_increase(acts, targets)
    for dtype in (torch.int32, torch.int16):
        assert torch.equal(il.head_log_prob_increase(acts, targets.to(dtype)), wanted)


def test_another_thread_is_refused_while_a_block_is_open(gpt2, gpt2_batch):
    messages = []

    def ask():
        for ask_model in (lambda: il.capture(gpt2, gpt2_batch), lambda: gpt2(gpt2_batch.tokens)):
            try:
                ask_model()
            except il.InputError as error:
                messages.append(str(error))

    with il.ablate_heads(gpt2, HEADS):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert len(messages) == 2
    for sentence in messages:
        faults.assert_sentence(sentence, "in use by another thread")
    il.capture(gpt2, gpt2_batch)


def test_passes_of_many_threads_wait_for_one_another(gpt2):
    prompt = "love : bar one : foo two :"
    alone = il.explain(gpt2, prompt, k=2)
    explanations = []

    def explain():
        try:
            explanations.append(il.explain(gpt2, prompt, k=2))
        except Exception as error:
            explanations.append(error)

    threads = [threading.Thread(target=explain) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [explanation.to_dict() for explanation in explanations] == [alone.to_dict()] * 3


def test_dropout_is_off_in_our_passes_and_put_back(gpt2, gpt2_batch):
    plain = last_log_probs(gpt2, gpt2_batch)
    noisy = copy.deepcopy(gpt2)
    dropout = [
        module for module in noisy.original_model.modules() if isinstance(module, torch.nn.Dropout)
    ]
    for module in dropout:
        module.p = 0.5
    noisy.train()
    assert torch.equal(last_log_probs(noisy, gpt2_batch), plain)
    with (
        il.ablate_heads(noisy, HEADS, mode="mean", reference=gpt2_batch),
        il.ablate_heads(gpt2, HEADS),
    ):
        pass
    assert dropout
    assert all(module.training for module in (*noisy.modules(), *noisy.original_model.modules()))


@pytest.mark.slow
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    text=st.one_of(
        st.text(max_size=60),
        st.lists(
            st.sampled_from([":", "love", "one", "foo", "bar", " ", "\n", "[b]", "\x1b"]),
            max_size=12,
        ).map(" ".join),
    ),
    answer=st.one_of(st.none(), st.sampled_from(["foo", "bar", ""]), st.text(max_size=5)),
)
def test_any_prompt_is_read_or_refused(gpt2, text, answer):
    try:
        batch = il.tokenize(gpt2, [il.Prompt.parse(text, answer=answer)])
    except il.InputError:
        return
    assert bool(last_log_probs(gpt2, batch).isfinite().all())


@settings(max_examples=40, deadline=None)
@given(label=st.text(max_size=8), text=st.text(max_size=8))
def test_any_label_is_kept_or_refused(label, text):
    try:
        prompt = il.Prompt([il.Demonstration(text, label)], "query")
    except il.InputError:
        return
    rendered = Template().render(prompt)
    assert rendered.text[slice(*rendered.label_spans[0])] == label


FIRST_IS_MODEL = []
for public in il.__all__:
    if inspect.isfunction(getattr(il, public)):
        parameters = inspect.signature(getattr(il, public)).parameters
        if next(iter(parameters), None) == "model":
            FIRST_IS_MODEL.append(public)
REQUIRED = {
    "heads": HEADS,
    "head": HEADS[0],
    "first": HEADS,
    "second": HEADS,
    "vectors": torch.zeros(2, 32),
    "task": "sentiment-number",
    "tokens": [3, 4],
    "readers": HEADS,
    "part": "q",
    "prompt": il.Prompt.parse(PROMPT, answer="foo"),
    "prompts": [il.Prompt.parse(PROMPT, answer="foo")],
    "fix": "majority",
    "activation": "z",
    "compute": lambda rows: torch.zeros(len(rows)),
}


def required_after_model(function, one_row):
    """Return a value for each argument after the model that has no default."""
    required = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            required[parameter.name] = REQUIRED.get(parameter.name, one_row)
    return required


def run_or_enter(value):
    if hasattr(value, "__enter__"):
        enter(value)


@pytest.mark.parametrize("name", FIRST_IS_MODEL)
def test_what_is_passed_in_place_of_the_model_is_said_with_the_right_call(name, gpt2, gpt2_batch):
    """A Hugging Face model, a model's name, a tokenizer, and the batch, in every function that
    takes a model.
    """
    function, one_row = getattr(il, name), gpt2_batch[:1]
    required = required_after_model(function, one_row)
    calls = {
        "write model = il.load_model('my-name', hf_model=model, tokenizer=tokenizer)": gpt2.original_model,
        "load it first, with model = il.load_model('gpt2'), and pass the model": "gpt2",
        "pass the model that il.load_model returns; it holds its tokenizer": gpt2.tokenizer,
        "the model comes first, as in function(model, batch)": gpt2_batch,
    }
    for message, wrong in calls.items():
        with pytest.raises(il.InputError) as error:
            run_or_enter(function(wrong, **required))
        assert str(error.value).startswith(
            f"model must be a TransformerLens model, got {type(wrong).__name__}; "
        )
        assert message in str(error.value)
        assert "\n" not in str(error.value)


class DataFrame:
    """What a table of pandas looks like from outside, with a `repr` of many lines."""

    columns = ("message", "topic")

    def __repr__(self):
        return "a row\n" * 1000


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("name", FIRST_IS_MODEL)
def test_a_wrong_object_is_named_in_a_few_words(name, gpt2, gpt2_batch):
    """A model or a table in place of each argument, alone or in a list: its `repr` would fill
    screens.
    """
    function, one_row = getattr(il, name), gpt2_batch[:1]
    required = required_after_model(function, one_row)
    for argument in required.keys() - {"compute"}:
        for wrong in (gpt2, DataFrame(), [gpt2], [DataFrame()]):
            with pytest.raises(il.InputError) as error:
                run_or_enter(function(gpt2, **(required | {argument: wrong})))
            assert len(str(error.value)) < 400
            assert "\n" not in str(error.value)
    with pytest.raises(
        il.InputError, match=r"the model comes first, as in function\(model, prompt\)"
    ):
        run_or_enter(function(PROMPT, **required))


def test_a_table_is_answered_with_the_call_that_reads_its_rows(no_type_checks, gpt2):
    for wrong_call in (lambda: il.load_task(DataFrame()), lambda: il.explain(gpt2, DataFrame())):
        with pytest.raises(
            il.InputError, match=r"il.load_task\('rows.csv', columns=\('message', 'topic'\)\)"
        ):
            wrong_call()


def test_values_in_errors_are_short():
    for value in (
        "x" * 5000,
        list(range(5000)),
        dict.fromkeys(range(5000), "x"),
        [["x" * 300] * 9],
    ):
        assert len(short_repr(value)) <= 120
    assert short_repr(il.Head(1, 2)) == "L1H2"
    assert short_repr((1,)) == "(1,)"
    assert short_repr(torch.zeros(3, 3)) == "an object of type Tensor"
