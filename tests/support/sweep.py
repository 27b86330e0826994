"""One call of every public function that takes a model or activations, on a ragged batch that every
family can run.
"""

import inspect
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import families
import pandas as pd
import pytest
import torch
from family_tables import PARTLY_REFUSED
from tolerance import assert_close
from torch import Tensor

import icl_lens as il
from icl_lens.reading.last_logits import last_log_probs

SHORT = il.Prompt.parse("happy : bar sad : bar three : foo nine :", answer="foo")
MIDDLE = il.Prompt.parse("cat : foo the red : bar a blue :", answer="bar")
LONG = il.Prompt.parse(
    "two : foo love : bar like : bar eight : foo hate : bar nine : foo three : foo sad : bar one :",
    answer="foo",
)
PROMPTS = [SHORT, MIDDLE, LONG]
"""Ragged: 11, 10 and 26 tokens, most of them longer than a window, one longer than a tiny
rotation's first length.
"""
OTHERS = [
    il.Prompt.parse("good : foo bad : foo love : bar like :", answer="foo"),
    il.Prompt.parse("red : bar the dog : foo a cat :", answer="bar"),
    il.Prompt.parse(
        "one : foo hate : foo like : bar two : foo cat : bar dog : bar nine : foo sad : bar three :",
        answer="bar",
    ),
]
"""Each has as many tokens as the prompt of `PROMPTS` with the same index."""
WEIGHTS = torch.tensor([0.0, 0.5, 2.0, 0.3, 1.5, 0.8, 0.1, 1.0])
"""Factors of attention to the first to eighth label of a prompt."""
STRENGTHS = {"majority": 0.7, "recency": 0.6}
ONE_WORD = [
    il.Prompt.parse("love : bar like : bar eight : foo two : foo one :", answer="foo"),
    il.Prompt.parse("happy : bar three : foo nine :", answer="foo"),
    il.Prompt.parse("two : foo cat : bar red : bar dog :", answer="bar"),
]
"""Texts of one token, so that texts can change places without moving labels."""
READINGS = [
    *(("q", "last", "last"), ("k", "all", "last"), ("v", "label", "last")),
    *(("q", "label", "label"), ("k", "text", "label"), ("v", "all", "label")),
    *(("q", "all", "all"), ("k", "other", "text"), ("v", "label", "query")),
]
"""What a reader reads, at which tokens, and at which tokens it acts."""
FFN_READINGS = ("last", "label", "all")
"""At which tokens an FFN reads."""
DRAWN = {"n": 3, "n_tokens": 6}
"""Size of the random sequences on which induction is measured."""


def tokenized(model: Any, prompts: Sequence[il.Prompt]) -> il.PromptBatch:
    """Return a batch with the same labels, in the same order, whatever the prompts."""
    return il.tokenize(model, prompts, prepend_bos=False, labels=("foo", "bar"))


