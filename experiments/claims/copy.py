"""What values carry: do located heads say the label word that they read, more than other words and other heads do?"""

import random
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.claims.rivals import beyond
from experiments.lab.controls import Comparison, beside, matched
from experiments.lab.drawing import WHISKERS, by_name, legend_below, means, name_heads, whiskers
from experiments.lab.editing import BAR, FOO, located_for_both
from experiments.lab.experiment import Experiment
from experiments.lab.frames import long, stack, where
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study
from experiments.lab.verdict import SHARE, Verdict, all_of, told, verdict
from icl_lens.report.palette import BLUE, GREY, ORANGE
from icl_lens.report.plots import PAGE

WORDS = ("label", "text")
"""What is read: a demonstration's label, or its text, the non-label word beside it."""


@dataclass(frozen=True)
class CopyConfig:
    """Heads located for each label, the most controls of a layer, prompts, and pairs of words for the weights alone."""

    heads: int = 6
    controls: int = 20
    prompts: int = 200
    pairs: int = 50


@dataclass(frozen=True)
class Copies:
    """How often a head says more of a word where it reads it than where it reads a word of the other class, 0–1.

    Of labels, and of texts; chance is ½. What is read is the value at the word's last token, what is said its first,
    which is how a label is scored. Compared within the said token and the prompt, so that biases, the final norm's
    scale and a liking for one word cancel. NaN where a prompt has no two words to compare.
    """

    heads: tuple[il.Head, ...]

    def __call__(self, acts: il.Activations) -> Float[Tensor, "prompt head kind"]:
        return torch.stack([torch.stack(self._copied(acts, head), dim=-1) for head in self.heads], dim=1).float()

    @staticmethod
    def _copied(acts: il.Activations, head: il.Head) -> list[Float[Tensor, " prompt"]]:
        home = acts.readout.W_U.device
        readout = acts.readout.using(final_norm="frozen", bias=False)
        values = acts.head_values(head.layer)[:, :, head.head]
        W_O = acts.view.W_O(head.layer)[head.head].to(values)
        label = acts.batch.label_index.to(home)
        found = []
        for places, tokens in places_and_tokens(acts.batch):
            places, tokens = places.to(home), tokens.to(home)
            v = values.gather(1, places.clamp(min=0)[..., None].expand(-1, -1, values.shape[-1]))
            written = einsum(v, W_O, "prompt read d_head, d_head d_model -> prompt read d_model")
            said = readout.norm(written) @ readout.token_columns(tokens.clamp(min=0)).mT
            other = (label[:, :, None] != label[:, None]) & (label >= 0)[:, :, None] & (label >= 0)[:, None]
            found.append(told_apart(said, other & (tokens[:, :, None] != tokens[:, None])))
        return found


def places_and_tokens(
    batch: il.PromptBatch,
) -> list[tuple[Int[Tensor, "prompt demo"], Int[Tensor, "prompt demo"]]]:
    """Of labels and of texts: the last token's position, and the token that copying it would say.

    A label is said by its scored token; a text, whose tokens are never said all at once, by the one that is read.
    """
    last = batch.text_ranges[..., 1] - 1
    return [
        (batch.label_positions, batch.label_tokens[batch.label_index.clamp(min=0)]),
        (last, batch.tokens.gather(1, last.clamp(min=0))),
    ]


def told_apart(
    logits: Float[Tensor, "prompt read said"], other: Bool[Tensor, "prompt demo demo"]
) -> Float[Tensor, " prompt"]:
    """Share of pairs in which a word's logit is larger where it is read than where `other` says another is; ties half.

    NaN where there are no pairs.
    """
    own = logits.diagonal(dim1=1, dim2=2)[:, None]
    wins = (own > logits).double() + 0.5 * (own == logits).double()
    return (wins * other).sum((1, 2)) / other.sum((1, 2))


