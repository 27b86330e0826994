"""Heads located over many prompts: the certified mean is the exhaustive one, however the prompts
are batched.
"""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from families import WORDS
from launches import contents
from tolerance import assert_close

import icl_lens as il
from icl_lens.attribution.increases import every_head_increase
from icl_lens.attribution.scored_tokens import check_against_ids
from icl_lens.attribution.search import SLACK, head_bounds, layer_gradients, subhead_bounds
from icl_lens.locate import locate as dataset
from icl_lens.locate.locate import mean_head_increases
from icl_lens.models.view import ModelView
from icl_lens.runs.stream import ChunkStream, plan_batches, prompt_bytes


def draw(n, *, seed=0):
    """Ragged prompts of one to four demonstrations over the tiny tokenizer's words."""
    rng = np.random.default_rng(seed)
    words = WORDS[5:]
    prompts = []
    for _ in range(n):
        labels = list(rng.permutation(["foo", "bar", "foo", "bar"]))[: rng.integers(1, 5)]
        texts = [" ".join(rng.choice(words, rng.integers(1, 4))) for _ in labels]
        demonstrations = [il.Demonstration(text, str(label)) for text, label in zip(texts, labels, strict=True)]
        prompts.append(
            il.Prompt(demonstrations, str(rng.choice(words)), str(rng.choice(["foo", "bar"])), ("foo", "bar"))
        )
    return prompts


@pytest.fixture(scope="module")
def many(gpt2):
    return il.tokenize(gpt2, draw(40))


@pytest.fixture(scope="module")
def every_increase(gpt2, many):
    """[prompt layer head], each prompt alone."""
    return torch.cat(
        [il.head_log_prob_increase(il.capture(gpt2, many[i]), many[i].answer_tokens) for i in range(len(many))]
    )


@pytest.fixture
def few_candidates(monkeypatch):
    """Keep as few candidates as possible, so that some heads are still undecided after the first
    pass.
    """
    monkeypatch.setattr(dataset, "MARGIN", 0)


