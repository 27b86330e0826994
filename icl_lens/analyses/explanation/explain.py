"""Explain one prompt: what raises the answer, what heads encode, and what ablating them does."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from icl_lens.analyses.explanation import compute_reports
from icl_lens.analyses.explanation.compute_head_reports import WriterReadings, head_reports
from icl_lens.analyses.explanation.compute_reports import ScoredPrompt
from icl_lens.analyses.explanation.reports import Settings
from icl_lens.analyses.explanation.result import Explanation
from icl_lens.edits.ablate import Ablate
from icl_lens.edits.one_token_rows.prefix_cache import PrefixCache
from icl_lens.errors import InputError, check_choice, check_integers, short_repr
from icl_lens.foundation.defaults import N_ABLATED, N_DESCRIBED, N_RANDOM_SETS
from icl_lens.foundation.ranking_scores import SCORES, Score, choose_score
from icl_lens.measures.effects import exact_effects
from icl_lens.models.active_edits import active_edits
from icl_lens.models.freed_memory import release_after_large_pass
from icl_lens.models.head import AnyHead, Head
from icl_lens.models.passes.locking import reserves_model
from icl_lens.models.readout import FinalNorm
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.decision_rows import with_own_labels
from icl_lens.prompts.plain_text import Text
from icl_lens.prompts.prompt import Prompt, Template, check_no_table
from icl_lens.prompts.tokenize import tokenize
from icl_lens.reading.answer_spacing import warn_of_answer_spacing
from icl_lens.reading.capture import capture
from icl_lens.reading.increases import head_log_prob_increase
from icl_lens.reading.scored_tokens import AnswerTokens
from icl_lens.reading.similarity import compared_positions
from icl_lens.runs.progress import Progress, progress_callback

N_STEPS = 5
"""Steps that progress counts: scores, ablations, demonstrations, heads, and other sections."""


@reserves_model
def explain(
    model: Any,
    prompt: Prompt | Text | PromptBatch | str,
    *,
    against: str | Sequence[str] | None = None,
    template: Template | None = None,
    labels: Sequence[str] | None = None,
    prepend_bos: bool | None = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    by: Score | None = None,
    why: AnyHead | None = None,
    k: int = N_DESCRIBED,
    n_ablated: int = N_ABLATED,
    n_random: int = N_RANDOM_SETS,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Explanation:
    """Explain one prompt's answer, or the next token of plain text (`Text`).

    `prompt` may be a string for `Prompt.parse`, or a batch of one row. Explained is the answer's
    token, or that of the label that the model predicts if the prompt has no answer. The `k` heads
    with the largest score are described; the first `n_ablated` of them are zeroed jointly, at the
    last position, and compared with `n_random` random sets of the same size
    (`Explanation.finding`).

    A part's contrast is what it adds to log p(answer) − log Σ p(`against`), where `against`
    defaults to all other labels; its increase is what it adds to log p(answer). The contrast
    separates heads that find the answer from heads that raise every label. Increases are not
    additive: those of the parts need not sum to that of the total.

    `by` selects the score that ranks heads: "contrast" (default), "increase" (default if there is
    nothing to compare with), "effect", the drop in these log-odds, or else in log p(answer), if the
    head is zeroed at the last position, or "exchange", the log-odds that the answer loses against
    all other labels if the head's query there, and nothing else, is that of the same demonstrations
    with a query of the other class: the text of a demonstration that has the next label
    (`two_towers`, `AllHeadsReport.other_query`).

    Each described head's attention and values are split by what earlier components wrote
    (`attention_score_parts`, `value_parts`). `why` names a head to describe even if it is not among
    the k.

    Plain text has no demonstrations, and its target is any token, the text's own answer, compared
    with its own `against`; without an answer, the target is the model's most probable token.
    `template`, `labels` and `prepend_bos` are those of `tokenize`.

    Inside `with` blocks that edit the model, such as `il.ablate_heads`, and under hooks of your
    own, the edited model is explained: `Explanation.edits` names the edits, as do its page, its
    JSON and the terminal.

    If this takes longer than two seconds, a terminal or notebook shows a progress bar;
    `progress=False` shows none, and a function is called with the name of the stage, the steps done
    and their number.

    A section that cannot be computed for the model's family is left out, and `left_out` gives the
    reason.

    Raise InputError for invalid prompts or options; warn if a label is scored by a white-space
    token.

    Example:
        >>> explanation = il.explain(model, prompt, k=4)
        >>> explanation.target, len(explanation.heads)
        ('foo', 4)
        >>> explanation.scores.compared_with
        ('bar',)
        >>> il.explain(model, il.Text("love bar love", answer=" bar"), k=3).is_plain_text
        True
    """
    k, n_ablated, n_random, seed = check_integers(
        k=k, n_ablated=n_ablated, n_random=n_random, seed=seed
    )
    options = Settings(
        final_norm=final_norm,
        bias=bias,
        k=k,
        n_ablated=n_ablated,
        n_random=n_random,
        seed=seed,
        prepend_bos=prepend_bos,
        against=_listed(against),
    )
    if by is not None:
        check_choice("by", by, SCORES)
    batch, options = _prepared(
        model, prompt, options, against=against, template=template, labels=labels
    )
    with progress_callback(progress, unit=" steps") as show_progress:
        explanation = _explained(
            model,
            batch,
            options,
            by,
            why,
            lambda n_finished: show_progress("explaining", n_finished, N_STEPS),
        )
    if not explanation.is_plain_text:
        # The first remark only states that multi-token labels are scored by one token.
        for remark in explanation.remarks[1:]:
            warnings.warn(remark, stacklevel=3)
    return explanation


def _explained(
    model: Any,
    batch: PromptBatch,
    options: Settings,
    by: Score | None,
    why: AnyHead | None,
    show_progress: Callable[[int], None],
) -> Explanation:
    """Return the explanation of a batch of one row; `show_progress` gets the number of finished
    steps.
    """
    show_progress(0)
    writers = compared_positions(batch) if batch.has_demonstrations else False
    # What components wrote in a long prompt is as large as a cache of it, so it is not kept beside
    # one: it is read first or, where the score of heads needs a cache, captured last.
    captures_writers_last = batch.has_demonstrations and by in ("effect", "exchange")
    acts = capture(model, batch, writers=False if captures_writers_last else writers)
    warn_of_answer_spacing(model.tokenizer, batch, acts.token_log_probs)
    why = None if why is None else acts.view.check_head(why)
    dtype = str(acts.z.dtype).removeprefix("torch.")
    options = replace(options, why=None if why is None else str(why), dtype=dtype)
    scored = ScoredPrompt.from_activations(model, acts, options)
    by = choose_score(by, SCORES, comparable=bool(scored.others))
    scored = replace(scored, options=replace(options, by=by))
    cached = compute_reports.row_cache(scored) if by == "effect" else None
    head_scores, other_query = _head_scores(scored, by, cached)
    show_progress(1)
    order = head_scores[by].flatten().argsort(descending=True)[: options.k].tolist()
    located = [Head.from_index(index, acts.view.n_heads) for index in order]
    if why is not None and why not in located:
        located.append(why)
    attempts = compute_reports.Attempts()
    if not captures_writers_last:
        readings, scored = _read_writers(scored, located, attempts)
        acts = scored.acts
    if cached is None:
        cached = compute_reports.row_cache(scored)
    single, ablation = compute_reports.ablation(scored, located, cached)
    show_progress(2)
    added = compute_reports.demonstrations(scored, attempts, cached)
    del cached
    show_progress(3)
    if captures_writers_last:
        options = scored.options
        del acts, scored  # before the pass that gives them again, with what components wrote
        acts = capture(model, batch, writers=writers)
        scored = ScoredPrompt.from_activations(model, acts, options)
        readings, scored = _read_writers(scored, located, attempts)
        acts = scored.acts
        release_after_large_pass(acts.view, scored.n_tokens)
    heads = tuple(head_reports(scored, located, head_scores, single, readings, attempts))
    show_progress(4)
    model_input = compute_reports.inputs(scored)
    explanation = Explanation(
        model=acts.view.name,
        input=model_input,
        scores=compute_reports.score_report(scored, model_input),
        layers=compute_reports.layers(scored),
        all_heads=compute_reports.all_heads(scored, head_scores, other_query),
        heads=heads,
        subheads=compute_reports.subheads(scored),
        ablation=ablation,
        demonstrations=added,
        settings=compute_reports.settings(scored),
        edits=active_edits(acts.view),
        left_out=attempts.left_out,
    )
    show_progress(N_STEPS)
    return explanation


def _read_writers(
    scored: ScoredPrompt, located: list[Head], attempts: compute_reports.Attempts
) -> tuple[WriterReadings, ScoredPrompt]:
    """Return what reports read of the writers of the prompt, and the prompt without them."""
    readings = WriterReadings.of(scored, located, attempts)
    return readings, replace(scored, acts=replace(scored.acts, writers=None))


def _head_scores(
    scored: ScoredPrompt, by: Score, cached: PrefixCache | None
) -> tuple[dict[Score, Float[Tensor, "layer head"]], str]:
    """Return the scores of all heads, and the query of the other class for "exchange".

    Effects are computed from `cached`, the prompt's cache, if there is one.
    """
    acts, targets, options = scored.acts, scored.targets, scored.readout_options
    head_scores: dict[Score, Tensor] = {
        "increase": head_log_prob_increase(acts, targets, **options)[0]
    }
    if scored.others:
        contrast = head_log_prob_increase(acts, targets, against=scored.against, **options)
        head_scores["contrast"] = contrast[0]
    if by == "effect":
        tokens = AnswerTokens.from_batch(acts.view, acts.batch, targets, scored.against)
        zeroed = Ablate([], positions="last")
        effects = exact_effects(acts.view, acts.batch, tokens, zeroed, cached=cached)
        head_scores["effect"] = (effects.log_odds if scored.others else effects.log_prob)[0]
    other_query = ""
    if by == "exchange":
        head_scores["exchange"], other_query = compute_reports.query_exchanges(scored)
    return head_scores, other_query


def _prepared(
    model: Any,
    prompt: Prompt | Text | PromptBatch | str,
    options: Settings,
    *,
    against: str | Sequence[str] | None,
    template: Template | None,
    labels: Sequence[str] | None,
) -> tuple[PromptBatch, Settings]:
    """Return the batch of one row to explain, and the options with its target and `against`.

    Raise InputError for arguments that the prompt does not take.
    """
    if isinstance(prompt, PromptBatch):
        _check_single_row(
            prompt,
            against=against,
            template=template,
            labels=labels,
            prepend_bos=options.prepend_bos,
        )
        has_rows = prompt.decisions.prompt_index is not None
        batch = with_own_labels(prompt) if has_rows else prompt
        return batch, _with_targets(options, batch)
    if isinstance(prompt, Text):
        if against is not None:
            raise InputError(
                f"against must be None for il.Text, got {short_repr(against)}; set it in "
                "il.Text(against=...)"
            )
        options = replace(options, target=prompt.answer, against=prompt.against)
    else:
        prompt = _demonstrating_prompt(prompt, template or Template())
        _check_labels_of_prompt(labels, prompt)
    tokenizing: dict[str, Any] = {"labels": labels, "prepend_bos": options.prepend_bos}
    decisions = tokenize(model, prompt, template=template or Template(), **tokenizing)
    # The answer's last decision, against the labels that are most like it; without an answer, the
    # first.
    number = 0 if prompt.answer is None else len(decisions) - 1
    return with_own_labels(decisions[number]), options


def _check_labels_of_prompt(labels: Sequence[str] | None, prompt: Prompt) -> None:
    """Raise InputError for labels that the prompt does not offer."""
    for label in labels or ():
        if label not in prompt.labels:
            raise InputError(
                f"labels has {label!r}, which this prompt does not offer; il.Prompt(…, labels=…) "
                "offers labels that no demonstration shows"
            )


def _with_targets(options: Settings, batch: PromptBatch) -> Settings:
    """Return the options with the targets that a batch has of its own, if it has any."""
    if batch.targets is None:
        return options
    target = int(batch.answer_tokens[0])
    compared = None
    if batch.against is not None:
        compared = [token for token in batch.against[0].tolist() if token >= 0]
    return replace(
        options, target=None if target < 0 else target, against=_listed(compared or None)
    )


def _demonstrating_prompt(prompt: Prompt | str, template: Template) -> Prompt:
    """Return a prompt, of which text is parsed; raise InputError for one without demonstrations."""
    check_no_table(prompt)
    prompt = Prompt.parse(prompt) if isinstance(prompt, str) else prompt
    if not isinstance(prompt, Prompt):
        raise InputError(
            "prompt must be a string, an il.Prompt, an il.Text or a batch of one row, got "
            f"{short_repr(prompt)}"
        )
    if not prompt.demonstrations:
        labels = sorted(prompt.labels, key=lambda label: label != prompt.answer)
        answer, *against = (template.gap + label for label in labels)
        raise InputError(
            "prompt must have demonstrations to explain, got none; explain its text, with "
            f"il.explain(model, il.Text({template.render(prompt).text!r}, answer={answer!r}, "
            f"against={against!r}))"
        )
    return prompt


def _listed(against: str | int | Sequence[str | int] | None) -> tuple[str | int, ...] | None:
    """Return `against` as a tuple; raise InputError if it is empty."""
    if against is None or isinstance(against, (str, int)):
        return None if against is None else (against,)
    if not against:
        raise InputError(
            "against must not be empty; pass labels or tokens to compare the answer with, or omit "
            "it"
        )
    return tuple(against)


def _check_single_row(batch: PromptBatch, **arguments: Any) -> None:
    """Raise InputError unless the batch has one row and no argument duplicates what it holds."""
    if len(batch) != 1:
        raise InputError(
            f"prompt must be a batch of one row, got {len(batch)} rows; pass one prompt, e.g. "
            "batch[0]"
        )
    conflicting = [name for name, value in arguments.items() if value is not None]
    if conflicting:
        name = conflicting[0]
        raise InputError(
            f"{name} must be None for a tokenized prompt, got {short_repr(arguments[name])}; pass "
            "it when tokenizing"
        )
