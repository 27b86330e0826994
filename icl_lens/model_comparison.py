"""Compare two models over many prompts: scores of the answers and of every head, with intervals of the differences."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from icl_lens.activations.activations import capture
from icl_lens.attribution.increases import head_log_prob_increase
from icl_lens.errors import InputError
from icl_lens.interventions.effects import head_effects
from icl_lens.locate.towers import SINGLE, single_exchanges, tower_prompts
from icl_lens.metrics import is_correct, label_log_odds
from icl_lens.models.active_edits import active_edits
from icl_lens.models.readout import FinalNorm
from icl_lens.models.view import ModelView
from icl_lens.progress import Progress, progress_callback
from icl_lens.prompts.prompt import Prompt, Template
from icl_lens.prompts.tokenize import tokenize
from icl_lens.report.model_comparison import ModelComparison
from icl_lens.scores import SCORES, Score, choose_score

# Tokens per forward pass.
PASS_TOKENS = 2048


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
    progress: Progress | bool | None = None,
) -> ModelComparison:
    """Compare two models on the same prompts, for example a model before and after fine-tuning.

    Both models score each prompt's answer: whether it is the most probable label, log p(answer), and
    log p(answer) − log Σ p(other labels). The scores of each head are its contrast, its increase and, with
    `by="effect"`, the log-odds that the answer loses if the head is zeroed at the last position, or, with
    `by="towers"`, those that it loses if the head's query there is exchanged (`locate_towers`). `by` selects the score
    whose mean change ranks heads. Intervals resample queries, because prompts with the same query are not independent.
    `template`, `prepend_bos` and `shared_prefix` are those of `tokenize`; `progress=True` shows a progress bar.

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
    sides = []
    with progress_callback(progress) as report:
        for model in (a, b):
            batch = tokenize(model, prompts, template=template or Template(), **tokenizing)
            exchanged = tower_prompts(model, batch, own_texts=False) if by == "towers" else None
            pieces: list[dict[str, torch.Tensor]] = []
            size = max(1, PASS_TOKENS // batch.tokens.shape[1])
            for start in range(0, len(batch), size):
                numbers = range(start, min(start + size, len(batch)))
                rows = batch[numbers]
                acts, choices = capture(model, rows), rows.label_mask
                scores = acts.label_log_probs.cpu()
                options: dict[str, Any] = {"final_norm": final_norm, "bias": bias}
                others = rows.other_label_tokens
                found = {
                    "accuracy": is_correct(scores, rows.answer, choices=choices),
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
                pieces.append({name: value.cpu().double() for name, value in found.items()})
                done = len(sides) * len(prompts) + sum(len(piece["log p"]) for piece in pieces)
                report("comparing", done, 2 * len(prompts))
            queries = batch.queries
            sides.append({name: torch.cat([piece[name] for piece in pieces]).numpy() for name in pieces[0]})
    views = ModelView.of(a), ModelView.of(b)
    names, edits = (views[0].name, views[1].name), (active_edits(views[0]), active_edits(views[1]))
    return ModelComparison(names, by, *sides, queries=queries, edits=edits)
