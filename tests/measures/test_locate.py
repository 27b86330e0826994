"""Heads located over many prompts: the mean is that of every prompt alone, however the prompts are
batched.
"""

import itertools
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from cases import slow, slow_except
from families import WORDS
from launches import contents
from tolerance import assert_close

import icl_lens as il
from icl_lens.measures import head_measures
from icl_lens.models.sizes import captured_bytes
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import count_prompts
from icl_lens.reading.head_parts import scaled_z
from icl_lens.reading.increases import every_head_increase
from icl_lens.reading.scored_tokens import check_against_ids
from icl_lens.reading.search import SLACK, head_bounds, layer_gradients, subhead_bounds
from icl_lens.runs.stream import ChunkStream, plan_batches


def draw(n, *, seed=0):
    """Ragged prompts of one to four demonstrations over the tiny tokenizer's words."""
    rng = np.random.default_rng(seed)
    words = WORDS[5:]
    prompts = []
    for _ in range(n):
        labels = list(rng.permutation(["foo", "bar", "foo", "bar"]))[: rng.integers(1, 5)]
        texts = [" ".join(rng.choice(words, rng.integers(1, 4))) for _ in labels]
        text = [
            il.Demonstration(text, str(label)) for text, label in zip(texts, labels, strict=True)
        ]
        prompts.append(
            il.Prompt(text, str(rng.choice(words)), str(rng.choice(["foo", "bar"])), ("foo", "bar"))
        )
    return prompts


@pytest.fixture(scope="module")
def many(gpt2):
    return il.tokenize(gpt2, draw(40))


@pytest.fixture(scope="module")
def every_increase(gpt2, many):
    """[prompt layer head], each prompt alone."""
    return torch.cat(
        [
            il.head_log_prob_increase(il.capture(gpt2, many[i]), many[i].answer_tokens)
            for i in range(len(many))
        ]
    )


@pytest.mark.parametrize(
    ("batch_size", "contrast"),
    [(7, None), slow(1, None), slow(7, "one"), slow(40, "several")],
)
def test_means_are_those_of_every_prompt(gpt2, many, every_increase, batch_size, contrast):
    against = contrasts(many)[contrast] if contrast else None
    all_scores = every_contrast(gpt2, many, against) if contrast else every_increase
    by = "contrast" if contrast else "increase"
    located = il.locate(gpt2, many, k=5, by=by, run=il.Run(batch_size=batch_size), against=against)
    assert_close(located.score.mean.float(), all_scores.mean(0))
    best = all_scores.mean(0).flatten().topk(5).indices.tolist()
    assert located.heads == [il.Head(i // 4, i % 4) for i in best]
    assert (located.n_prompts, located.n_heads) == (len(many), 12)


def test_several_rows_of_a_prompt_count_as_one_prompt(gpt2, many):
    """Rows at two positions of each prompt: means are over rows, and the number of prompts stays
    what it is.
    """
    early = many[:6].at([-3, -2])
    assert (len(early), count_prompts(early)) == (12, 6)
    acts = il.capture(gpt2, early)
    expected = il.head_log_prob_increase(acts).mean(0)
    located = il.locate(gpt2, early, by="increase", run=il.Run(batch_size=5))
    assert located.n_prompts == 6
    assert_close(located.score.mean.float(), expected)
    top = il.top_heads(acts, k=12, by="increase")
    assert top.n_prompts == 6
    assert_close(top.value.float(), expected.flatten().sort(descending=True).values)


@pytest.mark.parametrize("final_norm", ["frozen", "own"])
def test_conventions_are_those_of_the_readout(gpt2, many, final_norm):
    options = {"final_norm": final_norm, "bias": False}
    located = il.locate(gpt2, many[:9], by="increase", run=il.Run(batch_size=4), **options)
    acts = il.capture(gpt2, many[:9])
    expected = il.head_log_prob_increase(acts, many[:9].answer_tokens, **options)
    assert_close(located.score.mean.float(), expected.mean(0))


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "granite", "llama_gqa"])
@pytest.mark.parametrize("bias", [True, False])
def test_folded_is_unfolded(load_tiny, name, bias, monkeypatch):
    """W_O·W_U multiplied out gives what head vectors through W_U give."""
    model = load_tiny(name)
    batch = il.tokenize(model, draw(30, seed=2), prepend_bos=False)
    acts = il.capture(model, batch)
    readout = acts.readout.using(final_norm="frozen", bias=bias)
    mean_scores = []
    for limit in (1, 10**9):
        monkeypatch.setattr(
            "icl_lens.reading.increases.min_prompts_to_fold",
            lambda d_head, d_model, limit=limit: limit,
        )
        mean_scores.append(
            every_head_increase(
                acts.view, readout, acts.resid_pre, scaled_z(acts), batch.answer_tokens
            )
        )
    assert_close(mean_scores[0], mean_scores[1])
    assert mean_scores[0].abs().max() > 1e-2


