"""The tasks that `shared_heads.py` compares, and that scripts of `literature/` use: other labels and
classes, chat, word pairs, copying, IOI and induction.

Each function returns a task's prompts to locate heads on and, of most kinds, prompts with other
queries to test them. It raises InputError if the words are not in the model's vocabulary."""

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice, permutations
from typing import Any, Literal

from common import Study

import icl_lens as il

Kind = Literal[
    "arbitrary labels", "natural labels", "chat", "pairs", "copying", "many classes", "IOI"
]
LABELS = ("foo", "bar", "baz", "qux")
CATEGORIES = ("sentiment", "number", "animal", "country")
OTHER_LABELS = (("qux", "baz"), ("beta", "alpha"), ("bar", "foo"))
MAX_PROMPTS = 100
"""Most prompts per half; chat has half as many as the study."""
PAIR_NAMES = (
    "antonyms country-capital present-past singular-plural english-french english-spanish "
    "next-item country-language capitalization verb-gerund adjective-comparative animal-class"
).split()
PAIRS_SHOWN, PAIR_PROMPTS, MIN_PAIR_PROMPTS = 10, 25, 20
"""Demonstrations per prompt of word pairs, and the number of prompts per half: the most and the
fewest."""
PAIR_DRAWS = 40
"""Prompts drawn per query of word pairs; the first one whose outputs begin with different tokens is
used."""
PAIR_LINES = il.Template("{text} -> {label}", "{text} ->", "\n", prefix="Words:\n")
"""How word pairs are written; after the first line, a query without demonstrations does not begin
the text."""
COPIED, RANDOM_TOKENS = 6, 24
"""Demonstrations per prompt that repeats words, and distinct tokens in a sequence for induction."""
NAMES = (
    "Mary John Tom James David Anna Paul Mark Laura Peter "
    "Sarah Kate Jack Alice Robert Emma Daniel Lisa Adam Jane"
).split()
IOI_TEMPLATES = (
    "When {first} and {second} went to the store, {giver} gave a drink to",
    "After {first} and {second} had lunch, {giver} handed the keys to",
    "While {first} and {second} were at the office, {giver} sent a letter to",
    "Then {first} and {second} went to the park, and {giver} passed the ball to",
    "Yesterday {first} and {second} met at school, where {giver} showed a book to",
    "Before {first} and {second} left the party, {giver} gave a present to",
)
"""Indirect object identification (Wang et al. 2022): the answer is the name that is not repeated.
"""


@dataclass(frozen=True)
class TaskPrompts:
    """Prompts of a task: to locate heads on and, if its answers are tested without heads, with
    other queries."""

    kind: Kind
    locating: il.PromptBatch
    testing: il.PromptBatch | None = None
    chance: float = 0.5
    """The accuracy of guessing among what each answer is compared with."""
    is_done: bool | None = None
    """Whether the model does the task, where this has been checked in another way than by accuracy.
    """