@pytest.mark.parametrize(
    ("k", "batch_size", "contrast"),
    [
        *((k, n, None) for k, n in [(1, 7), (2, 7), (12, 7)]),
        (5, 40, "several"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, 1, None), (5, 40, None), (2, 7, "one")]),
    ],
)
def test_certified_is_exhaustive(gpt2, many, every_increase, few_candidates, k, batch_size, contrast):
    against = contrasts(many)[contrast] if contrast else None
    all_scores = every_contrast(gpt2, many, against) if contrast else every_increase
    if contrast:
        assert_close(mean_head_increases(gpt2, many, against=against, run=il.Run(batch_size=9)), all_scores.mean(0))
    by = "contrast" if contrast else "increase"
    top = il.locate_heads(gpt2, many, k=k, by=by, run=il.Run(batch_size=batch_size), against=against)
    mean = all_scores.mean(0).flatten().topk(k)
    assert_close(top.value, mean.values)
    assert top.heads == [il.Head(i // 4, i % 4) for i in mean.indices.tolist()]
    assert top.certified
    assert (top.n_prompts, top.n_parts) == (len(many), 12)
    assert k <= top.n_exact <= 12
    assert top.unevaluated_bound <= float(top.value[-1]) or top.n_exact == 12
    left = all_scores.mean(0).flatten().sort(descending=True).values[top.n_exact :]
    assert (left <= top.unevaluated_bound + SLACK).all()
    assert 0 < top.share_evaluated <= 1


def test_several_rows_of_a_prompt_count_as_one_prompt(gpt2, many):
    """Rows at two positions of each prompt: means are over rows, and the number of prompts stays
    what it is.
    """
    early = many[:6].at([-3, -2])
    assert (len(early), early.n_prompts) == (12, 6)
    acts = il.capture(gpt2, early)
    increases = il.head_log_prob_increase(acts)
    for top in (
        il.locate_heads(gpt2, early, k=12, by="increase", run=il.Run(batch_size=5)),
        il.top_heads(acts, k=12, by="increase"),
    ):
        assert (top.n_prompts, top.share_evaluated) == (6, 1.0)
        assert_close(top.value.float(), increases.mean(0).flatten().sort(descending=True).values)


@pytest.mark.slow
@pytest.mark.parametrize("contrast", [False, True])
def test_heads_left_open_are_passed_again(gpt2, many, every_increase, few_candidates, contrast):
    """A slack wider than any bound leaves every head undecided: each is evaluated on the batches
    that lack it only.
    """
    against = contrasts(many)["several"] if contrast else None
    all_scores = every_contrast(gpt2, many, against) if contrast else every_increase
    best, passes = all_scores.mean(0).flatten().topk(1).values, {}
    options = {"k": 1, "by": "contrast" if contrast else "increase", "against": against}
    top = il.locate_heads(
        gpt2,
        many,
        slack=1e6,
        run=il.Run(batch_size=8, progress=lambda kind, done, total: passes.update({kind: (done, total)})),
        **options,
    )
    assert passes["part"] == (40, 40)
    assert passes["refined"][0] == passes["refined"][1] <= 40
    assert (top.n_exact, top.share_evaluated, top.unevaluated_bound) == (12, 1.0, -float("inf"))
    assert_close(top.value, best)
    narrow = il.locate_heads(gpt2, many, **options)
    assert narrow.n_exact < 12
    assert narrow.share_evaluated < 1
    assert narrow.heads == top.heads
    assert_close(narrow.value, best)


@pytest.mark.parametrize("final_norm", ["frozen", "own"])
def test_own_norm_is_exhaustive(gpt2, many, final_norm):
    top = il.locate_heads(
        gpt2, many[:9], k=3, by="increase", run=il.Run(batch_size=4), final_norm=final_norm, bias=False
    )
    assert top.certified == (final_norm == "frozen")
    acts = il.capture(gpt2, many[:9])
    expected = il.head_log_prob_increase(acts, many[:9].answer_tokens, final_norm=final_norm, bias=False)
    assert_close(top.value, expected.mean(0).flatten().topk(3).values)


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "granite", "llama_gqa"])
@pytest.mark.parametrize("bias", [True, False])
def test_folded_is_unfolded(load_tiny, name, bias, monkeypatch):
    """W_O·W_U multiplied out gives what head vectors through W_U give."""
    model = load_tiny(name)
    batch = il.tokenize(model, draw(30, seed=2), prepend_bos=False)
    acts = il.capture(model, batch)
    readout = acts.readout.using(final_norm="frozen", bias=bias)
    increases = []
    for limit in (1, 10**9):
        monkeypatch.setattr(
            "icl_lens.attribution.increases.min_prompts_to_fold", lambda d_head, d_model, limit=limit: limit
        )
        increases.append(every_head_increase(acts.view, readout, acts.resid_pre, acts.scaled_z, batch.answer_tokens))
    assert_close(increases[0], increases[1])
    assert increases[0].abs().max() > 1e-2


def test_groups_cut_anywhere_give_the_same_mean(gpt2, many, every_increase, monkeypatch):
    """Groups cut anywhere give the same mean."""
    expected = every_increase.mean(0)
    assert_close(mean_head_increases(gpt2, many, run=il.Run(batch_size=6)), expected)
    monkeypatch.setattr(dataset, "LOGIT_BYTES", 4)
    monkeypatch.setattr(dataset, "min_prompts_to_fold", lambda d_head, d_model: 3)
    assert_close(mean_head_increases(gpt2, many, run=il.Run(batch_size=6)), expected)