@dataclass
class Case:
    """A model with prompts to run it on, and prompts of the same lengths to patch from."""

    model: Any
    prompts: Sequence[il.Prompt]
    others: Sequence[il.Prompt]

    @cached_property
    def batch(self) -> il.PromptBatch:
        return tokenized(self.model, self.prompts)

    @cached_property
    def other(self) -> il.PromptBatch:
        return tokenized(self.model, self.others)

    @cached_property
    def stretched(self) -> il.PromptBatch:
        """The prompts of `other` with one token more before the first text."""
        demonstration_lists = [prompt.demonstrations for prompt in self.others]
        longer = [
            (
                il.Demonstration(f"the {demonstrations[0].text}", demonstrations[0].label),
                *demonstrations[1:],
            )
            for demonstrations in demonstration_lists
        ]
        pairs = zip(self.others, longer, strict=True)
        return tokenized(
            self.model,
            [replace(prompt, demonstrations=demonstrations) for prompt, demonstrations in pairs],
        )

    def source(
        self, *, activation: str, positions: str = "all", align: str = "positions"
    ) -> il.PromptBatch:
        """Return what to patch from: prompts of another length wherever places need not be the
        same.
        """
        last = positions == "last" and activation in ("q", "z")
        return self.stretched if last or align == "labels" else self.other

    @cached_property
    def acts(self) -> il.Activations:
        return il.capture(self.model, self.batch, writers="all")

    @cached_property
    def heads(self) -> list[il.Head]:
        """One head each of three layers with attention."""
        layers = attention_layers(self.model)
        return [il.Head(layers[0], 1), il.Head(layers[len(layers) // 2], 2), il.Head(layers[-1], 3)]

    @property
    def reader(self) -> il.Head:
        return self.heads[-1]

    @cached_property
    def writers(self) -> list[str]:
        """Writers before the last of the heads."""
        return self.writers_before(self.reader)

    def writers_before(self, head: il.Head) -> list[str]:
        """Return an earlier head, FFN and the embedding."""
        return [str(self.heads[0]), f"F{head.layer - 1}", "embed"]

    def writers_to(self, head: il.Head, part: str) -> list[Any]:
        """Return writers before a head and, for the last of the heads, chains."""
        return [*self.writers_before(head), *(self.chains(part) if head == self.reader else [])]

    def chains(self, part: str) -> list[il.Edge | tuple[il.Edge, ...]]:
        """Return what the head between writes because of one edge, of several, and of a chain to
        where it is read.
        """
        between, at = self.heads[1], "last" if part == "q" else "label"
        parts = [("v", str(self.heads[0]), "text"), ("q", "embed", at), ("k", "embed", "other")]
        edges = tuple(il.Edge(between, part, writer, role, at) for part, writer, role in parts)
        first = il.Edge(self.heads[0], "v", "embed", "text", "text")
        return [edges[0], edges, il.Edge(between, "v", first, "text", at)]

    @property
    def ffn(self) -> str:
        """The FFN of the last of the heads' layer."""
        return f"F{self.reader.layer}"

    @property
    def writers_to_ffn(self) -> list[str]:
        """Return an earlier FFN and head, the embedding and, unless the FFN reads what attention
        reads, a head of its layer.
        """
        is_parallel = self.model.cfg.parallel_attn_mlp
        return [*self.writers, *([] if is_parallel else [str(self.reader)])]

    def chains_to_ffn(self, role: str) -> list[il.Edge | tuple[il.Edge, ...]]:
        """Return what an earlier FFN writes because of an edge, and what a head writes because of
        this.
        """
        earlier = f"F{self.reader.layer - 1}"
        into_ffn = il.Edge(earlier, "mlp_in", str(self.heads[0]), reader_at=role)
        return [into_ffn, *self.chains("q" if role == "last" else "v")[:1]]

    @cached_property
    def weights(self) -> Tensor:
        return WEIGHTS[: self.batch.label_positions.shape[1]].expand(len(self.batch), -1).clone()

    @cached_property
    def blocked(self) -> Tensor:
        """Pairs of a query and a key to block, the same for a prompt alone and in a batch."""
        n = self.batch.tokens.shape[1]
        query, key = torch.arange(n)[:, None], torch.arange(n)
        return (
            (((2 * query + 3 * key) % 5 == 0) & (key > 0)).expand(len(self.batch), -1, -1).clone()
        )

    @cached_property
    def vectors(self) -> Tensor:
        d_model = self.model.cfg.d_model
        drawn = torch.randn(d_model, generator=torch.Generator().manual_seed(0))
        return drawn.expand(len(self.batch), -1).to(self.model.W_U.dtype)

    @cached_property
    def sets_of_edits(self) -> list[list[il.Edit]]:
        """Edits of every kind, together and at the last position only, and at all positions."""
        fixes = il.debias_edits(self.batch, self.heads, **STRENGTHS)
        ablated = il.Ablate(self.heads[:1], positions="last")
        further_edits = [
            il.Ablate(self.heads[:1]),
            il.RemovePosition(self.heads),
            il.AddVector(self.vectors, 1),
        ]
        return [
            [],
            fixes,
            [*fixes, ablated],
            [ablated, il.AddVector(self.vectors, 0)],
            further_edits,
        ]

    @cached_property
    def edge_sets(self) -> list[list[il.Edge]]:
        parts = [("q", "last"), ("k", "label"), ("v", "text")]
        edges = []
        for part, role in parts:
            edges += [il.Edge(self.reader, part, writer, role) for writer in self.writers]
        between, readings = (
            self.heads[1],
            [("v", "text", "label"), ("q", "query", "query"), ("k", "label", "last")],
        )
        early = []
        for part, role, at in readings:
            for writer in self.writers_before(between):
                early.append(il.Edge(between, part, writer, role, at))
        through = []
        for part, role in parts[:2]:
            through += [il.Edge(self.reader, part, chain, role) for chain in self.chains(part)]
        chained = [
            [*through[kind::3], edges[0]] for kind in range(3)
        ]  # all of these pass through one head
        into_ffn, through_components = [], []
        for role in ("last", "label"):
            for writer in self.writers_to_ffn:
                into_ffn.append(il.Edge(self.ffn, "mlp_in", writer, reader_at=role))
            for chain in self.chains_to_ffn(role):
                through_components.append(il.Edge(self.ffn, "mlp_in", chain, reader_at=role))
        through_ffn = il.Edge(f"F{self.reader.layer - 1}", "mlp_in", "embed", reader_at="label")
        through_components.append(il.Edge(self.reader, "k", through_ffn, "label"))
        mixed = [*early, *edges, *into_ffn]
        return [
            *([], edges[:1], edges, early, [*early, *edges], *chained),
            *(into_ffn[:1], mixed, [*edges[:1], *through_components]),
        ]

    @property
    def targets(self) -> Tensor:
        return self.batch.answer_tokens

    @property
    def against(self) -> Tensor:
        return self.batch.other_label_tokens

    def within(self, edit: AbstractContextManager[Any]) -> Tensor:
        """Return the log-probabilities [batch vocab] within an edit."""
        with edit:
            return last_log_probs(self.model, self.batch)


def attention_layers(model: Any) -> list[int]:
    """Return the layers that have attention."""
    return [layer for layer in range(model.cfg.n_layers) if hasattr(model.blocks[layer], "attn")]


@dataclass(frozen=True)
class Call:
    """A call of one function; `of_prompts` results have one entry per prompt first, others are
    means over prompts.
    """

    function: Callable[[Case], Any]
    of_prompts: bool


def _loaded(case: Case) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        case.acts.save(path := Path(folder) / "acts.safetensors")
        return il.Activations.load(path, case.model)


def _cached(case: Case) -> il.Activations:
    _, cache = case.model.run_with_cache(
        case.batch.tokens, attention_mask=case.batch.attention_mask
    )
    return il.Activations.from_cache(case.model, cache, case.batch)


def _recorded(acts: il.Activations) -> dict[str, Tensor]:
    """Return what is recorded for each prompt."""
    names = (
        "resid_pre",
        "attn_out",
        "mlp_out",
        "resid_final",
        "pattern",
        "z",
        "q",
        "label_resid_pre",
    )
    return {name: getattr(acts, name) for name in names} | {"labels": acts.label_log_probs}


def _explained(case: Case) -> Any:
    """Explain one prompt after the other, with all heads."""
    options = {
        "k": 3,
        "n_ablated": 2,
        "n_random": 1,
        "labels": ("foo", "bar"),
        "prepend_bos": False,
    }
    return [
        sorted_by_head(il.explain(case.model, prompt, **options)) for prompt in case.prompts[-2:]
    ]


def sorted_by_head(explanation: Any) -> Any:
    reports = sorted(explanation.heads, key=lambda report: report.head)
    numbers = [
        (
            r.attention,
            r.position_increases,
            r.position_contrasts,
            r.ablated,
            r.similarity,
            r.increase,
        )
        for r in reports
    ]
    return [
        explanation.scores.log_probs,
        explanation.all_heads.increase,
        explanation.all_heads.contrast,
        explanation.all_heads.attention,
        numbers,
    ]


def many(prompts: Sequence[il.Prompt]) -> list[il.Prompt]:
    """Return 20 prompts, as many as a check of a task needs."""
    return [prompts[i % len(prompts)] for i in range(20)]


def _edges(case: Case) -> dict[str, Tensor]:
    effects_by_name = {}
    for part, at, reader_at in READINGS:
        head = case.reader if reader_at == "last" else case.heads[1]
        options = {
            "writers": case.writers_to(head, part),
            "at": at,
            "reader_at": reader_at,
            "against": case.against,
        }
        effects = il.head_to_head_effects(case.model, case.batch, [head], part=part, **options)
        effects_by_name |= {
            f"{part} at {reader_at} {name}": getattr(effects, name)
            for name in ("log_prob", "log_odds")
        }
    for role in FFN_READINGS:
        options = {"writers": case.writers_to_ffn, "reader_at": role, "against": case.against}
        effects = il.head_to_head_effects(
            case.model, case.batch, [case.ffn], part="mlp_in", **options
        )
        effects_by_name[f"FFN at {role}"] = effects.log_odds
    return effects_by_name


def _effects(case: Case) -> dict[str, Tensor]:
    effects_by_name = {}
    for name, options in {
        "all": {"positions": "all", "against": case.against},
        "last": {"positions": "last", "against": case.against},
        "gradient": {"positions": "all", "method": "gradient", "against": case.against},
    }.items():
        effects = il.head_effects(case.model, case.batch, **options)
        effects_by_name |= {
            f"{name} {outcome}": getattr(effects, outcome) for outcome in ("log_prob", "log_odds")
        }
    return effects_by_name


def _without_demonstrations(case: Case) -> dict[str, Tensor]:
    """Sums over demonstrations, of which a prompt alone may have fewer than the longest of a
    batch.
    """
    effects = il.demonstration_effects(
        case.model, case.batch, against=case.against, ways=["hidden", "keys", "values", "removed"]
    )
    sums = {f"sum {name}": getattr(effects, name).nansum(1) for name in ("log_prob", "log_odds")}
    return sums | {
        name: getattr(effects, name)[:, :3] for name in ("whole_log_prob", "whole_log_odds")
    }


def _patches(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    for activation in ("q", "k", "v", "pattern", "z"):
        yield activation, {"activation": activation}
    yield "q last", {"activation": "q", "positions": "last"}
    yield "z last", {"activation": "z", "positions": "last"}
    for activation in ("q", "k", "v", "z"):
        yield f"{activation} labels", {"activation": activation, "align": "labels"}
    for activation in ("k", "v"):
        yield (
            f"{activation} labels last",
            {"activation": activation, "align": "labels", "positions": "last"},
        )


def _patched(case: Case) -> dict[str, Tensor]:
    return {
        name: case.within(
            il.patch_heads(
                case.model,
                case.heads,
                case.source(**options),
                **options,
                **({"batch": case.batch} if options.get("align") == "labels" else {}),
            )
        )
        for name, options in _patches(case)
    }


def _patched_sets(case: Case) -> dict[str, Tensor]:
    sets = [case.heads[:1], case.heads]
    scores = {}
    for name, options in _patches(case):
        source = case.source(**options)
        edits = [[il.Patch(heads, source, **options)] for heads in sets]
        scores[name] = il.score(case.model, case.batch, edits)
    return scores


def _traced(case: Case, **options: Any) -> dict[str, Tensor]:
    """Return the log-odds lost [prompt site role layer] with prompts of other lengths, and their
    estimates.
    """
    options |= {"sites": ("resid_pre", "attn_out"), "layers": [0, 2]}
    exact = il.trace(case.model, case.batch, case.stretched, **options)
    options |= {"method": "gradient", "n_checked": 0}
    estimates = il.trace(case.model, case.batch, case.stretched, **options)
    return {"exact": torch.from_numpy(exact.lost), "gradient": torch.from_numpy(estimates.lost)}


def _patched_sites(case: Case) -> Tensor:
    sets = []
    for site in ("resid_pre", "attn_out", "resid_post"):
        for positions in ("last", "labels", "query"):
            sets.append([il.PatchSite(site, 1, case.stretched, positions=positions)])
    return il.score(case.model, case.batch, sets)


def _ablated_sets(case: Case) -> dict[str, Tensor]:
    sets = [[], case.heads[:1], case.heads]
    scores = {}
    for positions in ("all", "last", "labels", [1, -2]):
        edits = [[il.Ablate(heads, positions=positions)] for heads in sets]
        scores[str(positions)] = il.score(case.model, case.batch, edits)
    return scores


def _score_parts(case: Case) -> dict[str, Any]:
    parts = il.attention_score_parts(case.acts, case.reader)
    return {
        "scores": parts.scores,
        "query": parts.query_side,
        "key": parts.key_side,
        "pattern": parts.pattern,
        "without": parts.pattern_without("key", norm="recomputed"),
        "by position": parts.by_position(case.heads[0], "key"),
    }


def _value_parts(case: Case) -> dict[str, Any]:
    parts = il.value_parts(case.acts, case.reader, case.targets, against=case.against)
    return {"parts": parts.parts, "by position": parts.by_position(case.heads[0])}


def _metric_scores(case: Case) -> Tensor:
    layer = case.reader.layer
    x = case.acts.resid_pre[:, layer].float(), case.acts.label_resid_pre[:, layer].float()
    return il.query_key_metric(case.model, case.reader).scores(x[0][:, None], x[1])


def _similarity(case: Case) -> dict[str, Tensor]:
    similarity = il.label_similarity(case.model, case.batch, case.heads)
    return {"where labels are predicted": similarity[:, :, :-1], "last": similarity[:, :, -1]}


def _top_subheads(case: Case) -> dict[str, Any]:
    top = il.top_subheads(case.acts, case.targets, k=4, by="increase")
    return {"value": top.value, "layer": top.layer, "head": top.head, "position": top.position}


def _compared(case: Case) -> Any:
    comparison = il.compare_models(
        case.model, case.model, case.prompts[:2], by="effect", prepend_bos=False
    )
    frames = [
        comparison.to_frame(by).sort_values(["layer", "head"]) for by in ("increase", "effect")
    ]
    return [frames[0]["a"], frames[1]["b"], comparison.summary()[["a", "b"]]]


def _controlled(case: Case) -> Any:
    ablation = il.ablate_with_controls(
        case.model, case.batch, case.heads[:2], n_random=2, positions="all"
    )
    return {name: ablation.per_prompt(name, "log_odds").T for name in ablation.conditions}


def _located(case: Case, **options: Any) -> Any:
    return il.locate(case.model, case.batch, by="increase", **options).score.mean


def _mean_parts(case: Case, **options: Any) -> Any:
    parts = il.mean_score_parts(case.model, case.batch, [case.reader], **options)
    frame = parts.to_frame("writers").query("side != 'pair'").dropna(subset="value")
    return frame.sort_values(["side", "writer"])["value"]


def _circuit(case: Case, **options: Any) -> Any:
    ranking, testing = case.batch[[0, 2]], case.batch[[1]]
    circuit = il.locate_circuit(
        case.model, ranking, testing, [case.reader, case.ffn], n_edges=3, n_random=3, **options
    )
    return circuit.to_frame("edges").set_index("edge").sort_index()[["estimate", "effect"]]


def _mean_effects(case: Case, **options: Any) -> Any:
    options = {"against": case.against, "positions": "all"} | options
    frame = il.locate(case.model, case.batch, by="effect", **options).to_frame()
    return frame.sort_values(["layer", "head"])[["score", "log_prob"]]


def located_towers(case: Case, **options: Any) -> pd.DataFrame:
    """Return the mean log-odds lost in exchanges of each head's query, keys or values."""
    frame = il.locate(
        case.model, tokenized(case.model, ONE_WORD), by="exchange", **options
    ).to_frame()
    frame = frame.rename(columns={"score": "query"})
    return frame.set_index(["layer", "head"]).sort_index()[["query", "keys", "values"]]


def _saliency_flow(case: Case) -> Any:
    flow = il.saliency_flow(case.model, case.batch)
    return {
        name: getattr(flow, name)
        for name in ("text_to_label", "label_to_last", "rest", "other_to_last")
    }


def _checked(case: Case) -> Any:
    check = il.task_check(case.model, many(case.prompts), prepend_bos=False)
    return [interval.value for interval in check.accuracy.values()]


def exchanged(case: Case) -> Any:
    """Return the log-odds [prompt] lost in each exchange between two towers, by name."""
    towers = il.two_towers(case.model, ONE_WORD, case.heads, n_random=3, prepend_bos=False)
    return {exchange.name: exchange.lost for exchange in towers.exchanges}


def _copying(case: Case) -> Any:
    tokens = [families.WORDS.index(word) for word in ("foo", "bar", "love")]
    return il.head_copying(case.model, case.heads[1], tokens).logits


def _loaded_task(case: Case) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "words.json"
        path.write_text(
            '{"categories": {"sentiment": ["love", "like", "hate", "happy"], "number": ["one", "two", "nine"]}}'
        )
        prompts = il.load_task("sentiment-number", n=3, path=path, same_length_for=case.model)
    return tokenized(case.model, prompts).tokens


def _texts(case: Case) -> Any:
    texts = [" ".join(words(prompt)) for prompt in case.prompts]
    return il.tokenize(case.model, list(map(il.Text, texts)), prepend_bos=False).tokens


def words(prompt: il.Prompt) -> list[str]:
    """Return a prompt's words, which are its tokens."""
    demonstration_words: list[str] = []
    for demonstration in prompt.demonstrations:
        demonstration_words += f"{demonstration.text} : {demonstration.label}".split()
    return [*demonstration_words, *prompt.query.split(), ":"]


def _rows(function: Callable[[Case], Any]) -> Call:
    return Call(function, of_prompts=True)


def _mean(function: Callable[[Case], Any]) -> Call:
    return Call(function, of_prompts=False)


CALLS: dict[str, Call] = {
    "tokenize": _rows(lambda c: tokenized(c.model, c.prompts).tokens),
    "Text": _rows(_texts),
    "PromptBatch.from_tokens": _rows(
        lambda c: (
            il.PromptBatch.from_tokens(
                [row.tolist() for row in trimmed(c.batch)], model=c.model
            ).tokens
        )
    ),
    "load_task": _mean(_loaded_task),
    "capture": _rows(lambda c: _recorded(il.capture(c.model, c.batch))),
    "Activations.from_cache": _rows(lambda c: _recorded(_cached(c))),
    "Activations.load": _rows(lambda c: _recorded(_loaded(c))),
    "whole_label_log_probs": _rows(lambda c: il.whole_label_log_probs(c.model, c.batch)),
    "Activations.attention_by_label": _rows(lambda c: c.acts.attention_by_label()),
    "Activations.attention_to_labels": _rows(lambda c: c.acts.attention_to_labels()),
    "Activations.label_keys": _rows(
        lambda c: [
            c.acts.label_keys(c.reader, source=key_source) for key_source in ("resid", "attn")
        ]
    ),
    "Activations.label_values": _rows(lambda c: c.acts.label_values(c.reader)),
    "Activations.last_query": _rows(lambda c: c.acts.last_query(c.reader)),
    "Activations.own_label_ranks": _rows(lambda c: c.acts.own_label_ranks(c.reader)),
    "head_copying": _mean(_copying),
    "layer_log_prob_increase": _rows(
        lambda c: list(astuple(il.layer_log_prob_increase(c.acts, c.targets))[:2])
    ),
    "head_log_prob_increase": _rows(lambda c: il.head_log_prob_increase(c.acts, c.targets)),
    "subhead_log_prob_increase": _rows(
        lambda c: il.subhead_log_prob_increase(c.acts, c.targets, against=c.against)
    ),
    "neuron_log_prob_increase": _rows(
        lambda c: il.neuron_log_prob_increase(c.acts, c.reader.layer, c.targets)
    ),
    "top_heads": _mean(lambda c: il.top_heads(c.acts, c.targets, k=12, by="increase").value),
    "top_subheads": _rows(_top_subheads),
    "html.attention_to_labels": _mean(
        lambda c: len(repr(il.html.attention_to_labels(c.acts, c.heads))) > 100
    ),
    "query_key_metric": _rows(_metric_scores),
    "label_similarity": _rows(_similarity),
    "attention_score_parts": _rows(_score_parts),
    "value_parts": _rows(_value_parts),
    "repeated_token_scores": _mean(
        lambda c: list(vars(il.repeated_token_scores(c.model, **DRAWN)).values())
    ),
    "explain": _mean(_explained),
    "compare_models": _mean(_compared),
    "task_check": _mean(_checked),
    "ablate_heads": _rows(
        lambda c: [
            c.within(il.ablate_heads(c.model, c.heads, positions=where))
            for where in ("all", "last")
        ]
    ),
    "Ablate": _rows(_ablated_sets),
    "head_effects": _rows(_effects),
    "demonstration_effects": _rows(_without_demonstrations),
    "calibrated_scores": _rows(
        lambda c: il.calibrated_scores(c.model, c.batch, inputs=["one", "red"])
    ),
    "generate": _mean(
        lambda c: torch.tensor(il.generate(c.model, c.batch, max_new_tokens=2).tokens)
    ),
    "ablate_with_controls": _rows(_controlled),
    "Block": _rows(lambda c: c.within(il.edited(c.model, il.Block(c.heads, c.blocked)))),
    "Reweight": _rows(
        lambda c: c.within(
            il.edited(c.model, il.Reweight(c.heads, c.weights, renormalize=True), batch=c.batch)
        )
    ),
    "RemovePosition": _rows(
        lambda c: [
            c.within(
                il.edited(
                    c.model, il.RemovePosition(c.heads, strength=strength, positions=positions)
                )
            )
            for strength, positions in ((1.0, "all"), (0.6, "last"))
        ]
    ),
    "debias_edits": _rows(
        lambda c: c.within(
            il.edited(c.model, *il.debias_edits(c.batch, c.heads, **STRENGTHS), batch=c.batch)
        )
    ),
    "score": _rows(
        lambda c: [il.score(c.model, c.batch, c.sets_of_edits), il.score(c.model, c.batch)]
    ),
    "edited": _rows(
        lambda c: [
            c.within(il.edited(c.model, *edits, batch=c.batch)) for edits in c.sets_of_edits[3:]
        ]
    ),
    "patch_heads": _rows(_patched),
    "Patch": _rows(_patched_sets),
    "head_to_head_effects": _rows(_edges),
    "WithoutEdges": _rows(
        lambda c: il.score(c.model, c.batch, [[il.WithoutEdges(edges)] for edges in c.edge_sets])
    ),
    "attention_saliency": _rows(lambda c: il.attention_saliency(c.model, c.batch)),
    "saliency_flow": _rows(_saliency_flow),
    "function_vector": _mean(lambda c: il.function_vector(c.model, c.batch, c.heads)),
    "indirect_effects": _rows(
        lambda c: il.indirect_effects(c.model, c.other, tokenized(c.model, OTHERS[:2]))
    ),
    "task_vectors": _mean(lambda c: il.task_vectors(c.model, c.batch)),
    "vector_gains": _rows(lambda c: il.vector_gains(c.model, c.vectors[0], c.batch).log_prob),
    "AddVector": _rows(
        lambda c: c.within(
            il.edited(c.model, il.AddVector(c.vectors, c.reader.layer), batch=c.batch)
        )
    ),
    "AblateSite": _rows(
        lambda c: il.score(
            c.model,
            c.batch,
            [
                [il.AblateSite("mlp_out", 1, positions=where)]
                for where in ("all", "last", "texts", "separators")
            ],
        )
    ),
    "PatchSite": _rows(_patched_sites),
    "locate": _mean(_located),
    "locate.effect": _mean(_mean_effects),
    "mean_score_parts": _mean(_mean_parts),
    "locate_circuit": _mean(_circuit),
    "two_towers": _mean(exchanged),
    "trace": _rows(_traced),
    "locate.exchange": _mean(located_towers),
}
"""Name → a call whose results are numbers."""


def trimmed(batch: il.PromptBatch) -> list[Tensor]:
    """Return each row's tokens without padding."""
    return [row[: last + 1] for row, last in zip(batch.tokens, batch.last.tolist(), strict=True)]


OTHER_SCORES = {"locate.effect", "locate.exchange"}
"""Calls of `il.locate` that measure by other parts of the code."""


def takes_a_model() -> set[str]:
    """Return the names of all public functions, and methods made anew from one, that take a model
    or activations.
    """
    callables = set()
    for name in il.__all__:
        public = getattr(il, name)
        if isinstance(public, ModuleType):
            made_here = {
                key: f for key, f in vars(public).items() if inspect.isfunction(f) and key[0] != "_"
            }
            made_here = {
                key: f for key, f in made_here.items() if f.__module__.startswith(public.__name__)
            }
            members = {f"{name}.{key}": f for key, f in made_here.items()}
        elif inspect.isclass(public):
            members = {
                f"{name}.{member}": getattr(public, member)
                for member in vars(public)
                if member[0] != "_"
            }
            if (
                issubclass(public, (il.Edit, il.Text)) and public is not il.Edit
            ):  # values that are run on a model
                callables.add(name)
        else:
            members = {name: public}
        callables |= {
            key
            for key, f in members.items()
            if callable(f) and (_takes_a_model(f) or _reads_activations(key, f))
        }
    # Prompts of tasks are those of `load_task`, chats need a tokenizer only, a live view shows
    # numbers of the others (test_live_view), lists of heads are compared and drawn without running a
    # model, `map_prompts` runs what it is passed (test_map_prompts), an atlas has its own tests
    # (tests/analyses/atlas), and `debias_edits` returns values.
    return callables - {
        "PairTask.prompts",
        "Template.chat",
        "head_atlas",
        "head_overlap",
        "live",
        "map_prompts",
        "random_head_sets",
    } | {"debias_edits"}


def _reads_activations(name: str, function: Any) -> bool:
    """Return whether this is a method of activations that returns what heads hold or attend to."""
    is_method = name.startswith("Activations.") and "Tensor" in str(
        inspect.signature(function).return_annotation
    )
    return is_method and {*inspect.signature(function).parameters} <= {"self", "head", "source"}


def _takes_a_model(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        (
            parameter.name in ("model", "a", "b", "same_length_for")
            and parameter.annotation in (Any, "Any")
        )
        or "Activations" in str(parameter.annotation)
        for parameter in parameters
    )


def numbers(result: Any) -> Iterator[Tensor]:
    """Yield the tensors of a result, numbers as float64."""
    if isinstance(result, Tensor):
        yield result.detach().double()
    elif isinstance(result, dict):
        for value in result.values():
            yield from numbers(value)
    elif isinstance(result, pd.DataFrame | pd.Series):
        yield torch.tensor(result.to_numpy(dtype=float))
    elif is_dataclass(result):
        yield from numbers(vars(result))
    elif isinstance(result, list | tuple) and not _is_flat(result):
        for value in result:
            yield from numbers(value)
    elif result is not None:
        yield torch.as_tensor(result).double()


def _is_flat(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def is_refused(function: str, family: str, call: Callable[[], Any]) -> bool:
    """Return whether a family has no such function, after asserting that a call then raises the
    expected InputError.
    """
    words = PARTLY_REFUSED.get(function, {}).get(family)
    if words is None:
        return False
    with pytest.raises(il.InputError, match=words):
        call()
    return True


def assert_same(actual: Any, expected: Any, *, row: int | None = None, msg: str) -> None:
    """Assert that results agree: all of them, or those of one prompt in a batch with those of the
    prompt alone.
    """
    ours, theirs = list(numbers(actual)), list(numbers(expected))
    assert len(ours) == len(theirs)
    for x, y in zip(ours, theirs, strict=True):
        if row is not None:
            x, y = x[row], y[0]
            x = x[tuple(slice(0, n) for n in y.shape)]
        assert x.isfinite().any() or not x.numel()
        infinite = ~y.isfinite()
        assert_close(
            x.masked_fill(infinite, 0).float(), y.masked_fill(infinite, 0).float(), msg=msg
        )
        assert torch.equal(~x.isfinite(), infinite), msg
