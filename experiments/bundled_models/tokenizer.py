"""The bundled models' tokenizer: words in pieces, so that no piece reveals the category of its word.

Byte-pair encoding learned on the word list itself. A merge that would make a full word is omitted: every content
word has two pieces or more, and a model must put them together before it can look a meaning up. Labels, fillers,
the colon and the names of the categories are one token each.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from string import ascii_letters, ascii_lowercase

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from experiments.bundled_models.episodes import SPECIAL, Vocabulary

INSIDE = "##"
"""Prefix of pieces that do not begin a word."""
N_MERGES = 600
Merge = tuple[str, str]


def _joined(merge: Merge) -> str:
    return merge[0] + merge[1].removeprefix(INSIDE)


def _merged(symbols: Sequence[str], merge: Merge) -> list[str]:
    """Return `symbols` with every occurrence of the pair joined, from left to right."""
    result: list[str] = []
    for symbol in symbols:
        if result and (result[-1], symbol) == merge:
            result[-1] = _joined(merge)
        else:
            result.append(symbol)
    return result


def learn_merges(words: Iterable[str], n: int, *, never: frozenset[str]) -> list[Merge]:
    """Return `n` merges of byte-pair encoding over a set of words, the most frequent pair first, ties by alphabet.

    Merges that would make one of `never` are omitted.
    """
    split = {word: [word[0], *(INSIDE + letter for letter in word[1:])] for word in words}
    merges: list[Merge] = []
    while len(merges) < n:
        counts = Counter(pair for symbols in split.values() for pair in itertools.pairwise(symbols))
        possible = [(-count, pair) for pair, count in counts.items() if _joined(pair) not in never]
        if not possible:
            break
        merge = min(possible)[1]
        merges.append(merge)
        split = {word: _merged(symbols, merge) for word, symbols in split.items()}
    return merges


def make_tokenizer(words: Vocabulary, n_positions: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that splits at white space and splits content words into pieces; it adds no special tokens."""
    content = sorted(words.categories_of)
    whole = [*SPECIAL, *words.fillers, *words.labels, *words.names.values()]
    merges = learn_merges(content, N_MERGES, never=frozenset([*content, *whole]))
    letters = [*ascii_letters, *(INSIDE + letter for letter in ascii_lowercase)]
    tokens = dict.fromkeys([*whole, *letters, *map(_joined, merges)])
    backend = Tokenizer(
        BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            continuing_subword_prefix=INSIDE,
            ignore_merges=True,
        )
    )
    backend.pre_tokenizer = WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix=INSIDE, cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", model_max_length=n_positions
    )
