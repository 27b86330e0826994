"""Edits at sites: parts of a site, positions of roles, nested blocks, and what is refused.

`tests/sweep` compares every site at every kind of positions with plain Hugging Face code.
"""

import warnings

import pytest
import torch
from passes import watched
from shared import ragged
from tolerance import assert_close

import icl_lens as il
from icl_lens.edits import restarts
from icl_lens.edits.reference_prompts import SamePairsWarning
from icl_lens.edits.sites import SITES

SOURCE = [
    il.Prompt.parse("the happy : bar sad : bar three : foo nine :"),
    il.Prompt.parse("cat : foo the the red : bar a blue :"),
]


def tokenized(model, *prompts):
    return il.tokenize(model, list(prompts), prepend_bos=False, labels=("foo", "bar"))


def pair(model):
    """Return two prompts and sources of other lengths."""
    texts = ("happy : bar sad : bar three : foo nine :", "cat : foo the red : bar a blue :")
    return tokenized(model, *map(il.Prompt.parse, texts)), tokenized(model, *SOURCE)


def random_columns(n, generator=0):
    return torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(generator))).Q


def test_a_subspace_that_spans_everything_is_the_whole_and_its_parts_differ(load_tiny):
    model = load_tiny("gpt2")
    batch, source = pair(model)
    columns = random_columns(32)
    patch = lambda **options: il.PatchSite("resid_mid", 1, source, positions="texts", **options)  # noqa: E731
    sets = [[], [patch()], [patch(directions=columns)], [patch(directions=columns[:, :5])]]
    in_two_steps = [patch(directions=columns[:, :5]), patch(directions=columns[:, 5:])]
    intact, whole, spanned, part, both = il.score(model, batch, [*sets, in_two_steps]).unbind(1)
    assert_close(spanned, whole)
    assert_close(both, whole)
    assert (
        min((whole - intact).abs().max(), (part - whole).abs().max(), (part - intact).abs().max())
        > 1e-3
    )
    removed = il.AblateSite("resid_post", 0, directions=columns[:, :1], positions="labels")
    ours = il.score(model, batch, [[removed]])[:, 0]

    def without(x, hook):
        x = x.clone()
        for row, positions in enumerate(batch.label_positions.tolist()):
            for position in positions:
                x[row, position] -= (
                    columns[:, 0] * (x[row, position] @ columns[:, 0]) * (position >= 0)
                )
        return x

    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", without)]):
        assert_close(ours, il.score(model, batch))


def test_all_neurons_are_the_site_and_one_is_a_neuron(load_tiny):
    model = load_tiny("gpt2")
    batch, _ = pair(model)
    every = il.AblateSite("mlp_post", 1, neurons=range(48))
    single = il.AblateSite("mlp_post", 1, neurons=[7])
    whole, all_neurons, neuron = il.score(
        model, batch, [[il.AblateSite("mlp_post", 1)], [every], [single]]
    ).unbind(1)
    assert_close(all_neurons, whole)

    def zero(x, hook):
        x = x.clone()
        x[..., 7] = 0
        return x

    with model.hooks(fwd_hooks=[("blocks.1.mlp.hook_post", zero)]):
        assert_close(neuron, il.score(model, batch))
    assert (neuron - whole).abs().max() > 1e-3


@pytest.mark.parametrize("site", SITES)
def test_values_of_the_prompts_themselves_change_nothing(load_tiny, site):
    model = load_tiny("llama_gqa")
    batch = ragged(model)
    sets = [
        [il.PatchSite(site, [0, 1, 2], batch, positions=where)]
        for where in ("all", "last", "texts")
    ]
    intact = il.score(model, batch)
    assert (il.score(model, batch, sets) - intact[:, None]).abs().max() < 1e-5


def test_the_stream_after_a_layer_is_that_before_the_next(load_tiny):
    model = load_tiny("llama_gqa")
    batch, source = pair(model)
    after, before = (
        [il.PatchSite(site, layer, source)] for site, layer in (("resid_post", 0), ("resid_pre", 1))
    )
    for positions in ("last", "texts", "separators", [-1, 2]):
        sets = [
            [il.PatchSite(edit.site, edit.layers, source, positions=positions)]
            for (edit,) in (after, before)
        ]
        first, second = il.score(model, batch, sets).unbind(1)
        assert_close(first, second)
        assert (first - il.score(model, batch)).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["gpt2", "gptj"])