def test_groups_cut_anywhere_give_the_same_mean(gpt2, many, every_increase, monkeypatch):
    """Groups of prompts share one product of W_O and W_U per head."""
    monkeypatch.setattr(head_measures, "min_prompts_to_fold", lambda d_head, d_model: 3)
    monkeypatch.setattr("icl_lens.reading.increases.min_prompts_to_fold", lambda d_head, d_model: 3)
    sizes = []
    for logit_bytes in (4, 10**9):
        monkeypatch.setattr(head_measures, "LOGIT_BYTES", logit_bytes)
        progress = {}
        run = il.Run(
            memory=2**20,
            progress=lambda kind, done, total, progress=progress: progress.update({done: total}),
        )
        located = il.locate(gpt2, many, by="increase", run=run)
        assert_close(located.score.mean.float(), every_increase.mean(0))
        sizes.append(len(progress))
    assert sizes[0] > sizes[1] == 2  # the start and one group


def test_plans_hold_each_prompt_once_sorted_by_length(gpt2, many):
    """Every prompt once; neighbors of similar length; the first batch spread over all lengths;
    memory bounded.
    """
    view = ModelView.of(gpt2)
    lengths = (many.last + 1).tolist()
    plan = plan_batches(view, many, il.Run(batch_size=8))
    assert sorted(itertools.chain.from_iterable(plan)) == list(range(40))
    assert plan == plan_batches(view, many, il.Run(batch_size=8))
    pilot = [lengths[row] for row in plan[0]]
    assert np.mean(pilot) == pytest.approx(np.mean(lengths), abs=1.0)
    padding = 0
    for rows in plan[1:]:
        lengths_of_rows = [lengths[row] for row in rows]
        padding += len(rows) * max(lengths_of_rows) - sum(lengths_of_rows)
    assert padding < 0.15 * sum(lengths)
    budget = 5 * captured_bytes(view, max(lengths))
    for rows in plan_batches(view, many, il.Run(memory=budget)):
        assert len(rows) * captured_bytes(view, max(lengths[row] for row in rows)) <= budget
    assert all(len(rows) == 1 for rows in plan_batches(view, many, il.Run(memory=1)))


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa", "neox"])
def test_slack_against_float64(load_tiny, name):
    """For every part, the exact float64 value exceeds the float32 bound by less than a tenth of
    the slack.
    """
    models = {dtype: load_tiny(name, dtype=dtype) for dtype in (torch.float32, torch.float64)}
    batch = il.tokenize(models[torch.float32], draw(25, seed=3), prepend_bos=False)
    targets = batch.answer_tokens
    acts, exact = (il.capture(model, batch) for model in models.values())
    for against in (None, contrasts(batch)["several"]):
        other_tokens = None if against is None else check_against_ids(acts.view, targets, against)
        _, g = layer_gradients(acts, targets, acts.readout, against=other_tokens)
        heads = il.head_log_prob_increase(exact, targets, against=against)
        assert float((heads - head_bounds(acts, g)).max()) < SLACK / 10
        bounds = subhead_bounds(acts, g)
        subheads = il.subhead_log_prob_increase(exact, targets, against=against)
        assert float((subheads - bounds)[torch.isfinite(bounds)].max()) < SLACK / 10


def contrasts(many):
    """`against` for the forty prompts: the other label, and one to three tokens."""
    generator = torch.Generator().manual_seed(0)
    several = torch.stack(
        [5 + torch.randperm(80, generator=generator)[:3] for _ in range(len(many))]
    )
    several[::3, 1] = -1
    several[::5, 2] = -1
    return {"one": many.other_label_tokens, "several": several}


def every_contrast(model, many, against, **convention):
    """[prompt layer head], each prompt alone, by log-probabilities of the whole vocabulary."""
    mean_scores = []
    for i in range(len(many)):
        acts = il.capture(model, many[i])
        readout = acts.readout.using(final_norm="frozen", bias=True, **convention)
        other_tokens = against[i][against[i] >= 0]

        def odds(x, readout=readout, other_tokens=other_tokens, target=int(many[i].answer_tokens)):
            log_probs = readout.log_probs(x)
            return log_probs[..., target] - log_probs[..., other_tokens].logsumexp(-1)

        vectors = torch.stack(
            [acts.head_outputs(layer) for layer in range(acts.view.n_layers)], dim=1
        )
        mean_scores.append(
            odds(acts.resid_pre[:, :, None] + vectors) - odds(acts.resid_pre)[..., None]
        )
    return torch.cat(mean_scores)


@pytest.mark.parametrize("which", [slow("one"), "several"])
def test_contrast_is_taken_up_again(gpt2, many, tmp_path, monkeypatch, which):
    """Chunks in the folder are not recomputed, and the result is the same to the last bit."""
    against = contrasts(many)[which]
    run = il.Run(tmp_path, batch_size=8)
    whole = il.locate(gpt2, many, by="contrast", k=2, against=against, run=run)
    parts = sorted(path.name for path in tmp_path.glob("part-*"))
    assert len(parts) == 5
    (tmp_path / parts[3]).unlink()
    captured = []
    monkeypatch.setattr(
        head_measures,
        "capture",
        lambda model, batch: captured.append(len(batch)) or il.capture(model, batch),
    )
    again = il.locate(gpt2, many, by="contrast", k=3, against=against, run=run)
    assert captured == [8]
    assert again.heads[:2] == whole.heads
    assert torch.equal(again.score.mean, whole.score.mean)


