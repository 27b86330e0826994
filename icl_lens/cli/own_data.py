"""What a command says first about your own data: its rows, its label words, and whether the model
knows its words.
"""

import json
from collections.abc import Sequence
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from icl_lens.prompts.pair_task import PairTask
    from icl_lens.prompts.prompt import Prompt
    from icl_lens.prompts.tasks import Task
    from icl_lens.prompts.text_task import TextTask

MAX_LABEL_WORDS = 8
"""The number of label words that are printed."""
N_UNKNOWN_WORDS = 3
"""The number of unknown words that are printed as examples."""
HALVES_SENTENCE = "Queries are from half of each class's texts, demonstrations from the other half."


def data_sentences(task: "Task", prompts: "Sequence[Prompt]") -> list[str]:
    """Return which rows of the user's file are used, and which label words the prompts have; none
    without a file.
    """
    from icl_lens.prompts.word_task import WordTask

    if task.path is None:
        return []
    sentences = []
    if not isinstance(task, WordTask):
        sentences += row_count_sentences(task, prompts)
    if any(prompt.classes for prompt in prompts):
        sentences.append(label_sentence(prompts))
    return sentences


def row_count_sentences(task: "TextTask | PairTask", prompts: "Sequence[Prompt]") -> list[str]:
    """Return sentences on how many rows of the user's file or folder are used and, if prompts
    repeat queries, on how many different ones they have; for a single file of texts, also that
    queries and demonstrations are from different halves of it.
    """
    from icl_lens.prompts.text_task import TextTask

    sentences = [f"{task.path}: {task.row_counts()}."]
    n_queries = len({prompt.query for prompt in prompts})
    if n_queries < len(prompts):
        different = "different query" if n_queries == 1 else "different queries"
        drawn = f"{len(prompts):,} prompts are drawn from them"
        sentences.append(f"{drawn}, with {n_queries:,} {different}.")
        if isinstance(task, TextTask) and Path(task.path or "").is_file():
            sentences.append(HALVES_SENTENCE)
    return sentences


def separator_sentence(prompts: "Sequence[Prompt]") -> str | None:
    """Return the sentence that a newline separates demonstrations, because the data has texts of
    several words; None for the usual space.
    """
    from icl_lens.prompts.prompt import NEWLINE

    if all(prompt.separator != NEWLINE for prompt in prompts):
        return None
    return "Demonstrations are separated by a newline; --separator ' ' for a space."


def label_sentence(prompts: "Sequence[Prompt]") -> str:
    """Return which label words the prompts have, and of which classes.

    Example:
        >>> from icl_lens.cli.own_data import label_sentence
        >>> label_sentence(il.load_task("sentiment-number", n=4))
        "Label words: 'bar', 'foo'. They change classes from prompt to prompt."
    """
    from icl_lens.errors import quoted_list
    from icl_lens.prompts.name_order import in_order

    classes_of: dict[str, set[str]] = {}
    for prompt in prompts:
        for label, class_name in (prompt.classes or {}).items():
            classes_of.setdefault(label, set()).add(class_name)
    labels = in_order(classes_of)
    more = f" and {len(labels) - MAX_LABEL_WORDS} more" if len(labels) > MAX_LABEL_WORDS else ""
    words = quoted_list(labels[:MAX_LABEL_WORDS]) + more
    if any(len(classes) > 1 for classes in classes_of.values()):
        return f"Label words: {words}. They change classes from prompt to prompt."
    if all(classes == {label} for label, classes in classes_of.items()):
        return f"Label words: {words}, the names of the classes."
    pairs = [
        f"{label!r} for class {next(iter(classes_of[label]))!r}"
        for label in labels[:MAX_LABEL_WORDS]
    ]
    return f"Label words: {', '.join(pairs)}{more}."


def unknown_words_warning(model: str, prompts: "Sequence[Prompt]") -> str | None:
    """Return the sentence that a bundled model does not know some of the prompts' words; None if
    it knows all, and for any other model.

    `model` is the name by which the model was loaded. The bundled models know the words of their
    training alone.
    """
    from icl_lens.errors import quoted_list
    from icl_lens.models.checkpoints.resolve import bundled_models

    if model not in bundled_models():
        return None
    content = json.loads((files("icl_lens") / "bundled" / "words.json").read_text(encoding="utf-8"))
    word_lists = [*content["categories"].values(), content["labels"], content["fillers"]]
    trained = set(chain.from_iterable(word_lists))
    texts: list[str] = []
    for prompt in prompts:
        texts += [prompt.query, *prompt.labels]
        texts += [demonstration.text for demonstration in prompt.demonstrations]
    words = list(dict.fromkeys(" ".join(texts).split()))
    unknown = [word for word in words if word not in trained]
    if not unknown:
        return None
    return (
        f"{model} knows only the words that it was trained on. {len(unknown):,} of the "
        f"{len(words):,} different words of these prompts are others, such as "
        f"{quoted_list(unknown[:N_UNKNOWN_WORDS])}, so what it does with them means nothing; choose a language "
        "model with --model."
    )