def test_what_a_layer_adds_makes_the_stream_after_it(load_tiny, family):
    model = load_tiny(family)
    batch, source = pair(model)

    def patched(positions, *sites):
        return [il.PatchSite(site, 1, source, positions=positions) for site in sites]

    # Other positions attend to the input of this one, so that it is exchanged at the last only.
    sets = [patched("last", "resid_post"), patched("last", "resid_pre", "attn_out", "mlp_out")]
    if family == "gpt2":
        sets += [patched("separators", "resid_post"), patched("separators", "resid_mid", "mlp_out")]
    scores = il.score(model, batch, sets).unbind(1)
    for whole, added in zip(scores[::2], scores[1::2], strict=True):
        assert_close(added, whole)
        assert (whole - il.score(model, batch)).abs().max() > 1e-3


def test_nested_blocks_and_sets_in_a_block_are_one_set(load_tiny):
    """Whatever sites they are at: "resid_mid" is written through attention's output."""
    model = load_tiny("gpt2")
    batch, source = pair(model)
    outer = il.PatchSite("resid_mid", [0, 1], source, positions="labels")
    for inner in (
        il.AblateSite("attn_out", 1, positions="last"),
        il.AblateSite("resid_pre", 1, mode="mean", reference=source, positions="labels"),
        il.Ablate(["L1H2"]),
    ):
        together = il.score(model, batch, [[outer, inner]])[:, 0]
        with il.edited(model, outer, batch=batch):
            assert_close(il.score(model, batch, [[inner]])[:, 0], together, msg=str(inner))
            with il.edited(model, inner, batch=batch):
                assert_close(il.score(model, batch), together, msg=str(inner))
        with il.edited(model, inner, batch=batch), il.edited(model, outer, batch=batch):
            assert_close(il.score(model, batch), together, msg=str(inner))


def test_edits_at_a_layers_input_reach_edited_attention_there(load_tiny):
    """Position terms are computed from the recorded input, which is the edited one."""
    model = load_tiny("gpt2")
    batch, source = pair(model)
    edits = [
        il.PatchSite("resid_pre", 1, source, positions="last"),
        il.RemovePosition(["L1H0"], positions="last"),
    ]
    with il.edited(model, *edits, batch=batch):
        assert_close(il.score(model, batch, [[]])[:, 0], il.score(model, batch))
    with il.edited(model, *edits, batch=batch):
        whole = il.score(model, batch)
    assert_close(il.score(model, batch, [edits])[:, 0], whole)


def test_resampled_values_are_those_of_another_prompt(load_tiny):
    model = load_tiny("gpt2")
    batch, source = pair(model)
    reference = tokenized(model, batch.prompts[0], SOURCE[0])
    drawn = il.AblateSite("mlp_out", 1, mode="resample", reference=reference, positions="texts")
    patch = il.PatchSite("mlp_out", 1, source[[0]], positions="texts")
    ours, theirs = il.score(model, batch[[0]], [[drawn], [patch]]).unbind(1)
    assert_close(ours, theirs)


TASKS = (
    ("love : foo like : bar one :", "the nine : foo a cat : bar two dog :"),
    ("red : blue one : two cat :",),
)
"""Reference prompts of two tasks."""


@pytest.mark.parametrize("positions", ["all", "last", "labels"])
@pytest.mark.parametrize("site", ["resid_pre", "mlp_out"])
def test_a_mean_over_several_tasks_is_that_over_all_their_tokens(load_tiny, site, positions):
    """The reference runs every prompt alone."""
    model = load_tiny("gpt2")
    batch, _ = pair(model)
    hook = f"blocks.1.hook_{site}"
    values = []
    for text in (text for task in TASKS for text in task):
        ids = il.tokenize(model, il.Prompt.parse(text), prepend_bos=False).tokens
        seen = []
        with model.hooks(fwd_hooks=[(hook, lambda x, hook, seen=seen: seen.append(x[0]))]):
            model(ids)
        places = label_places(text) if positions == "labels" else [-1]
        values.append(seen[0] if positions == "all" else seen[0][places])
    mean = torch.cat(values).mean(0)
    references = []
    for task in TASKS:
        prompts = [il.Prompt.parse(text) for text in task]
        references.append(il.tokenize(model, prompts, prepend_bos=False))
    ablation = il.AblateSite(site, 1, mode="mean", reference=references, positions=positions)
    ours = il.score(model, batch, [[ablation]])[:, 0]
    for row, n_tokens in enumerate((batch.last + 1).tolist()):
        text = batch.texts[row]
        places_at = {"all": range(n_tokens), "last": [n_tokens - 1], "labels": label_places(text)}
        places = list(places_at[positions])

        def write(x, hook, places=places):
            x = x.clone()
            x[:, places] = mean
            return x

        with model.hooks(fwd_hooks=[(hook, write)]):
            assert_close(ours[row], il.score(model, batch[[row]])[0])
    assert (ours - il.score(model, batch)).abs().max() > 1e-3
    alone = [
        il.AblateSite(site, 1, mode="mean", reference=reference, positions=positions)
        for reference in references
    ]
    scores_of_tasks = il.score(model, batch, [[edit] for edit in alone])
    assert (scores_of_tasks - ours[:, None]).abs().amax((0, 2)).min() > 1e-4


