"""The words of the planted models: texts by category, labels, and a tokenizer with one token per
word.
"""

from functools import cache
from itertools import chain

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from icl_lens.prompts.word_task import word_list

CATEGORIES = ("sentiment", "number", "animal", "country", "fruit", "job", "sport", "metal")
LABELS = (*"foo bar baz qux dax wug mib zib toma gorp nerf lorp vint kiki".split(), *CATEGORIES)
"""Arbitrary labels, then natural ones: the names of the categories."""
COLON, ARTICLE = ":", "a"
SPECIAL = ("<unk>", "<pad>", COLON)
MAX_TEXTS = 40  # per category


@cache
def texts() -> dict[str, tuple[str, ...]]:
    """Return the texts of each category: words of one category only that are not labels."""
    words = {name: word_list()[name] for name in CATEGORIES}
    listed = list(chain.from_iterable(words.values()))
    return {
        name: tuple(
            word for word in words_of_class if listed.count(word) == 1 and word not in LABELS
        )[:MAX_TEXTS]
        for name, words_of_class in words.items()
    }


@cache
def token_ids() -> dict[str, int]:
    """Return the id of every token: special tokens, labels, texts by category."""
    tokens = [*SPECIAL, *LABELS, *chain.from_iterable(texts().values()), ARTICLE]
    return {token: index for index, token in enumerate(tokens)}


def make_tokenizer(n_positions: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that splits at white space and adds no special tokens."""
    backend = Tokenizer(WordLevel(token_ids(), unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", model_max_length=n_positions
    )
