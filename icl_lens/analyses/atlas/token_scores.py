"""Scores of heads on texts: attention to the token before, and copy suppression.

All positions of a text are read from one pass. At a position, copy suppression looks at one token:
of the earlier tokens of the text, other than the current one, the one whose logit is largest
according to the residual stream before the head's layer (logit lens). The score is minus what the
head adds to this token's logit by attending to its occurrences.

Source: McDougall et al., arXiv 2310.04625; previous tokens: Olsson et al., arXiv 2209.11895.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.plain_text import Text
from icl_lens.prompts.tokenize import tokenize
from icl_lens.reading.activations import Activations
from icl_lens.reading.capture import capture
from icl_lens.reading.increases import project_subheads
from icl_lens.reading.repeated_tokens import prefix_tokens
from icl_lens.runs.progress import steps

TEXTS = (
    "The old lighthouse stood above the harbor. Every evening Mara climbed the lighthouse stairs, "
    "and every evening her brother waited in the harbor until Mara lit the lamp.",
    "Peter gave the red book to Anna. Anna read the red book twice, and then Anna gave the book "
    "back to Peter, who put it on the shelf beside the window.",
    "Rain fell on the mountain for three days. On the fourth day the river below the mountain "
    "rose, and the people of the village carried stones to the river.",
    "To make the soup, cut two onions and a carrot. Fry the onions in butter, add the carrot and "
    "a little water, and cook the soup until the carrot is soft.",
    "The committee met on Monday to discuss the new bridge. The chairman said that the bridge "
    "would cost too much, and the committee decided to meet again on Friday.",
    "My grandmother kept bees. She said that bees know the weather before we do: when the bees "
    "stay in the hive, my grandmother took her coat.",
    "A comet is a small body of ice and dust. When a comet comes near the sun, the ice turns into "
    "gas, and the dust forms a tail that points away from the sun.",
    "The train to London leaves at nine. If you miss the train at nine, there is a bus at ten, "
    "but the bus to London takes two hours longer than the train.",
    "Lucas wanted to buy a violin, but the violin in the shop was expensive. The owner of the "
    "shop heard Lucas play, and lent Lucas the violin for a year.",
    "In winter the lake freezes and the children skate on the lake. In summer the same children "
    "swim in the lake, and the old men sit in boats and fish.",
    "The doctor looked at the picture for a long time. Then the doctor called the nurse, showed "
    "the nurse the picture, and asked her to bring the patient.",
    "Two cats lived in the bakery. The black cat slept on the warm oven, and the white cat slept "
    "in the window, where the baker put the bread for the black cat to guard.",
)
"""Short texts in which words occur again, so that a model has something to copy."""


def tokenized_texts(view: ModelView, texts: Sequence[str]) -> PromptBatch:
    """Return the texts as tokens; raise InputError for words that the model does not know."""
    try:
        batch = tokenize(view.model, [Text(text) for text in texts])
    except InputError as error:
        if "vocabulary" not in str(error):
            raise
        raise InputError(
            "the model's vocabulary lacks words of the texts (pass text= in its own words)"
        ) from error
    unknown = getattr(view.model.tokenizer, "unk_token_id", None)
    is_unknown = (batch.tokens == unknown) & batch.attention_mask.bool()
    share = float(is_unknown.sum() / batch.attention_mask.sum())
    if unknown is not None and share > 0.1:
        raise InputError(
            f"text must have words that the model knows, got {share:.0%} unknown tokens; pass "
            "text= in the model's own vocabulary"
        )
    if int(batch.last.min()) < 2 + len(prefix_tokens(view.model)):
        raise InputError("each text must have at least three tokens; pass longer texts")
    return batch


@torch.no_grad()
def text_scores(view: ModelView, batch: PromptBatch) -> dict[str, Float[Tensor, "text layer head"]]:
    """Return the scores of each text, means over its positions: `previous_token_in_text` (0 to 1)
    and `copy_suppression` (logit, before a soft cap).
    """
    n_prefix = len(prefix_tokens(view.model))
    previous_token, suppression = [], []
    with steps("heads on texts", len(batch)) as advance:
        for row in range(len(batch)):
            text = batch[[row]]
            positions = list(range(n_prefix + 1, int(text.last) + 1))
            acts = capture(view.model, text, positions=[positions])
            previous_token.append(_previous_token(acts).mean(0))
            suppression.append(_copy_suppression(acts, n_prefix))
            advance(1)
    return {
        "previous_token_in_text": torch.stack(previous_token).double().cpu(),
        "copy_suppression": torch.stack(suppression).double().cpu(),
    }


def _previous_token(acts: Activations) -> Float[Tensor, "position layer head"]:
    """Return the attention from each position to the one before."""
    last = acts.batch.last.to(acts.pattern.device)
    return acts.pattern[torch.arange(len(last)), :, :, last - 1]


def _copy_suppression(acts: Activations, n_prefix: int) -> Float[Tensor, "layer head"]:
    """Return the mean over positions of minus what heads add to the logit of the earlier token that
    is predicted most; positions without an earlier, different token do not count.
    """
    readout = replace(acts.readout.using(final_norm="frozen", bias=True), soft_cap=None)
    tokens = acts.batch.tokens.to(acts.resid_pre.device)
    can_be_copied = copyable_positions(tokens, acts.batch.last.to(tokens.device), n_prefix)
    has_token = can_be_copied.any(1)
    by_layer = []
    for layer in range(acts.view.n_layers):
        predicted = _predicted_tokens(acts, layer, can_be_copied)
        directions = readout.direction(readout.token_columns(predicted))
        added = project_subheads(acts, directions, layer)  # [position head key]
        is_occurrence = can_be_copied & (tokens == predicted[:, None])
        through_occurrences = (added * is_occurrence[:, None]).sum(-1)
        by_layer.append(-through_occurrences[has_token].mean(0))
    return torch.stack(by_layer)


def copyable_positions(
    tokens: Int[Tensor, "position key"], last: Int[Tensor, " position"], n_prefix: int
) -> Bool[Tensor, "position key"]:
    """Return which keys are earlier tokens of the text that differ from the current one."""
    keys = torch.arange(tokens.shape[1], device=tokens.device)
    current = tokens.gather(1, last[:, None])
    return (keys < last[:, None]) & (keys >= n_prefix) & (tokens != current)


def _predicted_tokens(
    acts: Activations, layer: int, can_be_copied: Bool[Tensor, "position key"]
) -> Int[Tensor, " position"]:
    """Return, at each position, the token that the residual stream before a layer predicts most,
    among those that can be copied.
    """
    tokens = acts.batch.tokens.to(acts.resid_pre.device)
    distinct, column = tokens.unique(return_inverse=True)
    lens = acts.readout.using(final_norm="own", bias=True).select_tokens(distinct)
    logits = lens.logits(acts.resid_pre[:, layer]).gather(1, column)
    return tokens.gather(1, logits.masked_fill(~can_be_copied, -torch.inf).argmax(1, True))[:, 0]