def label_places(text):
    """Return where labels are in a prompt of one token a word."""
    words = text.split()
    return [place + 1 for place, word in enumerate(words[:-1]) if word == ":"]


@pytest.mark.parametrize("mode", ["mean", "resample"])
def test_prompts_of_the_same_pairs_in_place_of_a_site_are_warned_of(load_tiny, mode):
    """They keep what the site holds for the task."""
    model = load_tiny("gpt2")
    pairs = (
        "one : two red : blue cat :",
        "red : blue cat : dog one :",
        "cat : dog one : two red :",
    )
    batch, reference = (
        il.tokenize(model, [il.Prompt.parse(pairs[i]) for i in rows]) for rows in ((0, 1), (2, 0))
    )
    other = il.tokenize(model, il.Prompt.parse(TASKS[0][0]))

    def ablate(reference):
        edit = il.AblateSite("mlp_out", 1, mode=mode, reference=reference, positions="labels")
        il.score(model, batch, [[edit]], read=lambda log_probs, prompt: log_probs[:, 0])

    with pytest.warns(SamePairsWarning, match="pass several batches, one for each"):
        ablate(reference)
    if mode == "mean":
        with warnings.catch_warnings():
            warnings.simplefilter("error", SamePairsWarning)
            ablate([reference, other])


REFUSED = {
    lambda m, b: il.AblateSite("resid", 1): "site must be one of",
    lambda m, b: il.AblateSite("mlp_out", []): "layers must contain at least one layer",
    lambda m, b: il.AblateSite("mlp_out", 1, positions="label"): "positions must be one of 'all'",
    lambda m, b: il.AblateSite("mlp_out", 1, positions=[1, 1]): "different positions",
    lambda m, b: il.AblateSite("mlp_out", 1, neurons=[1]): "neurons must be None unless",
    lambda m, b: il.AblateSite("mlp_out", 1, mode="mean"): "reference must be given",
    lambda m, b: il.AblateSite("mlp_out", 1, directions=torch.ones(32, 1)): "orthonormal",
    lambda m, b: il.PatchSite("mlp_out", 1): "source must be a PromptBatch",
    lambda m, b: il.score(m, b, [[il.AblateSite("mlp_out", 3)]]): "layer must be between 0 and 2",
    lambda m, b: il.score(
        m, b, [[il.AblateSite("mlp_post", 1, neurons=[48])]]
    ): "neurons must be below 48",
    lambda m, b: il.score(
        m, b, [[il.AblateSite("mlp_out", 1, directions=torch.eye(48))]]
    ): "must have 32 rows",
    lambda m, b: il.score(
        m, b, [[il.AblateSite("mlp_out", 1, positions=[10])]]
    ): "positions must be in every prompt",
    lambda m, b: il.score(
        m, b, [[il.PatchSite("mlp_out", 1, tokenized(m, *SOURCE))]]
    ): "same number of tokens",
    lambda m, b: il.score(
        m, b[[0, 1, 0]], [[il.PatchSite("mlp_out", 1, b)]]
    ): "source must have one prompt or",
    lambda m, b: il.score(
        m, b, [[il.PatchSite("mlp_out", 1, b[[1, 1]], positions="texts")]]
    ): "number of texts",
    lambda m, b: il.edited(
        m, il.AblateSite("mlp_out", 1, positions="texts")
    ).__enter__(): "batch must be the prompts",
    lambda m, b: il.score(
        m,
        il.tokenize(m, il.Text("love one", answer=" bar")),
        [[il.AblateSite("mlp_out", 1, positions="texts")]],
        read=lambda log_probs, prompt: log_probs[:, 0],
    ): "for prompts without demonstrations",
}


@pytest.mark.parametrize(("misuse", "words"), REFUSED.items(), ids=range(len(REFUSED)))
def test_misuse_is_refused_in_one_sentence(no_type_checks, load_tiny, misuse, words):
    model = load_tiny("gpt2")
    with pytest.raises(il.InputError, match=words) as refusal:
        misuse(model, pair(model)[0])
    assert "\n" not in str(refusal.value)


