"""How prompts begin, beside how a user's TransformerLens model begins a text that it is called on.

TransformerLens puts a beginning-of-sequence token in front of most texts
(`cfg.default_prepend_bos`), also where the model's tokenizer, which `tokenize` follows, has none.
"""

from typing import Any
from weakref import WeakSet

from icl_lens.errors import warn_user
from icl_lens.prompts.token_ids import name_tokens

_COMPARED: "WeakSet[Any]" = WeakSet()
"""Models that need no comparison any more."""


def expect_no_comparison(model: Any) -> None:
    """Note that a model was not made by the user, who thus has no numbers of it to compare."""
    _COMPARED.add(model)


def warn_of_other_beginning(
    model: Any, text: str, ids: list[int], *, prepend_bos: bool | None
) -> None:
    """Warn, once for each model, if `model(text)` reads other special tokens in front than `ids`,
    the tokens of `text` as it was tokenized.

    If the user has passed `prepend_bos`, there is nothing to say.
    """
    if prepend_bos is not None or not hasattr(model, "to_tokens") or model in _COMPARED:
        return
    _COMPARED.add(model)
    own_ids = model.to_tokens(text, move_to_device=False)[0].tolist()
    if own_ids == ids:
        return
    added_by_model = own_ids[: max(0, len(own_ids) - len(ids))]
    added_by_us = ids[: max(0, len(ids) - len(own_ids))]
    if own_ids != [*added_by_model, *ids] and ids != [*added_by_us, *own_ids]:
        return  # other differences are no matter of prepend_bos
    names = name_tokens(model.tokenizer, [added_by_us or added_by_model])[0]
    token = " ".join(map(repr, names))
    ours, theirs = f"begins without {token}", f"begins with {token}"
    is_added = bool(added_by_us)
    if is_added:
        ours, theirs = theirs, ours
    warn_user(
        f"a prompt {ours}, as this model's tokenizer has it, and model(text) of TransformerLens "
        f"{theirs}, so their numbers differ; pass prepend_bos={not is_added} for those of "
        f"model(text), or call model(text, prepend_bos={is_added})"
    )