def test_plans_hold_each_prompt_once_sorted_by_length(gpt2, many):
    """Every prompt once; neighbors of similar length; the first batch spread over all lengths;
    memory bounded.
    """
    view = ModelView.of(gpt2)
    lengths = (many.last + 1).tolist()
    plan = plan_batches(view, many, il.Run(batch_size=8))
    assert sorted(row for rows in plan for row in rows) == list(range(40))
    assert plan == plan_batches(view, many, il.Run(batch_size=8))
    pilot = [lengths[row] for row in plan[0]]
    assert np.mean(pilot) == pytest.approx(np.mean(lengths), abs=1.0)
    padding = sum(max(lengths[r] for r in rows) - lengths[row] for rows in plan[1:] for row in rows)
    assert padding < 0.15 * sum(lengths)
    budget = 5 * prompt_bytes(view, max(lengths))
    for rows in plan_batches(view, many, il.Run(memory=budget)):
        assert len(rows) * prompt_bytes(view, max(lengths[row] for row in rows)) <= budget
    assert all(len(rows) == 1 for rows in plan_batches(view, many, il.Run(memory=1)))


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa", "neox"])
def test_slack_against_float64(load_tiny, name):
    """For every part, the exact float64 value exceeds the float32 bound by less than a tenth of the
    slack.
    """
    models = {dtype: load_tiny(name, dtype=dtype) for dtype in (torch.float32, torch.float64)}
    batch = il.tokenize(models[torch.float32], draw(25, seed=3), prepend_bos=False)
    targets = batch.answer_tokens
    acts, exact = (il.capture(model, batch) for model in models.values())
    for against in (None, contrasts(batch)["several"]):
        compared_ids = None if against is None else check_against_ids(acts.view, targets, against)
        _, g = layer_gradients(acts, targets, acts.readout, against=compared_ids)
        heads = il.head_log_prob_increase(exact, targets, against=against)
        assert float((heads - head_bounds(acts, g)).max()) < SLACK / 10
        bounds = subhead_bounds(acts, g)
        subheads = il.subhead_log_prob_increase(exact, targets, against=against)
        assert float((subheads - bounds)[torch.isfinite(bounds)].max()) < SLACK / 10


def contrasts(many):
    """`against` for the forty prompts: the other label, and one to three tokens."""
    generator = torch.Generator().manual_seed(0)
    several = torch.stack([5 + torch.randperm(80, generator=generator)[:3] for _ in range(len(many))])
    several[::3, 1] = -1
    several[::5, 2] = -1
    return {"one": many.other_label_tokens, "several": several}


def every_contrast(model, many, against, **convention):
    """[prompt layer head], each prompt alone, by log-probabilities of the whole vocabulary."""
    contrasts_of_prompts = []
    for i in range(len(many)):
        acts = il.capture(model, many[i])
        readout = acts.readout.using(final_norm="frozen", bias=True, **convention)
        compared_ids = against[i][against[i] >= 0]

        def odds(x, readout=readout, compared=compared_ids, target=int(many[i].answer_tokens)):
            log_probs = readout.log_probs(x)
            return log_probs[..., target] - log_probs[..., compared].logsumexp(-1)

        vectors = torch.stack([acts.head_outputs(layer) for layer in range(acts.view.n_layers)], dim=1)
        contrasts_of_prompts.append(odds(acts.resid_pre[:, :, None] + vectors) - odds(acts.resid_pre)[..., None])
    return torch.cat(contrasts_of_prompts)


@pytest.mark.parametrize("which", ["one", "several"])
def test_contrast_is_taken_up_again(gpt2, many, tmp_path, monkeypatch, few_candidates, which):
    """Chunks in the folder are not recomputed, and the result is the same to the last bit."""
    against = contrasts(many)[which]
    run = il.Run(tmp_path, batch_size=8)
    whole = il.locate_heads(gpt2, many, k=2, against=against, run=run)
    parts = sorted(path.name for path in tmp_path.glob("part-*"))
    assert len(parts) == 5
    columns = pd.read_parquet(tmp_path / parts[1])
    assert columns["increase"].notna().all() == (which == "one")
    if which == "one":
        assert (columns["increase"] == columns["bound"]).all()
    (tmp_path / parts[3]).unlink()
    captured = []
    monkeypatch.setattr(
        dataset, "capture", lambda model, batch: captured.append(len(batch)) or il.capture(model, batch)
    )
    again = il.locate_heads(gpt2, many, k=2, against=against, run=run)
    assert captured == [8]
    assert again.heads == whole.heads
    assert torch.equal(again.value, whole.value)
    for name in ("certified", "n_exact", "unevaluated_bound"):
        assert getattr(again, name) == getattr(whole, name)


def answered(many: il.PromptBatch) -> il.PromptBatch:
    """Return the prompts that demonstrate their answer."""
    return many[[row for row, prompt in enumerate(many.prompts) if not prompt.has_own_answer]]


