"""Compare two models over many prompts: scores of the answers and of every head, with intervals of the differences."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from icl_lens.activations.activations import Activations, capture
from icl_lens.attribution.increases import head_log_prob_increase
from icl_lens.errors import InputError
from icl_lens.interventions.effects import head_effects
from icl_lens.locate.towers import SINGLE, single_exchanges, tower_prompts
from icl_lens.metrics import is_correct, label_log_odds
from icl_lens.models.active_edits import active_edits
from icl_lens.models.memory import CAPTURE_TOKENS
from icl_lens.models.readout import FinalNorm
from icl_lens.models.view import ModelView
from icl_lens.prompts.prompt import Prompt, Template
from icl_lens.prompts.tokenize import tokenize
from icl_lens.report.model_comparison import ModelComparison
from icl_lens.runs.run import Run, as_run
from icl_lens.runs.stream import plan_in_order, start
from icl_lens.scores import SCORES, Score, choose_score


def compare_models(
    a: Any,
    b: Any,
    prompts: Sequence[Prompt],
    *,
    by: Score = "contrast",
    template: Template | None = None,
    prepend_bos: bool | None = None,
    shared_prefix: Literal["error", "append"] = "error",
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    run: Run | None = None,
) -> ModelComparison:
    """Compare two models on the same prompts, for example a model before and after fine-tuning.

    Both models score each prompt's answer: whether it is the most probable label or, if no demonstration shows it, the
    most probable token of the vocabulary, log p(answer), and log p(answer) − log Σ p(other labels). The scores of each
    head are its contrast, its increase and, with `by="effect"`, the log-odds that the answer loses if the head is
    zeroed at the last position, or, with `by="towers"`, those that it loses if the head's query there is exchanged
    (`locate_towers`). `by` selects the score whose mean change ranks heads. Intervals resample queries, because prompts
    with the same query are not independent. `template`, `prepend_bos` and `shared_prefix` are those of `tokenize`.
    `run` says how the prompts run (see `Run`); the chunks of each model are in a folder of its own, "a" and "b".

    Raise InputError for fewer than two prompts, prompts without an answer, or an unknown `by`; with `by="towers"`, also
    for prompts that do not demonstrate their answer and another label.

    Example:
        >>> prompts = il.load_task("sentiment-number", n=4)
        >>> both = il.compare_models(model, model, prompts)
        >>> both.to_frame().columns.tolist()
        ['name', 'change', 'low', 'high', 'a', 'b', 'layer', 'head']
        >>> both.summary()["change"].tolist()
        [0.0, 0.0, 0.0]
    """
    by = choose_score(by, SCORES, comparable=True)
    if len(prompts) < 2 or any(prompt.answer is None for prompt in prompts):
        raise InputError("prompts must be at least two prompts with answers; use il.compare for a single prompt")
    tokenizing: dict[str, Any] = {"prepend_bos": prepend_bos, "shared_prefix": shared_prefix}
    options: dict[str, Any] = {"final_norm": final_norm, "bias": bias}
    sides = []
    for side, model in zip("ab", (a, b), strict=True):
        batch = tokenize(model, prompts, template=template or Template(), **tokenizing)
        exchanged = tower_prompts(model, batch, own_texts=False) if by == "towers" else None

        def compute(numbers: list[int], model=model, batch=batch, exchanged=exchanged) -> dict[str, Tensor]:
            rows = batch[numbers]
            acts, choices = capture(model, rows), rows.label_mask
            scores = acts.label_log_probs.cpu()
            others = rows.other_label_tokens
            found = {
                "accuracy": _is_correct(acts),
                "log p": scores.gather(1, rows.answer.cpu()[:, None])[:, 0],
                "log-odds": label_log_odds(scores, rows.answer, choices=choices),
                "increase": head_log_prob_increase(acts, rows.answer_tokens, **options),
                "contrast": head_log_prob_increase(acts, rows.answer_tokens, against=others, **options),
            }
            if by == "effect":
                found["effect"] = head_effects(model, rows).log_odds
            if exchanged is not None:
                lost, _ = single_exchanges(acts.view, exchanged.select(numbers), SINGLE[:1])
                found["towers"] = lost[:, 0]
            return {name: value.double() for name, value in found.items()}

        plan = plan_in_order(batch, run, n_tokens=CAPTURE_TOKENS)
        measured = {"measure": by, **options}
        with start(as_run(run).part(side), model, batch, "comparison", measured, plan=plan) as stream:
            sides.append(stream.map("comparison", compute))
    queries = batch.queries
    views = ModelView.of(a), ModelView.of(b)
    names, edits = (views[0].name, views[1].name), (active_edits(views[0]), active_edits(views[1]))
    return ModelComparison(names, by, *sides, queries=queries, edits=edits)


def _is_correct(acts: Activations) -> Bool[Tensor, " batch"]:
    """Return whether each answer is the most probable label or, if it is a word of its own, the most probable token."""
    batch, readout = acts.batch, acts.readout.using(final_norm="frozen", bias=True)
    among = is_correct(acts.label_log_probs.cpu(), batch.answer, choices=batch.label_mask)
    over = readout.log_probs(acts.resid_final).argmax(-1).cpu() == batch.answer_tokens.cpu()
    return torch.where(torch.tensor([prompt.has_own_answer for prompt in batch.prompts]), over, among)
