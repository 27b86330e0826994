"""Tasks to compare with a study's own: other labels and classes, chat, word pairs, copying, IOI and induction.

Each function returns a two-class task, or tokenized prompts with a token to compare each answer with and a cluster for
the bootstrap. It raises InputError if the words are not in the model's vocabulary.
"""

import random
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice, permutations

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

import icl_lens as il
from experiments.framework.study import Study, clusters_of, compared_tokens
from experiments.framework.tasks import ARROWS, PAPER_TASKS, Task
from icl_lens.analyses.pair_behavior import PairCheck, check_pairs
from icl_lens.attribution.repeated_tokens import prefix_tokens, random_tokens
from icl_lens.errors import InputError
from icl_lens.prompts.word_task import word_list

LABELS = ("foo", "bar", "baz", "qux")
CATEGORIES = ("sentiment", "number", "animal", "country")
OTHER_LABELS = (("baz", "qux"), ("alpha", "beta"), ("foo", "bar"))
"""Labels that say nothing about words."""
COPIED = 6
"""Number of demonstrations per prompt that repeats words."""
MAX_PROMPTS = 100
PAIRS_SHOWN, PAIR_PROMPTS, MIN_PAIR_PROMPTS = 10, 25, 20
"""Demonstrations per prompt of word pairs, and the number of prompts per half: the most and the fewest."""
PAIR_DRAWS = 40
"""Prompts drawn per query of word pairs; the first one whose outputs begin with different tokens is used."""
PAIR_LINES = replace(ARROWS, prefix="Words:\n")
"""How word pairs are written; after the first line, a query without demonstrations does not begin the text."""
RANDOM_TOKENS = 24
"""Number of distinct tokens in a sequence for induction."""

NAMES = (
    "Mary John Tom James David Anna Paul Mark Laura Peter Sarah Kate Jack Alice Robert Emma Daniel Lisa Adam Jane"
).split()
IOI_TEMPLATES = (
    "When {first} and {second} went to the store, {giver} gave a drink to",
    "After {first} and {second} had lunch, {giver} handed the keys to",
    "While {first} and {second} were at the office, {giver} sent a letter to",
    "Then {first} and {second} went to the park, and {giver} passed the ball to",
    "Yesterday {first} and {second} met at school, where {giver} showed a book to",
    "Before {first} and {second} left the party, {giver} gave a present to",
)
"""Indirect object identification (Wang et al. 2022): the answer is the name that is not repeated."""


@dataclass(frozen=True)
class TaskPrompts:
    """Prompts of a task, the cluster of each, and the accuracy of guessing."""

    batch: il.PromptBatch
    clusters: Int[np.ndarray, " row"]
    chance: float = 0.5


@dataclass(frozen=True)
class Split:
    """A task's prompts to locate heads on, and prompts with other queries to test them on."""

    locating: TaskPrompts
    held_out: TaskPrompts

    @classmethod
    def of(cls, halves: Sequence[il.PromptBatch]) -> "Split":
        """Return (locating, held-out) prompts with two choices each; the clusters are queries."""
        return cls(*(TaskPrompts(half, clusters_of(half)) for half in halves))


def n_prompts(study: Study) -> int:
    """Return how many prompts of another task are used: the study's number, at most 100."""
    return min(study.n, MAX_PROMPTS)


def answer_beats_others(acts: il.Activations) -> Bool[Tensor, " row"]:
    """Return whether each prompt's answer is more probable than every token that it is compared with."""
    logits = acts.readout.using(final_norm="frozen", bias=True).logits(acts.resid_final)
    others = compared_tokens(acts.batch)
    rivals = logits.gather(1, others.clamp(min=0)).masked_fill(others < 0, -torch.inf)
    return logits.gather(1, acts.batch.answer_tokens[:, None])[:, 0] > rivals.amax(1)


def other_labels(study: Study) -> Task:
    """Return the study's words with two other labels that say nothing about them, of one token each if possible."""
    pairs = [pair for pair in OTHER_LABELS if not {*pair} & {*study.task.labels}]
    return replace(study.task, name="other labels", labels=_single_tokens(study, pairs))