def test_a_family_says_which_sites_it_lacks(load_tiny):
    gptj, mixture = load_tiny("gptj"), load_tiny("mixtral")
    with pytest.raises(il.InputError, match="use 'attn_out' or 'resid_post'"):
        il.score(gptj, pair(gptj)[0], [[il.AblateSite("resid_mid", 1)]])
    with pytest.raises(il.InputError, match="use 'mlp_out'"):
        il.score(mixture, pair(mixture)[0], [[il.AblateSite("mlp_post", 1)]])


@pytest.mark.parametrize("mode", ["mean", "resample"])
def test_ablations_of_several_layers_share_one_run_of_their_reference(load_tiny, mode):
    model = load_tiny("gpt2")
    batch = pair(model)[0][[0]]
    texts = ("cat : foo red : foo the one : bar dog :", "a two : bar three : foo nine : foo red :")
    reference = tokenized(model, SOURCE[0], *map(il.Prompt.parse, texts))
    n_rows: list[int] = []

    def scores_of(sets):
        n_rows.clear()
        with watched(lambda _, x: n_rows.append(len(x)), model.blocks[0]):
            return il.score(model, batch, sets)

    sets = []
    for layer, positions in ((0, "texts"), (1, "texts"), (0, "labels"), (1, "labels")):
        options = {"mode": mode, "reference": reference, "positions": positions}
        sets.append([il.AblateSite("mlp_out", layer, **options)])
    together = scores_of(sets)
    assert n_rows.count(3) == 1, "the reference alone has three prompts"
    for number, edits in enumerate(sets):
        assert_close(scores_of([edits])[:, 0], together[:, number])
    assert (together - il.score(model, batch)[:, None]).abs().amax((0, 2)).min() > 1e-3


@pytest.mark.parametrize("is_supported", [True, False])
def test_passes_begin_at_the_first_token_that_changes(load_tiny, monkeypatch, is_supported):
    """If the model gives the same numbers after keys of earlier tokens; otherwise, all are run."""
    model = load_tiny("gpt2")
    batch, _ = pair(model)
    donors = ("happy : bar sad : bar three : foo two :", "cat : foo the red : bar a dog :")
    source = tokenized(model, *map(il.Prompt.parse, donors))
    sets = []
    for layer, positions in ((0, "query"), (1, "all"), (1, "separators"), (1, "texts")):
        sets.append([il.PatchSite("resid_post", layer, source, positions=positions)])
    monkeypatch.setattr(restarts, "MIN_SKIPPED", 2.0)
    expected = il.score(model, batch, sets)
    monkeypatch.setattr(restarts, "MIN_SKIPPED", 0.25)
    prefix = restarts._prefix

    def prefix_of_the_other(view, past, rows, first):
        return prefix(view, past, [1 - row for row in rows], first)

    if not is_supported:
        monkeypatch.setattr(restarts, "_prefix", prefix_of_the_other)
    shapes: list[tuple[int, int]] = []
    with watched(lambda _, x: shapes.append(tuple(x.shape[:2])), model.blocks[2]):
        scores = il.score(model, batch, sets)
    assert_close(scores, expected)
    query_alone, everything, separators, texts = scores.unbind(1)
    intact = il.score(model, batch)
    assert (query_alone - intact).abs().amax(1).min() > 1e-3
    assert (everything - intact).abs().amax(1).min() > 1e-3
    assert_close(separators, intact)
    assert_close(texts, intact)
    whole_passes = [shape for shape in shapes if shape[1] == batch.tokens.shape[1]]
    assert len(whole_passes) == (2 if is_supported else 4), shapes  # the source, the prompts
    later = [shape for shape in shapes if shape not in whole_passes]
    assert later == [(5, 3)], "two sets that change something, two prompts, and an unedited row"


@pytest.mark.parametrize("family", ["llama", "glm"])
def test_a_zeroed_stream_between_attention_and_ffn_is_exactly_zero(load_tiny, family):
    """The final norm would enlarge what rounding leaves; an FFN without biases adds nothing."""
    model = load_tiny(family)
    batch = pair(model)[0]
    streams = []
    hook = ("blocks.1.hook_resid_post", lambda x, hook: streams.append(x.clone()))
    with model.hooks(fwd_hooks=[hook]):
        model(batch.tokens)
        with il.edited(model, il.AblateSite("resid_mid", 1)):
            model(batch.tokens)
    intact, zeroed = streams
    assert intact.abs().min() > 0
    assert not zeroed.any()
