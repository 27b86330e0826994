"""Tables 1, 3: top words of label values, label keys and the last query in a located head, and how often they fit."""

from dataclasses import dataclass
from textwrap import shorten
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.claims.best_head import best_two
from experiments.lab.drawing import WHISKERS, means, whiskers
from experiments.lab.editing import BAR, FOO
from experiments.lab.experiment import Experiment
from experiments.lab.frames import by_prompt, long, stack, where
from experiments.lab.reductions import correct, head_increases
from experiments.lab.study import Need, Study, Variant
from experiments.lab.verdict import SHARE, Verdict, all_of, cannot_tell, judge, told
from icl_lens.report.palette import BLUE, GREEN, ORANGE
from icl_lens.report.plots import PAGE

KeySource = Literal["resid", "attn"]

KINDS = {"value": BLUE, "key": ORANGE, "query": GREEN}
TOP = 10
"""First words of a projection, stop words left out as in the paper's tables, which list 8 to 16."""
NAMES = {
    "value": "label values name their label",
    "key": "label keys name their demonstration",
    "query": "the last query names the input",
}


@dataclass(frozen=True)
class VocabularyConfig:
    """The example prompt of the paper's task and its answer, how many words are listed, which inputs of keys are read.

    Of other tasks, sentences among them, the example is a prompt of their own.
    """

    example_task: str = "sentiment-number"
    example: str = "love : bar like : bar eight : foo two : foo one :"
    answer: str = "foo"
    words: int = TOP
    key_source: KeySource = "resid"


@dataclass(frozen=True)
class OwnWordWins:
    """How often a value, a key and the query name what they should in their projections (0–1).

    Value: its own label is before the prompt's other labels, and among the TOP first words (`first_words`). Key: the
    words of its own demonstration's text against those of the others. Query: the words of the input against those of
    the demonstrations. Of a text of several tokens the best counts; a tie is half a win; 0.5 is chance, of values less.
    """

    head: il.Head
    key_source: KeySource

    def __call__(self, acts: il.Activations) -> Float[Tensor, "prompt 3"]:
        score = acts.readout.vocabulary_scores
        values = score(il.label_values(acts, self.head)).cpu()
        keys = score(il.label_keys(acts, self.head, source=self.key_source)).cpu()
        query = score(il.last_query(acts, self.head)).cpu()
        first = first_words(acts, il.label_values(acts, self.head))
        batch = acts.batch.to("cpu")
        rows = []
        for row in range(len(batch)):
            demos = (batch.label_positions[row] >= 0).nonzero().flatten().tolist()
            texts = [batch.tokens[row, slice(*batch.text_ranges[row, demo].tolist())] for demo in demos]
            own_text = batch.tokens[row, slice(*batch.query_range[row].tolist())]
            choices = batch.label_mask[row].nonzero().flatten().tolist()
            value_wins, key_wins = [], []
            for i, demo in enumerate(demos):
                own = int(batch.label_index[row, demo])
                of_label = values[row, demo, batch.label_tokens]
                named = float(int(batch.label_tokens[own]) in first[row][demo])
                value_wins += [named * _win(of_label[own], of_label[other]) for other in choices if other != own]
                of_text = [keys[row, demo, text].max() for text in texts]
                key_wins += [_win(of_text[i], of_text[other]) for other in range(len(texts)) if other != i]
            query_wins = [_win(query[row, own_text].max(), query[row, text].max()) for text in texts]
            rows.append([np.mean(wins) if wins else np.nan for wins in (value_wins, key_wins, query_wins)])
        return torch.tensor(rows, dtype=torch.float)


def first_words(acts: il.Activations, vectors: Float[Tensor, "prompt demo d_model"]) -> list[list[set[int]]]:
    """The TOP first content words of each vector, as tokens; label words count as such whatever they are."""
    decode = acts.readout.decode
    assert decode is not None, "label words were tokenized"
    labels = {decode(token): token for token in acts.batch.label_tokens.tolist()}
    named = acts.readout.top_tokens(vectors, TOP, keep=lambda word: word in labels or il.is_content_word(word))
    return [[{labels[word] for word in words if word in labels} for words in demos] for demos in named]


def _win(own: Float[Tensor, ""], other: Float[Tensor, ""]) -> float:
    return float(own > other) + 0.5 * float(own == other)


def table(study: Study, config: VocabularyConfig) -> pd.DataFrame:
    """Two tables under one another: the example's words, and how often the own word wins on the task's prompts.

    prompts ("example" | "task"), name, prompt, kind ("value" | "key" | "query"), position, token, text (of the
    demonstration, or the input), words, wins (0–1).
    """
    head = best_two(study)[0]
    batch = il.tokenize(study.model, [example(study, config)], template=study.settings.template)
    acts = il.capture(study.model, batch)
    words = _example(acts, head, config)
    wins = study.reduce(
        OwnWordWins(head, config.key_source), Variant(), study.test, what="words of values, keys, queries"
    )
    task = long(
        wins.numpy()[None, None], "wins", prompts=["task"], name=[str(head)], prompt=study.test.tolist(), kind=[*KINDS]
    )
    return stack(words, task)


def example(study: Study, config: VocabularyConfig) -> il.Prompt:
    """The paper's prompt on its task; on any other the first tested one that is answered rightly, if there is one."""
    if study.settings.task == config.example_task:
        return il.Prompt.parse(config.example, answer=config.answer)
    right = (study.get(correct)[study.test] > 0.5).nonzero().flatten().tolist()
    return study.prompts()[int(study.test[right[0] if right else 0])]