def table(study: Study, config: CopyConfig) -> pd.DataFrame:
    """group ("located" | "random"), layer, name, prompt, word ("label" | "text"), copied (0–1); circuit, eigen by head.

    `copied`: `Copies`, the mean of both labels as the true one. Of the weights alone (`il.head_copying` on embeddings),
    the same in all rows of a head and kind of word: `circuit`, how often a word is told from another of a pair (0–1),
    and `eigen`, the sum of the pair's eigenvalues over that of their sizes (−1 to 1); labels are one pair, words of
    texts `pairs` random ones.
    """
    compared = Comparison.of(study, located_for_both(study, study.few(config.heads)), config.controls)
    rows = study.test[: config.prompts]
    reduction = Copies(compared.heads)
    both = [study.reduce(reduction, variant, rows, what=f"words read and said, {variant}") for variant in (FOO, BAR)]
    copied = torch.stack(both).nanmean(0).numpy()
    pairs = {"label": [labels_as_read(study)], "text": text_pairs(study, rows, config.pairs)}

    def frame(head: il.Head) -> pd.DataFrame:
        values = long(copied[:, compared.heads.index(head)], "copied", prompt=rows.tolist(), word=WORDS)
        circuits = {word: _circuit(study, head, some) for word, some in pairs.items()}
        for place, name in enumerate(("circuit", "eigen")):
            values[name] = [circuits[word][place] for word in values["word"]]
        return values

    return stack(*compared.rows(frame))


Pair = tuple[list[int], list[int]]
"""Two words: the tokens of them that are read, and those that are said, see `places_and_tokens`."""


def labels_as_read(study: Study) -> Pair:
    """Both labels as they stand in the study's prompts."""
    batch = study.batch()
    return [_last_token(batch, label) for label in range(2)], batch.label_tokens.tolist()


def _last_token(batch: il.PromptBatch, label: int) -> int:
    row, demo = (batch.label_index == label).nonzero()[0].tolist()
    return int(batch.tokens[row, batch.label_positions[row, demo]])


def text_pairs(study: Study, rows: Int[Tensor, " row"], count: int) -> list[Pair]:
    """Random pairs of texts of these prompts that end differently."""
    batch = study.batch()[rows]
    places, said = places_and_tokens(batch)[1]
    read = batch.tokens.gather(1, places.clamp(min=0))
    real = batch.label_index >= 0
    known = sorted({*zip(read[real].tolist(), said[real].tolist(), strict=True)})
    rng = random.Random(study.settings.seed)
    drawn = [rng.sample(known, 2) for _ in range(count)] if len(known) > 1 else []
    return [([one[0], two[0]], [one[1], two[1]]) for one, two in drawn if one[1] != two[1]]


def _circuit(study: Study, head: il.Head, pairs: list[Pair]) -> tuple[float, float]:
    """Of the weights alone: mean discrimination, and mean share of positive eigenvalues, over pairs of words.

    All words are read and said together, of which each pair has its four logits: a word is read in one way.
    """
    if not pairs:
        return np.nan, np.nan
    reads = {token: place for read, said in pairs for place, token in zip(read, said, strict=True)}
    words = {token: i for i, token in enumerate(reads)}
    W_E = study.model.W_E.detach()
    inputs = W_E[torch.tensor([*reads.values()], device=W_E.device)]
    every = il.head_copying(study.view, head, [*words], inputs=inputs)
    found = []
    for _, said in pairs:
        places = torch.tensor([words[token] for token in said], device=every.logits.device)
        found.append(replace(every, tokens=every.tokens[places], logits=every.logits[places[:, None], places]))
    return float(np.mean([one.discrimination for one in found])), float(
        np.mean([one.positive_eigenvalues for one in found])
    )


LEAST = 0.75