def task_builders(study: Study) -> Iterator[tuple[str, Callable[[], TaskPrompts]]]:
    """Yield the name of every task, and the function that builds its prompts."""
    n = min(study.n, MAX_PROMPTS)
    yield "this task", lambda: two_classes(study)
    relabeled, named = study.changed(n=n, seed=1), study.changed(n=n, seed=2)
    yield "other labels", lambda: two_classes(relabeled.changed(labels=other_labels(study)))
    yield "natural labels", lambda: two_classes(named.changed(labels=natural_labels(study)))
    classes = study.changed(n=n, seed=3, path=None, task_source=other_data(study))
    yield "other classes", lambda: two_classes(classes)
    yield "three classes", lambda: many_classes(study, CATEGORIES[:3], n, seed=4)
    yield "four classes", lambda: many_classes(study, CATEGORIES, n, seed=5)
    natural = classes.changed(seed=6)
    yield (
        "other classes, natural labels",
        lambda: two_classes(natural.changed(labels=natural_labels(natural))),
    )
    yield "chat", lambda: chat(study.changed(n=max(n // 2, 16), seed=7))
    for place, name in enumerate(PAIR_NAMES):
        yield name, lambda name=name, place=place: word_pairs(study, name, seed=8 + place)
    yield "copying", lambda: copying(study, n, seed=20)
    yield "IOI", lambda: ioi(study, n, seed=21)
    yield "induction", lambda: induction(study, n, seed=22)


# Classes


def two_classes(study: Study, template: il.Template | None = None) -> TaskPrompts:
    """Return the prompts of a study with two classes."""
    halves = il.split_by_query(study.prompts(), study.n)
    options: dict[str, Any] = {
        "template": template or study.template,
        "labels": sorted(study.labels),
    }
    locating, testing = (il.tokenize(study.model, half, **options) for half in halves)
    kind: Kind = "arbitrary labels"
    if template is not None:
        kind = "chat"
    elif {label.casefold() for label in study.labels} == {*study.task_source.split("-")}:
        kind = "natural labels"
    return TaskPrompts(kind, locating, testing)


def chat(study: Study) -> TaskPrompts:
    """Return the study's task as a conversation; raise InputError for a model without a chat
    template."""
    return two_classes(study, il.Template.chat(study.model))


def other_labels(study: Study) -> tuple[str, ...]:
    """Return two other labels that say nothing about the words, of one token each if possible."""
    return single_tokens(study, [pair for pair in OTHER_LABELS if not {*pair} & {*study.labels}])


def natural_labels(study: Study) -> tuple[str, ...]:
    """Return the classes' names, capitalized if only this makes each a single token."""
    first, _, second = study.task_source.partition("-")
    if not second or {*study.labels} == {first, second}:
        raise il.InputError(
            "the names of the classes are not known, or are the labels already; use a word task"
        )
    return single_tokens(study, [(first, second), (first.capitalize(), second.capitalize())])


def other_data(study: Study) -> str:
    """Return the paper's word task that shares no category with the study's."""
    categories = {*study.task_source.split("-")}
    return "animal-country" if categories & {"sentiment", "number"} else "sentiment-number"


def single_tokens(study: Study, pairs: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return the first pair of words of one token each, or the first pair if there is none."""
    return next(
        (pair for pair in pairs if len(one_token_words(study, pair, after="a :")) == 2), pairs[0]
    )


def many_classes(study: Study, categories: Sequence[str], n: int, *, seed: int) -> TaskPrompts:
    """Return prompts that classify words of three or more categories, each with its own label.

    The query's class changes from prompt to prompt, and labels rotate among classes, so that each
    label is the answer to each class equally often. Demonstrations are shuffled."""
    count, rng = len(categories), random.Random(seed)
    of_category = category_words()
    n_categories = Counter(chain.from_iterable(of_category[name] for name in categories))
    words = {}
    for name in categories:
        words[name] = [word for word in of_category[name] if n_categories[word] == 1]
    prompts = []
    for row in range(n):
        query_class, shift = categories[row % count], row // count
        drawn = {name: rng.sample(words[name], study.demonstrations + 1) for name in categories}
        demonstrations, query, answer = [], "", ""
        for place, name in enumerate(categories):
            label = LABELS[(place + shift) % count]
            demonstrations += [il.Demonstration(word, label) for word in drawn[name][1:]]
            if name == query_class:
                query, answer = drawn[name][0], label
        rng.shuffle(demonstrations)
        prompts.append(il.Prompt(demonstrations, query, answer, LABELS[:count]))
    batch = il.tokenize(study.model, prompts, template=study.template, labels=LABELS[:count])
    return TaskPrompts("many classes", batch, chance=1 / count)


def category_words() -> dict[str, list[str]]:
    """Return the words of the paper's four categories."""
    return il.WordTask("sentiment-number").words() | il.WordTask("animal-country").words()


# Pairs of words


def word_pairs(study: Study, name: str, *, seed: int) -> TaskPrompts:
    """Return prompts of a bundled task of word pairs; each prompt has another query.

    Each answer is compared with all other outputs of its prompt, so prompts are used whose outputs
    begin with different tokens. Raise InputError if too few are left."""
    task = il.PairTask(name)
    words = sorted({output for _, output in task.pairs()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about words of several tokens: the first one is scored
        texts = [il.Text("a ->", answer=f" {word}") for word in words]
        token_of = dict(
            zip(words, il.tokenize(study.model, texts).answer_tokens.tolist(), strict=True)
        )
        of_query: dict[str, il.Prompt] = {}
        for prompt in task.prompts(
            PAIR_DRAWS * len(task.pairs()), seed=seed, demonstrations=PAIRS_SHOWN
        ):
            if len({token_of[label] for label in prompt.labels}) == len(prompt.labels):
                of_query.setdefault(prompt.query, prompt)
        prompts, half = list(of_query.values()), min(len(of_query) // 2, PAIR_PROMPTS)
        if half < MIN_PAIR_PROMPTS:
            raise il.InputError(
                f"{half} prompts per half have different first tokens of outputs; use more pairs"
            )
        locating, testing = prompts[:half], prompts[half : 2 * half]
        of_locating = il.tokenize(study.model, locating, template=PAIR_LINES)
        of_testing = il.tokenize(study.model, testing, template=PAIR_LINES)
        check = il.task_check(study.model, testing, template=PAIR_LINES)
    return TaskPrompts("pairs", of_locating, of_testing, is_done=getattr(check, "does_task", False))


# Copying, IOI, induction


def copying(study: Study, n: int, *, seed: int) -> TaskPrompts:
    """Return prompts that repeat a word, as in "cat -> cat"."""
    all_words = list(chain.from_iterable(category_words().values()))
    words, rng = one_token_words(study, all_words, after="a ->"), random.Random(seed)
    check_enough(words, 2 * COPIED, "words")
    texts = []
    arrows = replace(PAIR_LINES, prefix="")
    for answer in islice(cycle(rng.sample(words, len(words))), n):
        words_shown = rng.sample([word for word in words if word != answer], COPIED)
        prompt = il.Prompt([il.Demonstration(word, word) for word in words_shown], answer)
        text = arrows.render(prompt).text
        texts.append(il.Text(text, answer=f" {answer}", against=f" {rng.choice(words_shown)}"))
    return TaskPrompts("copying", il.tokenize(study.model, texts))


def ioi(study: Study, n: int, *, seed: int) -> TaskPrompts:
    """Return prompts that name the receiver, such as "When Mary and John went to the store, John
    gave a drink to".

    The answer, "Mary", is compared with the giver, "John". In half of the prompts, the answer is
    named first."""
    names, rng = one_token_words(study, NAMES, after="the"), random.Random(seed)
    check_enough(names, 4, "names")
    couples = list(permutations(names, 2))
    rng.shuffle(couples)
    texts = []
    for i, (receiver, giver) in enumerate(islice(cycle(couples), n)):
        first, second = (receiver, giver) if i % 2 == 0 else (giver, receiver)
        template = IOI_TEMPLATES[i // 2 % len(IOI_TEMPLATES)]
        text = template.format(first=first, second=second, giver=giver)
        texts.append(il.Text(text, answer=f" {receiver}", against=f" {giver}"))
    return TaskPrompts("IOI", il.tokenize(study.model, texts))


def induction(study: Study, n: int, *, seed: int) -> TaskPrompts:
    """Return prompts that continue a repeated sequence of random tokens.

    The answer is the token that followed the first time; it is compared with another token of the
    sequence."""
    rng, tokenizer = random.Random(seed), study.model.tokenizer
    usual = sorted({*range(len(tokenizer))} - {*tokenizer.all_special_ids})
    prefix = il.tokenize(study.model, il.Text("a")).tokens[0, :-1].tolist()
    rows, answers, wrong_tokens = [], [], []
    for _ in range(n):
        tokens = rng.sample(usual, RANDOM_TOKENS)
        at = rng.randrange(len(tokens) // 2, len(tokens) - 1)
        rows.append([*prefix, *tokens, *tokens[: at + 1]])
        answers.append(tokens[at + 1])
        wrong_tokens.append(rng.choice([token for token in tokens if token != tokens[at + 1]]))
    return TaskPrompts(
        "copying",
        il.PromptBatch.from_tokens(rows, model=study.model, targets=answers, against=wrong_tokens),
    )


def one_token_words(study: Study, words: Sequence[str], *, after: str) -> list[str]:
    """Return the words that the model encodes as one token after this text.

    Only the first token of a longer word would be scored. Raise InputError for a text with words
    that the model does not know."""
    il.tokenize(study.model, il.Text(after))
    known = []
    for word in dict.fromkeys(words):
        text = il.Text(after, answer=f" {word}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about words of several tokens
            try:
                token = int(il.tokenize(study.model, text).answer_tokens)
            except il.InputError:  # the model does not know the word
                continue
        if study.model.tokenizer.decode([token]).strip() == word:
            known.append(word)
    return known


def check_enough(words: Sequence[str], needed: int, what: str) -> None:
    if len(words) < needed:
        raise il.InputError(
            f"{len(words)} of the {what} are one token of the vocabulary, and {needed} are needed"
        )