def _example(acts: il.Activations, head: il.Head, config: VocabularyConfig) -> pd.DataFrame:
    strings = acts.batch.token_strings[0]
    positions = acts.batch.label_positions[0].tolist()
    last = int(acts.batch.last[0])

    def top(vectors: Float[Tensor, "1 pos d_model"]) -> list[list[str]]:
        return acts.readout.top_tokens(vectors, config.words, keep=il.is_content_word)[0]

    keys = il.label_keys(acts, head, source=config.key_source)
    prompt = acts.batch.prompts[0]
    texts = [one.text for one in prompt.demonstrations]
    parts = [
        *(("value", *one) for one in zip(positions, texts, top(il.label_values(acts, head)), strict=True)),
        *(("key", *one) for one in zip(positions, texts, top(keys), strict=True)),
        ("query", last, prompt.query, top(il.last_query(acts, head)[:, None])[0]),
    ]
    return pd.DataFrame(
        [
            {
                "prompts": "example",
                "name": str(head),
                "prompt": 0,
                "kind": kind,
                "position": at,
                "token": strings[at].strip(),
                "text": text,
                "words": ", ".join(word.strip() for word in words),
            }
            for kind, at, text, words in parts
        ]
    )


def claim(table: pd.DataFrame) -> Verdict:
    """Values name their label, keys their demonstration, the query the input: each in more than 6 of 10 cases.

    Undecided for a head of the first layer, whose keys and queries have read no text.
    """
    task = where(table, prompts="task")
    name = str(task["name"].iloc[0])
    if il.Head.parse(name).layer == 0:
        why = f"the best head, {name}, is in the first layer, where no key and no query has read a text"
        return cannot_tell(why, unit="of comparisons")
    wins = {kind: by_prompt(task, "wins", kind=kind) for kind in KINDS}
    judged = all_of(
        *(judge(wins[kind], least=0.6, unit="of comparisons", what=NAMES[kind], bounds=SHARE) for kind in KINDS)
    )
    return told(judged, f"the head is {name}")


def figure(table: pd.DataFrame) -> Figure:
    """Left: top words for the example prompt. Right: how often the own word wins, 95 % intervals; dashed: chance."""
    words = where(table, prompts="example")
    drawn = Figure(figsize=(PAGE, 2.5), layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(5, 1.4))
    left.set_axis_off()
    texts = where(words, kind="key")["text"].tolist() + where(words, kind="query")["text"].tolist()
    shown = " · ".join(shorten(text, max(12, 84 // len(texts)), placeholder="…") for text in texts)
    left.set_title(f"{words['name'].iloc[0]}: top words. Prompt: {shown}", loc="left", fontsize=7)
    for i, row in enumerate(words.to_dict("records")):
        y = 1 - (i + 0.5) / len(words)
        hue = KINDS[row["kind"]]
        left.text(0, y, f"{row['position']:.0f} {row['token']}", va="center", fontsize=7, transform=left.transAxes)
        left.text(0.11, y, row["kind"], va="center", fontsize=7, transform=left.transAxes, color=hue)
        listed = shorten(row["words"], 84, placeholder=" …")
        left.text(0.19, y, listed, va="center", fontsize=7, transform=left.transAxes)
    samples = [by_prompt(table, "wins", prompts="task", kind=kind) for kind in KINDS]
    right.bar(range(3), means(samples), color=list(KINDS.values()), width=0.7)
    right.errorbar(range(3), means(samples), yerr=whiskers(samples), **WHISKERS)
    right.axhline(0.5, color="0.3", linewidth=0.8, linestyle="--")
    right.set(ylim=(0, 1.02), ylabel="Own word wins\n(share of comparisons)")
    right.set_xticks(range(3), list(KINDS))
    return drawn


EXPERIMENT = Experiment(
    id="vocabulary",
    title="What a located head's vectors say in words",
    source="Tables 1, 3",
    claim="In a located head label values name the label, label keys their demonstration, the last query the input.",
    criterion=(
        "In more than six of ten comparisons a label's value puts its own label before the other and among its "
        f"{TOP} first words, its key the words of its own demonstration before those of another, and the query the "
        f"words of "
        "the input before a demonstration's. "
        "Undecided for a head of the first layer, where nothing has been read yet."
    ),
    chosen=(
        "That a head of the first layer leaves the verdict open, that the head is the best over both labels as the "
        "answer (as in best-head; before, for the first label), and that a value's own label must be among its first "
        "words, where it only had to be before the other label, was settled after results had been seen."
    ),
    about="the best located head",
    departs=(
        "The head is the model's best over both labels, not L22H0 (Table 1) or L23H13 (Table 3), and on other tasks "
        "than "
        "the paper's the words shown are those of a prompt of that task. Of a text of several tokens the best "
        "one counts, so that the longer of two texts wins a little more often by chance: a query of these tasks beats "
        "a demonstration in 48 to 54 of 100 comparisons even in a head that knows nothing. "
        "The paper reads the words of one prompt in each table; the "
        "verdict here counts over the task's prompts how often the own word is before others, which the paper does "
        "not do."
    ),
    paper="GPT-2 large, L22H0, one prompt: values all; keys three of four; the query names related words",
    classes="any",
    config=VocabularyConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases), Need(FOO, correct)),
    table=table,
    verdict=claim,
    figure=figure,
)