def answered(many: il.PromptBatch) -> il.PromptBatch:
    """Return the prompts that demonstrate their answer."""
    return many[[row for row, prompt in enumerate(many.prompts) if not prompt.has_own_answer]]


@pytest.mark.parametrize(
    ("call", "difference"),
    [
        (
            lambda model, many, run: il.locate(model, many, k=2, by="increase", run=run),
            "by='effect', got",
        ),
        (lambda model, many, run: il.locate(model, many[1:], k=2, run=run), "prompts="),
        (
            lambda model, many, run: il.locate(
                model, many, k=2, against=many.answer_tokens + 1, run=run
            ),
            "against=",
        ),
        (
            lambda model, many, run: il.locate(model, many, k=2, run=replace(run, about={"n": 1})),
            "n=None, got n=1",
        ),
        (
            lambda model, many, run: il.locate(model, many, by="contrast", run=run),
            "by='effect', got by='contrast'",
        ),
        (
            lambda model, many, run: il.mean_score_parts(model, answered(many), ["L2H1"], run=run),
            "6 more differ",
        ),
        (
            lambda model, many, run: il.ablate_with_controls(model, many, ["L2H1"], run=run),
            "got by='ablation'",
        ),
    ],
)
def test_a_folder_of_another_run_is_refused(gpt2, many, tmp_path, call, difference):
    run = il.Run(tmp_path / "run")
    il.locate(gpt2, many, k=2, run=run)
    before = contents(tmp_path)
    with pytest.raises(il.InputError, match=f"holds a run with .*{difference}"):
        call(gpt2, many, run)
    assert contents(tmp_path) == before


RESUMED = {
    "two_towers": lambda model, prompts, run: il.two_towers(
        model, prompts, k=2, n_random=3, run=run
    ),
    "task_check": lambda model, prompts, run: il.task_check(model, prompts, run=run),
    "compare_models": lambda model, prompts, run: il.compare_models(
        model, model, prompts, by="effect", run=run
    ),
    "ablate_with_controls": lambda model, prompts, run: il.ablate_with_controls(
        model, il.tokenize(model, prompts), ["L1H2"], n_random=2, run=run
    ),
    **{
        f"locate, {by}": lambda model, prompts, run, by=by: il.locate(
            model, prompts, by=by, run=run
        )
        for by in ("increase", "effect", "exchange")
    },
    "mean_score_parts": lambda model, prompts, run: il.mean_score_parts(
        model, prompts, ["L2H1"], run=run
    ),
    "locate_circuit": lambda model, prompts, run: il.locate_circuit(
        model, prompts[:12], prompts[12:], ["L2H1"], n_edges=2, n_random=3, run=run
    ),
}
QUICKLY_RESUMED = ("mean_score_parts", "task_check")


@pytest.mark.parametrize(
    "function",
    slow_except(QUICKLY_RESUMED, RESUMED),
)
def test_what_is_stored_is_not_computed_again(gpt2, words, tmp_path, monkeypatch, function):
    """The same call in a folder with one chunk less computes this chunk only, and returns the
    same.
    """
    prompts = il.load_task("sentiment-number", n=24, path=words)

    def table(folder):
        return RESUMED[function](gpt2, prompts, il.Run(folder, batch_size=12)).to_frame()

    first = table(tmp_path / "run")
    pd.testing.assert_frame_equal(table(None), first, check_exact=True)
    chunks = sorted((tmp_path / "run").rglob("*-0*.parquet"))
    chunks[-1].unlink()
    computed, compute = [], ChunkStream._compute
    monkeypatch.setattr(
        ChunkStream, "_compute", lambda *args: computed.append(args[1]) or compute(*args)
    )
    pd.testing.assert_frame_equal(table(tmp_path / "run"), first, check_exact=True)
    assert len(computed) == 1
    assert sorted((tmp_path / "run").rglob("*-0*.parquet")) == chunks


@pytest.mark.parametrize("by", ["contrast", slow("effect")])
def test_a_bar_is_shown_where_one_is_asked_for(gpt2, gpt2_batch, capsys, by):
    """With progress=True, a bar shows total and rate and is erased at the end; otherwise there is
    none.
    """
    il.locate(gpt2, gpt2_batch, by=by, run=il.Run(batch_size=1))
    assert capsys.readouterr().err == ""
    il.locate(gpt2, gpt2_batch, by=by, run=il.Run(batch_size=1, progress=True))
    text = capsys.readouterr().err
    assert re.search(r"/3 \[.* prompts/s", text)
    assert not text.rpartition("\r")[0].rpartition("\r")[2].strip()