def claim(table: pd.DataFrame) -> Verdict:
    """Labels read are said, more than by the other heads of the layers, and more than words of texts are."""
    label, text = (beside(table, "copied", word=word) for word in WORDS)
    what, unit = "copies of label words", "of pairs"
    judged = all_of(
        verdict(
            label.drawn.estimate(label.located, bounds=SHARE), least=LEAST, unit=unit, what=f"{what} in located heads"
        ),
        beyond(label, label.random, unit=unit, what=what, whom=f"{label.named} of the same layers"),
        beyond(label, text.located, unit=unit, what=what, whom="words of texts in the same heads"),
    )
    heads = table.drop_duplicates(["group", "name", "word"])
    notes = []
    for name, called in (("circuit", "told apart"), ("eigen", "share of positive eigenvalues")):
        means_of = {
            (group, word): where(heads, group=group, word=word)[name].mean()
            for group in ("located", "random")
            for word in WORDS
        }
        notes.append(
            f"weights alone, {called}: labels {means_of['located', 'label']:.2g} (other heads "
            f"{means_of['random', 'label']:.2g}), words of texts {means_of['located', 'text']:.2g} "
            f"({means_of['random', 'text']:.2g})"
        )
    return told(judged, *notes)


def figure(table: pd.DataFrame) -> Figure:
    """Copies of labels and of texts' words by located head, and in other heads; eigenvalues of the weights alone."""
    drawn = Figure(figsize=(PAGE, 2.5), layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(1.6, 1))
    located = where(table, group="located").drop_duplicates("name")
    names, layers = list(located["name"]), list(located["layer"])
    series = {
        "labels": (ORANGE, by_name(where(table, group="located", word="label"), "copied", names)),
        "words of texts": (BLUE, by_name(where(table, group="located", word="text"), "copied", names)),
        "labels, other heads of the layer": (
            GREY,
            [matched(where(table, word="label", layer=layer), "copied") for layer in layers],
        ),
    }
    for i, (label, (hue, samples)) in enumerate(series.items()):
        at = np.arange(len(names)) + 0.27 * (i - 1)
        left.bar(at, means(samples), width=0.27, color=hue, label=label)
        left.errorbar(at, means(samples), yerr=whiskers(samples), **WHISKERS)
    left.axhline(0.5, color="0.3", linewidth=0.6, linestyle=":")
    left.set(ylabel="Says what it reads\n(share of pairs, 0–1)", xlabel="Located heads, best first", ylim=(0, 1.02))
    name_heads(left, names)
    heads = table.drop_duplicates(["group", "name", "word"])
    for group, hue, size in (("random", GREY, 3), ("located", ORANGE, 4)):
        x, y = (where(heads, group=group, word=word)["eigen"].to_numpy() for word in ("text", "label"))
        right.plot(x, y, "o", color=hue, markersize=size)
    right.axhline(0, color="0.3", linewidth=0.4)
    right.axvline(0, color="0.3", linewidth=0.4)
    right.set(xlim=(-1.05, 1.05), ylim=(-1.1, 1.1), xlabel="Words of texts", ylabel="Labels")
    right.set_title("Positive eigenvalues, weights alone (−1 to 1)", fontsize=7)
    legend_below(drawn, left, columns=3)
    return drawn


EXPERIMENT = Experiment(
    id="copy",
    title="What is read is said",
    source="Sections 4.3 and 6.1 (open: the circuit from values to labels)",
    claim="Values of located heads at the labels copy these: reading one raises that very label.",
    criterion=(
        "In three of four pairs a label's logit is larger where the head reads it than where it reads the other label "
        "(values at the labels, as they arrive); and beyond the other heads of the layers, and beyond words of texts "
        "in the same heads, by a tenth of what these leave."
    ),
    paper=None,
    departs=(
        "The paper reads values at labels out in the vocabulary and looks at the words. Here the same circuit is "
        "measured over pairs of labels, beside other heads and other words, which the paper does not do. "
        "That some heads can only say “foo” or “bar” (section 6.1) is not asked. The "
        "weights alone, told beside, may say otherwise: what a label's value holds was also written by earlier layers."
    ),
    config=CopyConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