@pytest.mark.parametrize(
    ("call", "difference"),
    [
        (lambda model, many, run: il.locate_heads(model, many, k=2, by="increase", run=run), "by='contrast', got"),
        (lambda model, many, run: il.locate_heads(model, many, k=3, run=run), "k=2, got k=3"),
        (lambda model, many, run: il.locate_heads(model, many[1:], k=2, run=run), "prompts="),
        (
            lambda model, many, run: il.locate_heads(model, many, k=2, against=many.answer_tokens + 1, run=run),
            "against=",
        ),
        (
            lambda model, many, run: il.locate_heads(model, many, k=2, run=replace(run, about={"n": 1})),
            "n=None, got n=1",
        ),
        (lambda model, many, run: il.locate_effects(model, many, run=run), "by='contrast', got by='effect'"),
        (lambda model, many, run: il.mean_score_parts(model, answered(many), ["L2H1"], run=run), "7 more differ"),
        (lambda model, many, run: mean_head_increases(model, many, run=run), "got by='all increases'"),
        (lambda model, many, run: il.ablate_with_controls(model, many, ["L2H1"], run=run), "got by='ablation'"),
    ],
)
def test_a_folder_of_another_run_is_refused(gpt2, many, tmp_path, call, difference):
    run = il.Run(tmp_path / "run")
    il.locate_heads(gpt2, many, k=2, run=run)
    before = contents(tmp_path)
    with pytest.raises(il.InputError, match=f"holds a run with .*{difference}"):
        call(gpt2, many, run)
    assert contents(tmp_path) == before


RESUMED = {
    "two_towers": lambda model, prompts, run: il.two_towers(model, prompts, k=2, n_random=3, run=run),
    "task_check": lambda model, prompts, run: il.task_check(model, prompts, run=run),
    "compare_models": lambda model, prompts, run: il.compare_models(model, model, prompts, by="effect", run=run),
    "ablate_with_controls": lambda model, prompts, run: il.ablate_with_controls(
        model, il.tokenize(model, prompts), ["L1H2"], n_random=2, run=run
    ),
    "mean_head_increases": lambda model, prompts, run: mean_head_increases(model, prompts, run=run),
    "locate_effects": lambda model, prompts, run: il.locate_effects(model, prompts, run=run),
    "locate_towers": lambda model, prompts, run: il.locate_towers(model, prompts, run=run),
    "mean_score_parts": lambda model, prompts, run: il.mean_score_parts(model, prompts, ["L2H1"], run=run),
    "locate_circuit": lambda model, prompts, run: il.locate_circuit(
        model, prompts[:12], prompts[12:], ["L2H1"], n_edges=2, n_random=3, run=run
    ),
}


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("two_towers", "locate_circuit") else name
        for name in RESUMED
    ],
)  # as locate_towers
def test_what_is_stored_is_not_computed_again(gpt2, words, tmp_path, monkeypatch, function):
    """The same call in a folder with one chunk less computes this chunk only, and returns the
    same.
    """
    prompts = il.load_task("sentiment-number", n=24, path=words)

    def table(folder):
        located = RESUMED[function](gpt2, prompts, il.Run(folder, batch_size=12))
        return pd.DataFrame(located.numpy()) if isinstance(located, torch.Tensor) else located.to_frame()

    first = table(tmp_path / "run")
    pd.testing.assert_frame_equal(table(None), first, check_exact=True)
    chunks = sorted((tmp_path / "run").rglob("*-0*.parquet"))
    chunks[-1].unlink()
    computed, compute = [], ChunkStream._compute
    monkeypatch.setattr(ChunkStream, "_compute", lambda *args: computed.append(args[1]) or compute(*args))
    pd.testing.assert_frame_equal(table(tmp_path / "run"), first, check_exact=True)
    assert len(computed) == 1
    assert sorted((tmp_path / "run").rglob("*-0*.parquet")) == chunks


@pytest.mark.parametrize("locate", [il.locate_heads, mean_head_increases, il.locate_effects])
def test_a_bar_is_shown_where_one_is_asked_for(gpt2, gpt2_batch, capsys, locate):
    """With progress=True, a bar shows total and rate and is erased at the end; otherwise there is
    none.
    """
    more = {"k": 2} if locate is il.locate_heads else {}
    locate(gpt2, gpt2_batch, run=il.Run(batch_size=1), **more)
    assert capsys.readouterr().err == ""
    locate(gpt2, gpt2_batch, run=il.Run(batch_size=1, progress=True), **more)
    progress_text = capsys.readouterr().err
    assert re.search(r"/3 \[.* prompts/s", progress_text)
    assert not progress_text.rpartition("\r")[0].rpartition("\r")[2].strip()