def natural_labels(study: Study) -> Task:
    """Return the study's words with the names of their categories as labels."""
    if study.task.natural:
        raise InputError("the task itself has labels that name its classes")
    return replace(study.task, name="natural labels", labels=_names(study, study.task.data))


def other_classes(study: Study) -> Task:
    """Return two other categories with the same labels, or with their own names if the study's labels are names."""
    data = next(one.data for one in PAPER_TASKS if not {*one.data.split("-")} & {*study.task.data.split("-")})
    labels = _names(study, data) if study.task.natural else study.task.labels
    return replace(study.task, name="other classes", data=data, path=None, labels=labels)


def _names(study: Study, data: str) -> tuple[str, str]:
    """Return the names of two categories, capitalized if only this makes each a single token."""
    first, _, second = data.partition("-")
    if not second:
        raise InputError("the names of the classes are not known")
    return _single_tokens(study, [(first, second), (first.capitalize(), second.capitalize())])


def _single_tokens(study: Study, pairs: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return the first pair of words of one token each, or the first pair if there is none."""
    return next((pair for pair in pairs if len(one_token_words(study, pair, after="a :")) == 2), pairs[0])


def classes(study: Study, categories: Sequence[str], *, seed: int) -> TaskPrompts:
    """Return prompts that classify words of three or more categories, each with its own label.

    The query's class changes from prompt to prompt, and labels rotate among classes, so that each label is the answer
    to each class equally often. Demonstrations are shuffled.
    """
    count, rng = len(categories), random.Random(seed)
    n_categories = Counter(word for name in categories for word in {*word_list()[name]})
    words = {name: [word for word in word_list()[name] if n_categories[word] == 1] for name in categories}
    prompts = []
    for i in range(n_prompts(study)):
        query_class, shift = categories[i % count], i // count % count
        label_of = {name: LABELS[(place + shift) % count] for place, name in enumerate(categories)}
        drawn = {name: rng.sample(words[name], study.task.demonstrations + 1) for name in categories}
        shown = [il.Demonstration(word, label_of[name]) for name in categories for word in drawn[name][1:]]
        rng.shuffle(shown)
        prompts.append(il.Prompt(shown, drawn[query_class][0], label_of[query_class], LABELS[:count]))
    batch = il.tokenize(study.model, prompts, template=study.task.template, labels=LABELS[:count])
    return TaskPrompts(batch, clusters_of(batch), 1 / count)


def other_natural_labels(study: Study) -> Task:
    """Return two other categories with their own names as labels."""
    return other_classes(replace(study, task=natural_labels(study)))


def chat(study: Study) -> Task:
    """Return the study's task as a conversation; raise InputError for a model without a chat template."""
    return replace(study.task, name="chat", template=il.Template.chat(study.model))


def word_pairs(study: Study, name: str, *, seed: int) -> tuple[Split, PairCheck]:
    """Return prompts of a bundled task of word pairs, and what the model does on those held out.

    Each prompt has another query. Each answer is compared with all other outputs of its prompt, so prompts are used
    whose outputs begin with different tokens. Raise InputError if too few are left.
    """
    task = il.PairTask(name)
    words = sorted({output for _, output in task.pairs()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about words of several tokens: the first one is scored
        texts = [il.Text("a ->", answer=f" {word}") for word in words]
        token_of = dict(zip(words, il.tokenize(study.model, texts).answer_tokens.tolist(), strict=True))
    found: dict[str, il.Prompt] = {}
    for prompt in task.prompts(PAIR_DRAWS * len(task.pairs()), seed=seed, demonstrations=PAIRS_SHOWN):
        if len({token_of[label] for label in prompt.labels}) == len(prompt.labels):
            found.setdefault(prompt.query, prompt)
    prompts, half = [*found.values()], min(len(found) // 2, PAIR_PROMPTS)
    halves = prompts[:half], prompts[half : 2 * half]
    if half < MIN_PAIR_PROMPTS:
        raise InputError(
            f"{half} prompts per half have outputs that begin with different tokens, and {MIN_PAIR_PROMPTS} are needed"
        )

    def tokenize(some: Sequence[il.Prompt]) -> il.PromptBatch:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return il.tokenize(study.model, some, template=PAIR_LINES)

    return Split.of([*map(tokenize, halves)]), check_pairs(study.model, tuple(halves[1]), tokenize, None)


def copying(study: Study, *, seed: int) -> TaskPrompts:
    """Return prompts that repeat a word, as in "cat -> cat"."""
    words = [word for name in CATEGORIES for word in word_list()[name]]
    words, rng = one_token_words(study, [*dict.fromkeys(words)], after="a ->"), random.Random(seed)
    _check_enough(words, 2 * COPIED, "words")
    texts, others = [], []
    answers = [*islice(cycle(rng.sample(words, len(words))), n_prompts(study))]
    for answer in answers:
        shown = rng.sample([word for word in words if word != answer], COPIED)
        texts.append(ARROWS.render(il.Prompt([il.Demonstration(word, word) for word in shown], answer)).text)
        others.append(rng.choice(shown))
    return _tokenized(study, texts, answers, others)


def ioi(study: Study, *, seed: int) -> TaskPrompts:
    """Return prompts that name the receiver, such as "When Mary and John went to the store, John gave a drink to".

    The answer, "Mary", is compared with the giver, "John". In half of the prompts, the answer is named first.
    """
    names, rng = one_token_words(study, NAMES, after="the"), random.Random(seed)
    _check_enough(names, 4, "names")
    couples = list(permutations(names, 2))
    rng.shuffle(couples)
    texts, answers, others = [], [], []
    for i, (receiver, giver) in enumerate(islice(cycle(couples), n_prompts(study))):
        order = (receiver, giver) if i % 2 == 0 else (giver, receiver)
        template = IOI_TEMPLATES[i // 2 % len(IOI_TEMPLATES)]
        texts.append(template.format(first=order[0], second=order[1], giver=giver))
        answers.append(receiver)
        others.append(giver)
    return _tokenized(study, texts, answers, others)


def induction(study: Study, *, seed: int) -> TaskPrompts:
    """Return prompts that continue a repeated sequence of random tokens.

    The answer is the token that followed the first time. It is compared with another token of the sequence.
    """
    rng = random.Random(seed)
    rows, answers, others = [], [], []
    prefix = prefix_tokens(study.model)
    for tokens in random_tokens(study.model, n_prompts(study), RANDOM_TOKENS, seed):
        at = rng.randrange(len(tokens) // 2, len(tokens) - 1)
        rows.append([*prefix, *tokens, *tokens[: at + 1]])
        answers.append(tokens[at + 1])
        others.append(rng.choice([token for token in tokens if token != tokens[at + 1]]))
    batch = il.PromptBatch.from_tokens(rows, model=study.model, targets=answers, against=others)
    return TaskPrompts(batch, np.arange(len(rows)))


def one_token_words(study: Study, words: Sequence[str], *, after: str) -> list[str]:
    """Return the words that the model encodes as one token after this text.

    Only the first token of a longer word would be scored. Raise InputError for a text with words that the model does
    not know.
    """
    il.tokenize(study.model, il.Text(after))
    decode, found = study.model.tokenizer.decode, []
    for word in words:
        with warnings.catch_warnings(), suppress(InputError):  # the error is about words that the model does not know
            warnings.simplefilter("ignore")  # about words of several tokens
            token = int(il.tokenize(study.model, il.Text(after, answer=f" {word}")).answer_tokens)
            if decode([token]).strip() == word:
                found.append(word)
    return found


def _tokenized(study: Study, texts: list[str], answers: list[str], others: list[str]) -> TaskPrompts:
    """Tokenize texts; those with the same answer are one cluster."""
    prompts = [
        il.Text(text, answer=f" {answer}", against=f" {other}")
        for text, answer, other in zip(texts, answers, others, strict=True)
    ]
    return TaskPrompts(il.tokenize(study.model, prompts), np.unique(answers, return_inverse=True)[1])


def _check_enough(words: Sequence[object], needed: int, what: str) -> None:
    if len(words) < needed:
        raise InputError(f"{len(words)} of the {what} are one token of the model's vocabulary, and {needed} are needed")
