"""Every family × every public function that takes a model, in float32, against plain Hugging Face
passes in float64.

The batch is padded; the reference runs each prompt alone (`reference_passes`, `reference_hf`) and
shares nothing with the package. Where a function averages over prompts, the reference does so too.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, partial
from itertools import product
from operator import itemgetter
from typing import Any

import against_hf
import families
import pytest
import reference_hf
import reference_passes
import sweep
import tolerance
import torch
from cases import slow
from family_tables import EXACT
from reference_passes import (
    Edit,
    Pass,
    attention_of,
    in_turn,
    replacing,
    saliency_of,
    times_slopes,
    writing,
)
from shared import SEVERAL
from sweep import CALLS, OTHERS, PROMPTS, STRENGTHS, Case, is_refused, trimmed
from torch import Tensor
from transformers import AutoModelForCausalLM

import icl_lens as il
from icl_lens.edits.sites import SITES
from icl_lens.measures.exchanges import EXCHANGES, tower_prompts
from icl_lens.reading.last_logits import last_log_probs

pytestmark = pytest.mark.usefixtures("no_type_checks")

CHECKS: dict[str, tuple[set[str], Callable[["Both"], None]]] = {}
"""Name of a check → the functions that it checks, and the check."""
FOO, BAR = (families.WORDS.index(word) for word in ("foo", "bar"))
_MASKED = -1e9
"""Scores below are masks."""
Where = Sequence[tuple[int, int]]


def assert_close(ours: Any, theirs: Any, *, scale: float = 1.0, msg: str = "") -> None:
    """Assert that numbers agree up to rounding in float32, also where float32 numbers were summed
    in float64.
    """
    tolerance.assert_close(torch.as_tensor(ours).float(), theirs, scale=scale, msg=msg)


def by_layer(heads: Where) -> dict[int, list[int]]:
    """Return the heads of each layer, first layers first."""
    return {layer: [head for where, head in heads if where == layer] for layer, _ in sorted(heads)}


def checks(*names: str) -> Callable[[Callable[["Both"], None]], Callable[["Both"], None]]:
    """Register a check of one or several functions."""

    def register(check: Callable[["Both"], None]) -> Callable[["Both"], None]:
        assert check.__name__ not in CHECKS, f"two checks are called {check.__name__}"
        CHECKS[check.__name__] = set(names), check
        return check

    return register


class Both(Case):
    """A case with its Hugging Face model, and plain passes of both."""

    def __init__(self, model: Any, hf: Any) -> None:
        super().__init__(model, PROMPTS, OTHERS)
        self.hf = hf

    @cached_property
    def ids(self) -> list[Tensor]:
        return trimmed(self.batch)

    @cached_property
    def clean(self) -> list[Pass]:
        return [reference_passes.run(self.hf, ids) for ids in self.ids]

    @cached_property
    def clean_log_probs(self) -> Tensor:
        """Log-probabilities [batch vocab] without edits."""
        return torch.stack([clean_pass.log_probs for clean_pass in self.clean])

    @cached_property
    def others_passes(self) -> list[Pass]:
        return [reference_passes.run(self.hf, ids) for ids in trimmed(self.other)]

    @cached_property
    def stretched_passes(self) -> list[Pass]:
        return [reference_passes.run(self.hf, ids) for ids in trimmed(self.stretched)]

    @cached_property
    def references(self) -> list[Any]:
        return [reference_hf.Reference(self.hf, ids) for ids in self.ids]

    def labels(self, row: int) -> list[int]:
        """Return where a prompt's labels are."""
        return [i for i, token in enumerate(self.ids[row].tolist()) if token in (FOO, BAR)]

    def demonstrations(self, row: int) -> list[range]:
        """Return the tokens of each demonstration, its label included."""
        ends = self.labels(row)
        return [
            range(start, end + 1)
            for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)
        ]

    def places(self, row: int, role: str) -> list[int]:
        """Return the positions of a prompt's tokens of a role."""
        ids, labels = self.ids[row].tolist(), self.labels(row)
        roles = ["text" if i < labels[-1] else "query" for i in range(len(ids))]
        roles = [
            "other" if token == families.WORDS.index(":") else role_of_token
            for role_of_token, token in zip(roles, ids, strict=True)
        ]
        roles = ["label" if i in labels else role_of_token for i, role_of_token in enumerate(roles)]
        return [
            i
            for i, role_of_token in enumerate([*roles[:-1], "last"])
            if role in ("all", role_of_token)
        ]

    def rivals(self, row: int) -> list[int]:
        return [FOO + BAR - int(self.targets[row])]

    def log_probs(
        self, edit_of_row: Callable[[int], Edit], ids: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Return log-probabilities [batch vocab] of passes with edits."""
        ids = self.ids if ids is None else ids
        return torch.stack(
            [
                reference_passes.run(self.hf, ids[i], edit_of_row(i)).log_probs
                for i in range(len(ids))
            ]
        )

    def same(self, edit: Any, edit_of_row: Callable[[int], Edit], *, moves: bool = True) -> Tensor:
        """Assert that an edit of the package's gives the reference's log-probabilities, which it
        moves; return them.
        """
        theirs = self.log_probs(edit_of_row)
        assert_close(self.within(edit), theirs, scale=float(theirs.abs().max()))
        if moves:
            assert (theirs - self.clean_log_probs).abs().max() > 1e-3
        return theirs

    def removed(
        self, heads: Where, *, last: bool = False, value: dict[int, Tensor] | float = 0.0
    ) -> Edit:
        """Return the edit that sets heads' z to zero or a value."""
        rows = -1 if last else slice(None)
        return in_turn(
            *(
                writing(
                    "z",
                    layer,
                    (rows, heads_of_layer),
                    value if isinstance(value, float) else value[layer][heads_of_layer],
                )
                for layer, heads_of_layer in by_layer(heads).items()
            )
        )

    def mean_z(self, *, last: bool) -> dict[int, Tensor]:
        """Return each layer's mean z [head d_head] over the other prompts' positions, or over their
        last ones.
        """
        z = [
            {layer: z[-1:] if last else z for layer, z in z_of_pass.z.items()}
            for z_of_pass in self.others_passes
        ]
        return {layer: torch.cat([z_of_pass[layer] for z_of_pass in z]).mean(0) for layer in z[0]}

    def patterns(self, change: Callable[[int, Tensor], Tensor]) -> Callable[[int], Edit]:
        """Return edits in which `change(row, pattern)` gives the pattern [query key] of each chosen
        head.
        """
        return lambda row: in_turn(
            *(writing("pattern", layer, head, partial(change, row)) for layer, head in self.heads)
        )

    def without_position(
        self, row: int, strength: float, *, last: bool, then: Edit | None = None
    ) -> Edit:
        """Return the edit that mixes scores with those that know no positions, layer after layer,
        and then others.
        """
        rows, mixes = slice(-1 if last else 0, None), list[Edit]()
        for layer, heads_of_layer in by_layer(self.heads).items():
            seen = reference_passes.run(self.hf, self.ids[row], in_turn(*mixes, then))
            x = without_learned(self.hf, seen.resid[layer])
            has_learned = not torch.equal(x, seen.resid[layer])
            flat = reference_passes.rerun_attention(
                self.hf, self.ids[row], seen, layer, x, place=False, freeze_norms=has_learned
            ).scores[layer]
            mix = partial(mixed, self.hf, flat=flat[heads_of_layer, rows], strength=strength)
            mixes.append(writing("scores", layer, (heads_of_layer, rows), mix))
        return in_turn(*mixes, then)

    def written(self, row: int, writer: Any) -> Tensor:
        """Return what a head, an FFN, an embedding or a chain writes at every position [pos
        d_model].
        """
        if not isinstance(writer, str):
            return self.because_of(row, [writer] if isinstance(writer, il.Edge) else writer)
        if writer == "embed":
            return without_learned(self.hf, self.clean[row].resid[0])
        if writer == "pos_embed":
            return reference_passes.learned_positions(self.hf, len(self.ids[row]))
        if writer.startswith("F"):
            layer = int(writer[1:])
            return self.captures[row].ffn_raw[layer] * self.factor(row, layer, "ffn")
        head = il.Head.parse(writer)
        return self.through_output(row, head, self.captures[row].z[head.layer, :, head.head])

    @cached_property
    def captures(self) -> list[Any]:
        return [reference_hf.capture(self.hf, ids) for ids in self.ids]

    def factor(self, row: int, layer: int, part: str) -> Tensor | float:
        """Return the factor by which attention ("attn") or an FFN ("ffn") is scaled as it is added
        to the stream.
        """
        post_norm = getattr(reference_hf._WIRING[self.hf.config.model_type], f"{part}_post_norm")
        factor = reference_hf._setting(self.hf.config, "residual_multiplier", default=1.0)
        if post_norm is None:
            return factor
        norm = reference_hf._Norm(reference_hf._layers(self.hf)[layer].get_submodule(post_norm))
        return factor * norm.scale(getattr(self.captures[row], f"{part}_raw")[layer]) * norm.gain

    def through_output(self, row: int, head: il.Head, z: Tensor) -> Tensor:
        """Return what a head writes at every position [pos d_model] if this is its z."""
        return (
            z
            @ reference_hf.output_weights(self.hf, head.layer)[head.head]
            * self.factor(row, head.layer, "attn")
        )

    def because_of(self, row: int, edges: Sequence[il.Edge]) -> Tensor:
        """Return what a head writes because of edges into it: its own z minus that without them,
        through W_O; or what an FFN does, its own output minus that without them.
        """
        changed = dict[str, Tensor]()
        for edge in edges:
            changed[edge.part] = changed.get(edge.part, 0) + at_role(
                self, row, edge.writer, edge.role
            )
        places = self.places(row, edges[0].reader_at)
        if "mlp_in" in changed:
            output = self.written(row, str(edges[0].reader))
            layer = int(str(edges[0].reader)[1:])
            edit = self.ffn_without(row, layer, changed["mlp_in"], places)
            return output - edit("mlp_out", layer, output)
        head = il.Head(*edges[0].reader)
        edit = self.rebuilt(row, head, changed, places)
        without = reference_passes.run(self.hf, self.ids[row], edit)
        z = self.clean[row].z[head.layer] - without.z[head.layer]
        return self.through_output(row, head, z[:, head.head])

    def ffn_without(self, row: int, layer: int, change: Tensor, places: Sequence[int]) -> Edit:
        """Return the edit in which an FFN writes at places what it would without `change` in what it
        reads.
        """
        is_parallel = reference_hf.is_parallel(self.hf.config)
        read, seen = "resid" if is_parallel else "resid_mid", dict[str, Tensor]()

        def without(asked: str, where: int, x: Tensor) -> Tensor | None:
            if (asked, where) == (read, layer):
                return x - change
            if (asked, where) == ("mlp_out", layer):
                seen["mlp_out"] = x.clone()
            return None

        reference_passes.run(self.hf, self.ids[row], without)
        return writing("mlp_out", layer, places, seen["mlp_out"][places])

    def rebuilt(
        self,
        row: int,
        head: il.Head,
        changed: dict[str, Tensor],
        places: Sequence[int] | None = None,
    ) -> Edit:
        """Return the edit in which a head writes at places what it would from q, k or v of other
        layer inputs.

        In one pass, the head has them at all positions; its z at the places is put into a pass that
        is clean otherwise.
        """
        places = [len(self.ids[row]) - 1] if places is None else places
        seen = {
            part: reference_passes.rerun_attention(
                self.hf,
                self.ids[row],
                self.clean[row],
                head.layer,
                self.clean[row].resid[head.layer] - x,
                place=True,
            )
            for part, x in changed.items()
        }

        values = {
            part: getattr(pass_of_part, part)[head.layer][head.head]
            for part, pass_of_part in seen.items()
        }
        read = in_turn(
            *(writing(part, head.layer, head.head, value) for part, value in values.items())
        )
        z = reference_passes.run(self.hf, self.ids[row], read).z[head.layer][places, head.head]
        return writing("z", head.layer, (places, head.head), z)

    def scored(self, log_probs: Tensor) -> dict[str, Tensor]:
        """Return the answer's log-probability and its log-odds, from log-probabilities [batch
        vocab].
        """
        answer_log_prob = log_probs.gather(1, self.targets[:, None])[:, 0]
        other_log_prob = log_probs.gather(1, FOO + BAR - self.targets[:, None])[:, 0]
        return {"log_prob": answer_log_prob, "log_odds": answer_log_prob - other_log_prob}

    def drops(self, edit_of_row: Callable[[int], Edit]) -> dict[str, Tensor]:
        clean = self.scored(self.clean_log_probs)
        return {
            name: clean[name] - value
            for name, value in self.scored(self.log_probs(edit_of_row)).items()
        }

    @cached_property
    def all_heads(self) -> list[tuple[int, int]]:
        return list(product(sorted(self.clean[0].pattern), range(families.N_HEADS)))

    @cached_property
    def effects(self) -> dict[str, dict[str, Tensor]]:
        """Return the effects [batch layer head] of removing each head: at all positions, and at the
        last.
        """
        effects_by_positions = {}
        for where in ("all", "last"):
            drops_by_head = [
                self.drops(lambda row, h=head, w=where: self.removed([h], last=w == "last"))
                for head in self.all_heads
            ]
            effects_by_positions[where] = {
                name: torch.stack([drops[name] for drops in drops_by_head], 1).unflatten(1, (-1, 4))
                for name in drops_by_head[0]
            }
        return effects_by_positions

    @cached_property
    def increases(self) -> Tensor:
        """Return the increases of the answer [batch layer head]."""
        return torch.stack(
            [
                reference.increase("heads", int(self.targets[i]))
                for i, reference in enumerate(self.references)
            ]
        )

    def raw_scores(self, row: int, layer: int, *, place: bool = False) -> Tensor:
        """Return a layer's scores [head query key] on a prompt, without mask."""
        seen = self.clean[row]
        if place and not reference_passes._has_alibi(self.hf):
            return reference_passes.raw_scores(self.hf, seen, layer)
        x = seen.resid[layer]
        return reference_passes.raw_scores(
            self.hf,
            reference_passes.rerun_attention(self.hf, self.ids[row], seen, layer, x, place=False),
            layer,
        )


def projected(hf: Any, head: il.Head, v: Tensor) -> Tensor:
    """Return values times W_O [pos d_model], with a later norm's gain but without its scale."""
    norm = reference_hf._WIRING[hf.config.model_type].attn_post_norm
    gain = reference_hf._setting(hf.config, "residual_multiplier", default=1.0)
    if norm is not None:
        gain = (
            gain * reference_hf._Norm(reference_hf._layers(hf)[head.layer].get_submodule(norm)).gain
        )
    return v @ reference_hf.output_weights(hf, head.layer)[head.head] * gain


def without_learned(hf: Any, x: Tensor) -> Tensor:
    """Return residual streams of a whole prompt [pos d_model] without learned positions."""
    learned = reference_passes.learned_positions(hf, len(x))
    return x if learned is None else x - learned


def mixed(hf: Any, scores: Tensor, flat: Tensor, strength: float) -> Tensor:
    """Return scores mixed before their soft cap, where they are not masked."""
    cap = reference_hf._setting(hf.config, "attn_logit_softcapping", default=0.0)
    pair = [cap * torch.atanh(x / cap) if cap else x for x in (scores, flat)]
    new = (1 - strength) * pair[0] + strength * pair[1]
    return torch.where(scores > _MASKED, cap * torch.tanh(new / cap) if cap else new, scores)


@pytest.fixture(scope="module")
def case_of_family(load_tiny, family_folder) -> Callable[..., Both]:
    """Return a function from a family to its case, of the class `Both` or of one derived from
    it.
    """

    @cache
    def get(family: str, kind: type[Both] = Both) -> Both:
        hf = AutoModelForCausalLM.from_pretrained(
            family_folder(family), dtype=torch.float64, **families.EAGER
        )
        return kind(load_tiny(family), hf.eval())

    return get


# Tokens


@checks("tokenize", "Text", "PromptBatch.from_tokens")
def tokens_are_the_words(c: Both) -> None:
    expected = []
    for prompt in c.prompts:
        expected.append([families.WORDS.index(word) for word in sweep.words(prompt)])
    texts = [" ".join(sweep.words(prompt)) for prompt in c.prompts]
    assert [ids.tolist() for ids in c.ids] == expected
    for batch in (
        il.tokenize(c.model, c.prompts, prepend_bos=False),
        il.tokenize(c.model, list(map(il.Text, texts)), prepend_bos=False),
        il.PromptBatch.from_tokens(expected, model=c.model),
    ):
        assert [ids.tolist() for ids in trimmed(batch)] == expected


@checks("load_task")
def words_of_a_task_have_one_length(c: Both) -> None:
    tokens = CALLS["load_task"].function(c)
    assert tokens.shape == (3, 14)
    assert set(tokens[:, 2::3].flatten().tolist()) <= {FOO, BAR, families.WORDS.index(":")}


# Activations and attention


@checks("capture", "Activations.from_cache", "Activations.load")
def captured(c: Both) -> None:
    """Recorded, from a cache, and from a file."""
    for acts in (il.capture(c.model, c.batch), sweep._cached(c), sweep._loaded(c)):
        assert_recorded(c, acts)


def assert_recorded(c: Both, acts: il.Activations) -> None:
    """Assert that activations are what hooks see."""
    for row, (seen, theirs) in enumerate(zip(c.clean, c.references, strict=True)):
        last = len(c.ids[row]) - 1
        for layer, x in seen.resid.items():
            assert_close(acts.resid_pre[row, layer], x[last], scale=float(x.abs().max()))
        for layer, pattern in seen.pattern.items():
            assert_close(acts.pattern[row, layer, :, : last + 1], pattern[:, last])
            assert not acts.pattern[row, layer, :, last + 1 :].any()
            z = acts.z[row, layer]
            assert_close(z, seen.z[layer][last].reshape(z.shape))
        scale = float(theirs.final.abs().max())
        assert_close(acts.attn_out[row], theirs.attn_out, scale=scale)
        assert_close(acts.mlp_out[row], theirs.ffn_out, scale=scale)
        assert_close(acts.resid_final[row], theirs.final, scale=scale)
        assert_close(acts.label_log_probs[row], seen.log_probs[[FOO, BAR]])
        for layer, x in seen.resid.items():
            at_labels = x[c.labels(row)]
            assert_close(acts.label_resid_pre[row, layer, : len(at_labels)], at_labels, scale=scale)


@checks("whole_label_log_probs")
def log_probabilities(c: Both) -> None:
    with torch.no_grad():
        logits = torch.stack([c.hf(ids[None]).logits[0, -1] for ids in c.ids])
    theirs = torch.log_softmax(logits, dim=-1)
    assert_close(last_log_probs(c.model, c.batch), theirs)
    assert_close(il.score(c.model, c.batch), theirs[:, [FOO, BAR]])
    assert_close(il.whole_label_log_probs(c.model, c.batch), theirs[:, [FOO, BAR]])


@checks(
    "Activations.attention_to_labels",
    "Activations.attention_by_label",
    "html.attention_to_labels",
)
def attention_to_labels(c: Both) -> None:
    ours = c.acts.attention_to_labels()
    theirs = torch.zeros(ours.shape, dtype=torch.float64)
    for row, seen in enumerate(c.clean):
        for layer, pattern in seen.pattern.items():
            theirs[row, layer, :, : len(c.labels(row))] = pattern[:, -1, c.labels(row)]
    assert_close(ours, theirs)
    by_label = c.acts.attention_by_label()
    for row in range(len(c.batch)):
        tokens = c.ids[row][c.labels(row)]
        for column, token in enumerate((FOO, BAR)):
            assert_close(
                by_label[row, ..., column],
                (theirs[row, ..., : len(tokens)] * (tokens == token)).sum(-1),
            )
    head, numbers_on_page = (
        c.reader,
        numbers_of(str(il.html.attention_to_labels(c.acts, [c.reader], row=2))),
    )
    shares = c.clean[2].pattern[head.layer][head.head, -1].tolist()
    for share in shares:
        assert any(abs(share - number) < 1e-3 for number in numbers_on_page)


def numbers_of(page: str) -> list[float]:
    """Return the numbers that a page hands to the drawing of tokens, after the script that draws
    them.
    """
    return [
        float(text) for text in re.findall(r"\d\.\d+(?:e-?\d+)?", page[page.rindex("</style>") :])
    ]


# Projections


@checks("Activations.label_keys")
def label_keys(c: Both) -> None:
    for head in c.heads:
        ours = {source: c.acts.label_keys(head, source=source) for source in ("resid", "attn")}
        for row, seen in enumerate(c.clean):
            places = c.labels(row)
            x = seen.resid[head.layer][places]
            assert_close(ours["resid"][row, : len(places)], x, scale=float(x.abs().max()))
            wrote = torch.zeros_like(x)
            for layer in range(head.layer):
                wrote += (seen.resid[layer + 1] - seen.resid[layer] - c.written(row, f"F{layer}"))[
                    places
                ]
            assert_close(ours["attn"][row, : len(places)], wrote, scale=float(x.abs().max()))


@checks("Activations.label_values", "Activations.own_label_ranks")
def label_values(c: Both) -> None:
    for head in c.heads:
        ours, ranks = c.acts.label_values(head), c.acts.own_label_ranks(head)
        for row, theirs in enumerate(c.references):
            places = c.labels(row)
            values = projected(c.hf, head, c.clean[row].v[head.layer][head.head])[places]
            assert_close(ours[row, : len(places)], values, scale=float(values.abs().max()))
            scores = theirs.readout.logits(values, "frozen", bias=False)
            token_scores = scores[range(len(places)), c.ids[row][places]]
            assert (
                ranks[row, : len(places)].tolist()
                == ((scores > token_scores[:, None]).sum(-1) + 1).tolist()
            )
            assert not ours[row, len(places) :].any()


@checks("Activations.last_query")
def last_query(c: Both) -> None:
    """Its products with keys' normed inputs are the scores without rotation, up to b_K and each
    key's own scale.
    """
    for head in c.heads:
        ours = c.acts.last_query(head)
        for row, seen in enumerate(c.clean):
            flat = reference_passes.rerun_attention(
                c.hf, c.ids[row], seen, head.layer, seen.resid[head.layer], place=False
            )
            products = (flat.q[head.layer] @ flat.k[head.layer].transpose(-1, -2))[head.head, -1]
            turned = [
                m.attention_scaling for m in c.hf.modules() if hasattr(m, "attention_scaling")
            ]
            products = (
                products / (turned[0] if turned else 1.0) ** 2
            )  # YaRN's factor is part of the rotation
            if c.hf.config.model_type == "opt":  # its queries are scaled before the product
                products = products / reference_passes.attention_of(c.hf, head.layer).scaling
            scales = flat.norm_scales[head.layer]
            attention = reference_passes.attention_of(c.hf, head.layer)
            if hasattr(attention, "k_norm") or hasattr(attention, "key_layernorm"):
                of_keys = scales[-1].squeeze(0).squeeze(-1)  # [pos], [pos group] or [group pos]
                of_keys = of_keys[:, None] if of_keys.ndim == 1 else of_keys
                of_keys = of_keys if len(of_keys) == len(products) else of_keys.T
                products = products / of_keys[:, head.head * of_keys.shape[1] // families.N_HEADS]
            ours_in_products = flat.attention_input[head.layer] @ ours[row].double()
            size = float(ours_in_products.abs().max())
            assert_close(
                (ours_in_products - ours_in_products.mean()).float(),
                products - products.mean(),
                scale=size,
            )


@checks("head_copying")
def head_copying(c: Both) -> None:
    head, tokens = c.heads[1], [families.WORDS.index(word) for word in ("foo", "bar", "love")]
    x = torch.cat(
        [
            without_learned(c.hf, reference_passes.run(c.hf, torch.tensor([token])).resid[0])
            for token in tokens
        ]
    )
    ids = torch.tensor(tokens)
    seen = reference_passes.run(c.hf, ids, replacing("resid", head.layer, x))
    constant = against_hf.constant_values(c.hf, head.layer, unfolded=True)[head.head]
    written = projected(c.hf, head, seen.v[head.layer][head.head] - constant)
    readout = c.references[0].readout
    expected = (
        readout.norm.center(written) * readout.norm.gain @ readout.W_U[:, tokens]
    ) * readout.multiplier
    ours = il.head_copying(c.model, head, tokens).logits
    assert_close(ours, expected, scale=float(expected.abs().max()))


# Increases


@checks("neuron_log_prob_increase")
def neurons(c: Both) -> None:
    for layer in range(families.N_LAYERS):
        ours = il.neuron_log_prob_increase(c.acts, layer, c.targets)
        for row, theirs in enumerate(c.references):
            assert_close(ours[row], theirs.increase("neurons", int(c.targets[row]))[layer])


@checks("layer_log_prob_increase", "head_log_prob_increase", "subhead_log_prob_increase")
def increases(c: Both) -> None:
    """In all conventions, against no, one and several tokens."""
    against_hf.check_increases(c.acts, c.batch, c.hf, against=(None, c.against, SEVERAL[[0, 2, 1]]))


@checks("top_heads", "locate")
def best_heads(c: Both) -> None:
    mean = c.increases.mean(0).flatten()
    best = mean.topk(5)
    located = il.locate(c.model, c.batch, k=5, by="increase")
    assert_close(located.score.mean.flatten().float(), mean)
    top = il.top_heads(c.acts, k=5, by="increase")
    assert_close(top.value, best.values)
    for heads in (top.heads, located.heads):
        assert_close(
            mean[[head.layer * families.N_HEADS + head.head for head in heads]], best.values
        )


@checks("top_subheads")
def best_subheads(c: Both) -> None:
    top = il.top_subheads(c.acts, k=4, by="increase")
    table = top.to_frame()
    for row, theirs in enumerate(c.references):
        parts = theirs.increase("subheads", int(c.targets[row]))
        assert_close(top.value[row], parts.flatten().topk(4).values)
        assert_close(parts[top.layer[row], top.head[row], top.position[row]], top.value[row])
        mine = table[table["prompt"] == row]
        assert_close(torch.tensor(mine["value"].to_numpy()), parts.flatten().topk(4).values)
        assert mine["token"].tolist() == [families.WORDS[c.ids[row][i]] for i in mine["position"]]


# Scores


@checks("query_key_metric")
def metric(c: Both) -> None:
    """Between all pairs of a prompt's residual streams: unrotated, and the last query with keys at
    their distance.
    """
    for head in c.heads:
        unrotated = il.query_key_metric(c.model, head)
        for row, seen in enumerate(c.clean[:2]):
            x = seen.resid[head.layer].float()
            flat = c.raw_scores(row, head.layer)[head.head]
            size = float(flat.abs().max())
            assert_close(unrotated.scores(x, x), flat, scale=size)
            placed = c.raw_scores(row, head.layer, place=True)[head.head, -1]
            if (placed - flat[-1]).abs().max() < 1e-6 * size:  # nothing is rotated
                continue
            last = len(x) - 1
            if (
                c.hf.config.model_type == "hunyuan_v1_dense"
            ):  # its norms come after rotation, so no distance suffices
                with pytest.raises(il.InputError, match="distance must be None"):
                    il.query_key_metric(c.model, head, distance=last)
                continue
            for key in range(row, last + 1, 4):
                metric = il.query_key_metric(c.model, head, distance=last - key)
                assert_close(metric.scores(x[last:], x[[key]])[0, 0], placed[key], scale=size)


@checks("label_similarity")
def label_similarity(c: Both) -> None:
    ours = il.label_similarity(c.model, c.batch, c.heads)
    for number, head in enumerate(c.heads):
        for row in range(len(c.batch)):
            flat, places = c.raw_scores(row, head.layer)[head.head], c.labels(row)
            queries = [place - 1 for place in places]
            size = float(flat.abs().max())
            n = len(places)
            assert_close(ours[row, number, :n, :n], flat[queries][:, places], scale=size)
            assert_close(ours[row, number, -1, :n], flat[-1, places], scale=size)


@checks("attention_score_parts")
def score_parts(c: Both) -> None:
    """Each writer's part is what a pass with frozen norms lacks when its writing is taken out of
    the query or a key.

    Attention without it, norms frozen or recomputed, is that of the pass.
    """
    head = c.reader
    layer = head.layer
    parts = il.attention_score_parts(c.acts, head)
    size = float(parts.query_parts.norm(dim=-1).amax() * parts.key_parts.norm(dim=-1).amax())
    for row, seen in enumerate(c.clean[:2]):
        places = c.labels(row)
        n = len(places)
        clean = c.raw_scores(row, layer, place=True)[head.head, -1, places]
        changes: dict[str, tuple[Tensor, Tensor]] = {}
        assert_close(parts.scores[row, :n], clean, scale=size)
        assert_close(parts.query_side[row, :n].sum(-1), parts.scores[row, :n], scale=size)
        assert_close(parts.key_side[row, :n].sum(-1), parts.scores[row, :n], scale=size)
        assert_close(parts.pattern[row, : len(c.ids[row])], seen.pattern[layer][head.head, -1])
        for writer in c.writers:
            number = parts.writers.index(writer)
            x = seen.resid[layer] - c.written(row, writer)
            rerun = partial(
                reference_passes.rerun_attention, c.hf, c.ids[row], seen, layer, x, place=True
            )
            passes = {"frozen": rerun(freeze_norms=True), "recomputed": rerun()}
            without = passes["frozen"]
            factor = score_factor(c, seen, layer)
            q, k = seen.q[layer][head.head, -1], seen.k[layer][head.head, places]
            q_less, k_less = without.q[layer][head.head, -1], without.k[layer][head.head, places]
            assert_close(parts.query_side[row, :n, number], factor * (k @ (q - q_less)), scale=size)
            assert_close(parts.key_side[row, :n, number], factor * ((k - k_less) @ q), scale=size)
            changes[writer] = q - q_less, k - k_less
            key = places[-1]
            alone = il.attention_score_parts(c.acts[[row]], head, keys=[[key]])
            for (norm, without), side in product(passes.items(), ("query", "key")):
                part, at = ("q", -1) if side == "query" else ("k", key)
                value = getattr(without, part)[layer][head.head, at]
                edit = writing("q" if side == "query" else "last k", layer, (head.head, at), value)
                hooked = reference_passes.run(c.hf, c.ids[row], edit).pattern[layer][head.head, -1]
                without_writer = alone.pattern_without(side, norm=norm)[0, number]
                assert_close(
                    without_writer[: len(hooked)],
                    hooked,
                    scale=8.0,
                    msg=f"{writer}, {side}, {norm}",
                )
        for query_writer, key_writer in product(changes, repeat=2):
            numbers = parts.writers.index(query_writer), parts.writers.index(key_writer)
            pairs = parts.key_parts[row, :n, numbers[1]] @ parts.query_parts[row, numbers[0]]
            assert_close(
                pairs,
                factor * (changes[key_writer][1] @ changes[query_writer][0]),
                scale=size,
                msg=f"{query_writer}, {key_writer}",
            )


def score_factor(c: Both, seen: Pass, layer: int) -> float:
    """Return the factor of q · k, from a pass without bias by distance."""
    if reference_passes._has_alibi(c.hf):
        seen = reference_passes.rerun_attention(
            c.hf, c.ids[0], c.clean[0], layer, c.clean[0].resid[layer], place=False
        )
    products = seen.q[layer] @ seen.k[layer].transpose(-1, -2)
    return float((reference_passes.raw_scores(c.hf, seen, layer) / products)[0, -1, -1])


@checks("value_parts")
def value_parts(c: Both) -> None:
    """Each writer's part is what the subhead's contrast loses with its writing, norms frozen."""
    head = c.reader
    layer = head.layer
    parts = il.value_parts(c.acts, head, c.targets, against=c.against)
    size = float(parts.parts.abs().max())
    for row, (seen, theirs) in enumerate(zip(c.clean, c.references, strict=True)):
        places = c.labels(row)
        contrasts = theirs.increase("subheads", int(c.targets[row]), c.rivals(row))[
            layer, head.head, places
        ]
        assert_close(parts.value[row, : len(places)], contrasts, scale=size)
        for writer in c.writers:
            x = seen.resid[layer] - c.written(row, writer)
            without = reference_passes.rerun_attention(
                c.hf, c.ids[row], seen, layer, x, place=True, freeze_norms=True
            )
            change = without.v[layer][head.head] - seen.v[layer][head.head]
            W_O = reference_hf.output_weights(c.hf, layer)[head.head]
            whole = theirs.subhead_outputs[layer, head.head]
            raw = seen.pattern[layer][head.head, -1, :, None] * (seen.v[layer][head.head] @ W_O)
            factor = (whole * raw).sum(0) / (raw * raw).sum(
                0
            )  # from the projection to the residual stream
            less = whole + seen.pattern[layer][head.head, -1, :, None] * (change @ W_O) * factor
            scores = [
                theirs.readout.score(
                    theirs.x[layer] + u[places], int(c.targets[row]), c.rivals(row), "frozen", True
                )
                for u in (whole, less)
            ]
            number = parts.writers.index(writer)
            assert_close(parts.parts[row, : len(places), number], scores[0] - scores[1], scale=size)


@checks("mean_score_parts")
def mean_score_parts(c: Both) -> None:
    """The totals, from Hugging Face's scores and contrasts; parts are those of each prompt, checked
    above.
    """
    head, layer = c.reader, c.reader.layer
    mean_parts = il.mean_score_parts(c.model, c.batch, [head])
    scores, values = [], {"true": [], "false": []}
    for row, theirs in enumerate(c.references):
        places = torch.tensor(c.labels(row))
        is_true = c.ids[row][places] == c.targets[row]
        label_scores = c.raw_scores(row, layer, place=True)[head.head, -1, places]
        scores.append(label_scores[is_true].mean() - label_scores[~is_true].mean())
        contrasts = theirs.increase("subheads", int(c.targets[row]), c.rivals(row))[
            layer, head.head, places
        ]
        values["true"].append(contrasts[is_true].sum())
        values["false"].append(contrasts[~is_true].sum())
    frame = mean_parts.to_frame("writers")
    size = float(frame["value"].abs().max())
    assert_close(mean_parts.total(head)[0], torch.stack(scores).mean(), scale=size)
    capped = reference_hf._setting(c.hf.config, "final_logit_softcapping") is not None
    for kind in () if capped else ("true", "false"):
        assert_close(
            mean_parts.total(head, f"value of {kind} labels")[0],
            torch.stack(values[kind]).mean(),
            scale=size,
        )
    parts = il.attention_score_parts(c.acts, head)
    contrasts_by_prompt = parts.contrast(parts.of_label(c.batch.answer))
    for side in ("query", "key"):
        ours = frame[frame["side"] == side].set_index("writer")["value"]
        mean = getattr(contrasts_by_prompt, f"{side}_side").mean(0)
        assert_close(torch.tensor(ours[list(parts.writers)].to_numpy()), mean, scale=size)


@checks("repeated_token_scores")
def induction(c: Both) -> None:
    n, n_tokens = sweep.DRAWN["n"], sweep.DRAWN["n_tokens"]
    special = set(c.model.tokenizer.all_special_ids)
    usable = [token for token in range(families.VOCAB_SIZE) if token not in special]
    rng = random.Random(0)
    sums = torch.zeros(3, families.N_LAYERS, families.N_HEADS, dtype=torch.float64)
    for _ in range(n):
        tokens = rng.sample(usable, n_tokens)
        seen = reference_passes.run(c.hf, torch.tensor([*tokens, *tokens]))
        for layer, pattern in seen.pattern.items():
            for query in range(n_tokens, 2 * n_tokens):
                sums[0, layer] += pattern[:, query, query - n_tokens + 1] / (n * n_tokens)
                sums[1, layer] += pattern[:, query, query - 1] / (n * n_tokens)
                sums[2, layer] += pattern[:, query, query - n_tokens] / (n * n_tokens)
    token_scores = il.repeated_token_scores(c.model, **sweep.DRAWN)
    assert_close(token_scores.induction, sums[0])
    assert_close(token_scores.previous_token, sums[1])
    assert_close(token_scores.duplicate_token, sums[2])


# Whole analyses


@checks("explain")
def explained(c: Both) -> None:
    row = 0
    explanation = il.explain(
        c.model,
        c.prompts[row],
        k=4,
        n_random=1,
        n_ablated=2,
        prepend_bos=False,
        labels=("foo", "bar"),
    )
    theirs, seen = c.references[row], c.clean[row]
    assert_close(torch.tensor(explanation.scores.log_probs), seen.log_probs[[FOO, BAR]])
    assert_close(torch.tensor(explanation.all_heads.increase), c.increases[row])
    contrasts = theirs.increase("heads", int(c.targets[row]), c.rivals(row))
    assert_close(torch.tensor(explanation.all_heads.contrast), contrasts)
    for report in explanation.heads:
        layer, head = report.head
        assert_close(torch.tensor(report.attention), seen.pattern[layer][head, -1])
        parts = theirs.increase("subheads", int(c.targets[row]))[layer, head]
        assert_close(torch.tensor(report.position_increases), parts)
        without = reference_passes.run(
            c.hf, c.ids[row], c.removed([report.head], last=True)
        ).log_probs[[FOO, BAR]]
        assert_close(torch.tensor(report.ablated), without)
        flat, places = c.raw_scores(row, layer)[head], c.labels(row)
        if report.similarity:
            expected = flat[[*(place - 1 for place in places), -1]][:, places]
            assert_close(torch.tensor(report.similarity), expected, scale=float(flat.abs().max()))
    assert explanation.ablation is not None
    without = reference_passes.run(
        c.hf, c.ids[row], c.removed(explanation.ablation.heads, last=True)
    ).log_probs[[FOO, BAR]]
    assert_close(torch.tensor(explanation.ablation.located), without)


@checks("compare_models")
def compared(c: Both) -> None:
    comparison = il.compare_models(c.model, c.model, c.prompts, by="effect", prepend_bos=False)
    for by, theirs in (("increase", c.increases), ("effect", c.effects["last"]["log_odds"])):
        for row_of_head in comparison.to_frame(by).itertuples():
            assert_close(row_of_head.a, theirs.mean(0)[row_of_head.layer, row_of_head.head])
            assert_close(row_of_head.b, theirs.mean(0)[row_of_head.layer, row_of_head.head])
            assert row_of_head.change == 0
    scored = c.scored(c.clean_log_probs)
    summary = comparison.summary()["a"].to_numpy()
    expected = [
        (scored["log_odds"] > 0).double().mean(),
        scored["log_prob"].mean(),
        scored["log_odds"].mean(),
    ]
    assert_close(torch.tensor(summary.astype(float)), torch.stack(expected))


@checks("task_check")
def checked(c: Both) -> None:
    """With one demonstration of each label, two arrangements leave nothing to chance."""
    nouns, queries = ("cat", "dog", "love", "hate"), ("one", "two", "three", "nine", "eight")
    pairs = [(noun, query) for noun in nouns for query in queries]
    parse = il.Prompt.parse
    prompts = [
        parse(f"{a} : foo red : bar {q} :", answer=("foo", "bar")[i % 2])
        for i, (a, q) in enumerate(pairs)
    ]
    check = il.task_check(c.model, prompts, prepend_bos=False)
    for layout in ("last", "other"):
        correct = []
        for exchanged in (False, True):
            for prompt in prompts:
                labels = ("bar", "foo") if exchanged else ("foo", "bar")
                answer = labels[prompt.answer == "bar"]
                rearranged = [
                    il.Demonstration(demonstration.text, labels[demonstration.label == "bar"])
                    for demonstration in prompt.demonstrations
                ]
                rearranged.sort(
                    key=lambda demonstration: (demonstration.label == answer) == (layout == "last")
                )
                ids = [
                    families.WORDS.index(word)
                    for word in sweep.words(il.Prompt(rearranged, prompt.query))
                ]
                with torch.no_grad():
                    logits = c.hf(torch.tensor([ids])).logits[0, -1]
                correct.append(("foo" if logits[FOO] > logits[BAR] else "bar") == answer)
        assert check.accuracy[layout].value == pytest.approx(sum(correct) / len(correct))


# Removal


@checks("ablate_heads")
def ablation(c: Both) -> None:
    for last in (False, True):
        where = "last" if last else "all"
        edit = il.ablate_heads(c.model, c.heads, positions=where)
        c.same(edit, lambda row, last=last: c.removed(c.heads, last=last))
        mean = c.mean_z(last=last)
        edit = il.ablate_heads(c.model, c.heads, mode="mean", reference=c.other, positions=where)
        c.same(edit, lambda row, last=last, mean=mean: c.removed(c.heads, last=last, value=mean))


@checks("Ablate")
def ablated_sets(c: Both) -> None:
    sets = [[], c.heads[:1], c.heads]
    for last, mode in product((False, True), ("zero", "mean")):
        options = {"positions": "last" if last else "all"}
        options |= {} if mode == "zero" else {"mode": mode, "reference": c.other}
        value = 0.0 if mode == "zero" else c.mean_z(last=last)
        ours = il.score(c.model, c.batch, [[il.Ablate(heads, **options)] for heads in sets])
        for number, heads in enumerate(sets):
            theirs = c.log_probs(
                lambda row, h=heads, last=last, value=value: c.removed(h, last=last, value=value)
            )
            assert_close(ours[:, number], theirs[:, [FOO, BAR]])
        strengths, rows = [0.25, 0.5, 0.75], -1 if last else slice(None)
        scale = in_turn(
            *(
                writing(
                    "z",
                    head.layer,
                    (rows, head.head),
                    lambda z, remaining_share=1 - strength: remaining_share * z,
                )
                for head, strength in zip(c.heads, strengths, strict=True)
            )
        )
        edit = il.Ablate(c.heads, positions="last" if last else "all", strength=strengths)
        theirs = c.log_probs(lambda row, edit=scale: edit)[:, [FOO, BAR]]
        assert_close(il.score(c.model, c.batch, [[edit]])[:, 0], theirs)
    labels = [sorted({*row.flatten().tolist()} - {-1}) for row in c.batch.all_label_positions]
    for positions, places in (([1, -2], [[1, -2]] * len(labels)), ("labels", labels)):

        def zeroed(row: int, places: list[list[int]] = places) -> Any:
            return in_turn(
                *(writing("z", head.layer, (places[row], head.head), 0.0) for head in c.heads)
            )

        ours = il.score(c.model, c.batch, [[], [il.Ablate(c.heads, positions=positions)]])
        assert_close(ours[:, 1], c.log_probs(zeroed)[:, [FOO, BAR]])


@checks("head_effects", "locate.effect")
def effects(c: Both) -> None:
    layers = sorted(c.clean[0].pattern)
    for where in ("all", "last"):
        effects_by_positions = il.head_effects(c.model, c.batch, positions=where, against=c.against)
        # HunYuan norms keys after their rotation, so whole passes replace attention over recorded
        # keys.
        by_rows = where == "last" and c.hf.config.model_type != "hunyuan_v1_dense"
        assert (
            effects_by_positions.algorithm == "prefix_cache",
            effects_by_positions.exact,
            effects_by_positions.positions,
        ) == (by_rows, True, where)
        mean = il.locate(
            c.model, c.batch, by="effect", positions=where, against=c.against
        ).to_frame()
        for name, theirs in c.effects[where].items():
            assert_close(
                getattr(effects_by_positions, name)[:, layers], theirs, msg=f"{name}, {where}"
            )
        for drops in mean.itertuples():
            place = layers.index(drops.layer), drops.head
            assert_close(drops.score, c.effects[where]["log_odds"].mean(0)[place])
            assert_close(drops.log_prob, c.effects[where]["log_prob"].mean(0)[place])
        estimate = il.head_effects(c.model, c.batch, positions=where, method="gradient").log_prob
        for row, ids in enumerate(c.ids):
            products = times_slopes(c.hf, ids, "z", itemgetter(int(c.targets[row]))).sum(-1)
            theirs = products[:, -1] if where == "last" else products.sum(1)
            assert_close(estimate[row, layers], theirs, scale=float(theirs.abs().max()))


@checks("ablate_with_controls")
def controls(c: Both) -> None:
    ablation_of_heads = il.ablate_with_controls(
        c.model, c.batch, c.heads[:2], n_random=2, positions="all"
    )
    for name, condition in ablation_of_heads.conditions.items():
        ours = ablation_of_heads.per_prompt(name, "log_odds")
        for number, heads in enumerate(condition.sets):
            theirs = c.scored(c.log_probs(lambda row, h=heads: c.removed(h)))["log_odds"]
            assert_close(torch.tensor(ours[number]), theirs)
            assert len(set(heads)) == len(heads) == (0 if name == "no ablation" else 2)


# Attention


@checks("Block")
def blocked(c: Both) -> None:
    def block(row: int, pattern: Tensor) -> Tensor:
        for query in range(len(pattern)):
            sink = 1 - pattern[query].sum()  # what an attention sink gets, and keeps
            sink = sink if sink > 1e-4 else 0.0  # rounding in other models
            pattern[query, c.blocked[row, query, : len(pattern)]] = 0
            pattern[query] /= pattern[query].sum() + sink
        return pattern

    c.same(il.edited(c.model, il.Block(c.heads, c.blocked)), c.patterns(block))


@checks("Reweight")
def scaled(c: Both) -> None:
    for renormalize in (True, False):

        def scale(row: int, pattern: Tensor, renormalize: bool = renormalize) -> Tensor:
            before = pattern[-1].sum()  # less than 1 with an attention sink
            for factor, place in zip(c.weights[row].tolist(), c.labels(row), strict=False):
                pattern[-1, place] *= factor
            if renormalize:
                pattern[-1] *= before / pattern[-1].sum()
            return pattern

        edit = il.edited(
            c.model, il.Reweight(c.heads, c.weights, renormalize=renormalize), batch=c.batch
        )
        c.same(edit, c.patterns(scale))


@checks("demonstration_effects")
def demonstrations(c: Both) -> None:
    losses = il.demonstration_effects(c.model, c.batch, against=c.against)
    n = losses.log_odds.shape[1]
    for i, way in enumerate(("hidden", "keys", "values")):
        for places in (*([place] for place in range(n)), range(n)):
            theirs = c.drops(
                lambda row, places=places, way=way: hidden_demonstrations(c, row, places, way)
            )
            for name in ("log_odds", "log_prob"):
                of_demonstrations, whole = getattr(losses, name), getattr(losses, f"whole_{name}")
                ours = whole[:, i] if len(places) > 1 else of_demonstrations[:, places[0], i]
                exists = ~ours.isnan()
                assert exists.tolist() == [
                    min(places) < len(c.labels(row)) for row in range(len(ours))
                ]
                assert_close(ours[exists], theirs[name][exists], msg=f"{way}, {places}")


def hidden_demonstrations(c: Both, row: int, places: Sequence[int], way: str) -> Edit:
    """Return the edit that hides demonstrations from the last query.

    "hidden" masks their scores; "values" omits their values; "keys" gives their share of attention
    to the other tokens, and keeps their values at their weights.
    """
    keys: list[int] = []
    for number, key_range in enumerate(c.demonstrations(row)):
        if number in places:
            keys += key_range
    masked: dict[int, Tensor] = {}  # of each layer, scores of the last query without these keys

    def edit(what: str, layer: int, x: Tensor) -> Tensor | None:
        if what == "scores":
            without = x.clone()
            without[:, -1, keys] = -torch.inf
            masked[layer] = without[:, -1]
            return without if way == "hidden" else None
        if what != "pattern" or way == "hidden":
            return None
        x = x.clone()
        if way == "values":
            x[:, -1, keys] = 0
            return x
        sinks = getattr(attention_of(c.hf, layer), "sinks", None)
        sinks = torch.full((len(x), 1), -torch.inf) if sinks is None else sinks[:, None]
        intact = x[:, -1, keys]
        with_sinks = torch.softmax(torch.cat([masked[layer], sinks], dim=1), dim=1)
        x[:, -1] = with_sinks[:, :-1].to(x)
        x[:, -1, keys] = intact
        return x

    return edit


@checks("RemovePosition")
def position_removed(c: Both) -> None:
    for strength, last in ((1.0, False), (0.6, True)):
        edit = il.edited(
            c.model,
            il.RemovePosition(c.heads, strength=strength, positions="last" if last else "all"),
        )
        c.same(edit, lambda row, s=strength, last=last: c.without_position(row, s, last=last))


def debiased(c: Both, row: int) -> Edit:
    """Return the edit that divides attention to each label by its frequency, after mixing
    scores.
    """
    tokens = c.ids[row][c.labels(row)]
    frequency = torch.stack([(tokens == token).sum() for token in tokens]).double()
    factors = (len(tokens) / len(tokens.unique()) / frequency) ** STRENGTHS["majority"]

    def scale(row: int, pattern: Tensor) -> Tensor:
        before = pattern[-1].sum()  # less than 1 with an attention sink
        pattern[-1, c.labels(row)] *= factors
        pattern[-1] *= before / pattern[-1].sum()
        return pattern

    return c.without_position(row, STRENGTHS["recency"], last=True, then=c.patterns(scale)(row))


@checks("debias_edits")
def debias(c: Both) -> None:
    edits = [debiased(c, row) for row in range(len(c.batch))]
    block = il.edited(c.model, *il.debias_edits(c.batch, c.heads, **STRENGTHS), batch=c.batch)
    theirs = c.same(block, edits.__getitem__)
    ours = il.score(c.model, c.batch, [[], il.debias_edits(c.batch, c.heads, **STRENGTHS)])
    assert_close(ours[:, 0], c.clean_log_probs[:, [FOO, BAR]])
    assert_close(ours[:, 1], theirs[:, [FOO, BAR]])


@checks("edited", "score")
def scored(c: Both) -> None:
    """Sets of edits score what they score in their blocks, which the checks of each edit compare
    with Hugging Face.
    """
    scores = il.score(c.model, c.batch, c.sets_of_edits)
    for number, edits in enumerate(c.sets_of_edits):
        with il.edited(c.model, *edits, batch=c.batch):
            assert_close(scores[:, number], il.score(c.model, c.batch))


@checks("patch_heads", "Patch")
def patched(c: Both) -> None:
    for name, options in sweep._patches(c):
        source, edits = (
            c.source(**options),
            [patch_edit(c, row, **options) for row in range(len(c.batch))],
        )
        aligned = {"batch": c.batch} if options.get("align") == "labels" else {}
        theirs = c.same(
            il.patch_heads(c.model, c.heads, source, **options, **aligned), edits.__getitem__
        )
        ours = il.score(c.model, c.batch, [[il.Patch(c.heads, source, **options)]])
        assert_close(ours[:, 0], theirs[:, [FOO, BAR]], msg=name)


def patched_places(c: Both, row: int, activation: str, positions: str, align: str) -> list[int]:
    """Return the positions of a prompt at which a source's activations are written."""
    labels, last = c.labels(row), len(c.ids[row]) - 1
    if positions == "last" and activation not in ("k", "v"):
        return [last]
    if align != "labels":
        return list(range(last + 1))
    return labels if positions == "last" else [*labels, last]


def patch_edit(
    c: Both, row: int, activation: str, positions: str = "all", align: str = "positions"
) -> Edit:
    """Return the edit that writes a source prompt's activations into the chosen heads.

    In a longer source, places come one token later. Queries, keys and values from there are those
    of the source's layer inputs, put in our places.
    """
    is_longer = c.source(activation=activation, positions=positions, align=align) is c.stretched
    source, clean = (c.stretched_passes if is_longer else c.others_passes)[row], c.clean[row]
    only_last_query = positions == "last" and activation in ("k", "v")
    places = patched_places(c, row, activation, positions, align)
    theirs = [place + is_longer for place in places]
    edits = []
    for layer, heads_of_layer in by_layer(c.heads).items():
        there, at = source, theirs
        if is_longer and activation != "z":
            x = clean.resid[layer].clone()
            x[places] = source.resid[layer][theirs]
            there = reference_passes.rerun_attention(c.hf, c.ids[row], clean, layer, x, place=True)
            at = places
        what = f"last {activation}" if only_last_query else activation
        for head in heads_of_layer:
            to, source_index = (head, places), (head, at)
            if activation == "z":
                to, source_index = (places, head), (at, head)
            edits.append(writing(what, layer, to, getattr(there, activation)[layer][source_index]))
        if only_last_query:  # other positions keep the z of the unedited pass
            unedited = clean.z[layer][:-1, heads_of_layer]
            edits.append(writing("z", layer, (slice(-1), heads_of_layer), unedited))
    return in_turn(*edits)


# Edges


@checks("head_to_head_effects")
def edges(c: Both) -> None:
    moved = 0.0
    for part, at, reader_at in sweep.READINGS:
        head = c.reader if reader_at == "last" else c.heads[1]
        writers = c.writers_to(head, part)
        options = {"writers": writers, "at": at, "reader_at": reader_at, "against": c.against}
        edge_effects = il.head_to_head_effects(c.model, c.batch, [head], part=part, **options)
        for number, writer in enumerate(writers):

            def edit(row: int, s=writer, p=part, at=at, reader_at=reader_at, head=head) -> Edit:
                where = c.places(row, reader_at)
                return c.rebuilt(
                    row, head, {p: at_role(c, row, s, "all" if p == "q" else at)}, where
                )

            for name, values in c.drops(edit).items():
                ours = getattr(edge_effects, name)[:, 0, number]
                assert_close(
                    ours, values, scale=8.0, msg=f"{writer} → {part} ({at}) at {reader_at}, {name}"
                )
                moved = max(moved, 0.0 if reader_at == "last" else float(values.abs().max()))
    assert moved > 1e-3


@checks("head_to_head_effects")
def ffn_edges(c: Both) -> None:
    """An FFN reads the stream without a writer, and what it then writes is put into a pass that is
    clean otherwise.
    """
    layer, moved = c.reader.layer, 0.0
    for role in sweep.FFN_READINGS:
        writers = [*c.writers_to_ffn, *(c.chains_to_ffn(role) if role != "all" else [])]
        options = {"writers": writers, "reader_at": role, "against": c.against}
        effects = il.head_to_head_effects(c.model, c.batch, [c.ffn], part="mlp_in", **options)
        for number, writer in enumerate(writers):

            def edit(row: int, writer: Any = writer, role: str = role) -> Edit:
                return c.ffn_without(row, layer, at_role(c, row, writer, role), c.places(row, role))

            for name, values in c.drops(edit).items():
                ours = getattr(effects, name)[:, 0, number]
                assert_close(ours, values, scale=8.0, msg=f"{writer} → {c.ffn} at {role}, {name}")
                moved = max(moved, float(values.abs().max()))
    assert moved > 1e-3


def at_role(c: Both, row: int, writer: Any, role: str) -> Tensor:
    """Return what a writer writes at the tokens of a role, zero elsewhere."""
    is_at_role = torch.zeros(len(c.ids[row]), 1)
    is_at_role[c.places(row, role)] = 1.0
    return c.written(row, writer) * is_at_role


@checks("WithoutEdges")
def without_edges(c: Both) -> None:
    ours = il.score(c.model, c.batch, [[il.WithoutEdges(edges)] for edges in c.edge_sets])
    for number, edges in enumerate(c.edge_sets):

        def edit(row: int, edges: list[il.Edge] = edges) -> Edit:
            changed: dict[tuple[Any, str], dict[str, Tensor]] = {}
            for edge in edges:
                of_reader = changed.setdefault((edge.reader, edge.reader_at), {})
                of_reader[edge.part] = of_reader.get(edge.part, 0) + at_role(
                    c, row, edge.writer, edge.role
                )
            edits_of_readers = []
            for (reader, at), parts in changed.items():
                places = c.places(row, at)
                if "mlp_in" in parts:
                    layer = int(str(reader)[1:])
                    edits_of_readers.append(c.ffn_without(row, layer, parts["mlp_in"], places))
                else:
                    edits_of_readers.append(c.rebuilt(row, reader, parts, places))
            return in_turn(*edits_of_readers)

        assert_close(ours[:, number], c.log_probs(edit)[:, [FOO, BAR]], scale=8.0)


@checks("locate_circuit")
def circuit(c: Both) -> None:
    """The log-odds with all edges, and the effects of single edges, with means of what writers
    write in each role.
    """
    scored = c.scored(c.clean_log_probs)
    for reader_at, head in (("last", c.reader), ("label", c.heads[1])):
        located = il.locate_circuit(
            *(c.model, c.batch, c.batch, [head, f"F{head.layer}"]),
            reader_at=reader_at,
            n_edges=6,
            n_random=3,
        )
        assert_close(located.score("all")[0], scored["log_odds"].mean())
        for edge_of_table in located.to_frame("edges").itertuples():

            def edit(row: int, edge: Any = edge_of_table, head=head, reader_at=reader_at) -> Edit:
                parts = [at_role(c, i, edge.writer, edge.role) for i in range(len(c.batch))]
                masks = [part.abs().sum(-1) > 0 for part in parts]
                mean = torch.cat(
                    [part[mask] for part, mask in zip(parts, masks, strict=True)]
                ).mean(0)
                changed = parts[row] - mean * masks[row][:, None]
                places = c.places(row, reader_at)
                if edge.part == "mlp_in":
                    return c.ffn_without(row, head.layer, changed, places)
                return c.rebuilt(row, head, {edge.part: changed}, places)

            assert_close(
                edge_of_table.effect,
                c.drops(edit)["log_odds"].mean(),
                scale=8.0,
                msg=edge_of_table.edge,
            )


@checks("two_towers", "locate.exchange")
def towers(c: Both) -> None:
    """What the last position reads comes from other prompts: its query, and keys and values at
    labels.

    Every exchange in heads together and, on average over the prompts, the single ones in heads one
    by one.
    """
    lost, single = sweep.exchanged(c), sweep.located_towers(c)
    prompts = tower_prompts(c.model, sweep.tokenized(c.model, sweep.ONE_WORD))
    clean = cache(lambda ids: reference_passes.run(c.hf, torch.tensor(ids)))
    drops: dict[tuple[il.Head, str], list[Tensor]] = {}
    for row, ids in enumerate(trimmed(prompts.batch)):
        last, target = len(ids) - 1, int(prompts.batch.answer_tokens[row])

        def donated(
            part: str, name: str, row: int = row, last: int = last
        ) -> list[tuple[int, Pass, int]]:
            """Return (position, pass of a donor, position in it) of everything that is
            exchanged.
            """
            donor = prompts.donor(name)
            passes = [clean(tuple(ids.tolist())) for ids in trimmed(donor.batch)]
            if part == "q":
                return [(last, passes[row], len(passes[row].logits) - 1)]
            places = prompts.batch.label_positions[row].tolist()
            theirs = zip(donor.rows[row].tolist(), donor.positions[row].tolist(), strict=True)
            return [
                (at, passes[donor_row], place)
                for at, (donor_row, place) in zip(places, theirs, strict=True)
                if at >= 0
            ]

        def odds(exchange_of_part: Any = None, heads: Sequence[il.Head] = ()) -> Tensor:
            edits = []
            for part in "qkv":
                name = getattr(exchange_of_part, part, None)
                if name is None:
                    continue
                site = "q" if part == "q" else f"last {part}"
                for (at, donor, place), (layer, heads_of_layer) in product(
                    donated(part, name), by_layer(heads).items()
                ):
                    value = getattr(donor, part)[layer][heads_of_layer, place]
                    edits.append(writing(site, layer, (heads_of_layer, at), value))
            log_probs = reference_passes.run(c.hf, ids, in_turn(*edits)).log_probs  # noqa: B023
            return log_probs[target] - log_probs[FOO + BAR - target]  # noqa: B023

        intact = odds()
        for exchange in EXCHANGES:
            assert_close(
                lost[exchange.name][row],
                intact - odds(exchange, c.heads),
                scale=8.0,
                msg=exchange.name,
            )
        for exchange, head in product(EXCHANGES[:3], c.heads):
            drops.setdefault((head, exchange.name), []).append(intact - odds(exchange, [head]))
    assert float(torch.stack([*map(torch.stack, drops.values())]).abs().max()) > 1e-2
    for (head, name), drops_by_prompt in drops.items():
        assert_close(
            single[name][head],
            torch.stack(drops_by_prompt).mean(),
            scale=8.0,
            msg=f"{head}, {name}",
        )


# Gradients and vectors


@checks("attention_saliency", "saliency_flow")
def saliency(c: Both) -> None:
    ours, flow = il.attention_saliency(c.model, c.batch), il.saliency_flow(c.model, c.batch)
    for row in range(len(c.batch)):
        theirs = saliency_of(c.hf, c.ids[row], [FOO, BAR], int(c.targets[row]))
        n, layers, labels = len(c.ids[row]), sorted(c.clean[row].pattern), c.labels(row)
        assert_close(ours[row, layers, :n, :n], theirs, scale=float(theirs.abs().max()))
        pairs = [(i, j) for i, j in product(range(n), repeat=2) if j < i]
        kinds = {
            "text_to_label": [(i, j) for i, j in pairs if i in labels],
            "label_to_last": [(n - 1, j) for j in labels],
            "other_to_last": [(n - 1, j) for j in range(n - 1) if j not in labels],
        }
        kinds["rest"] = [
            pair for pair in pairs if pair not in kinds["text_to_label"] + kinds["label_to_last"]
        ]
        for name, pairs_of_kind in kinds.items():
            mean = torch.stack([theirs[:, i, j] for i, j in pairs_of_kind]).mean(0)
            assert_close(getattr(flow, name)[row, layers], mean, msg=name)


@checks("function_vector")
def function_vector(c: Both) -> None:
    total = torch.stack(
        [reference.head_outputs[head] for reference in c.references for head in map(tuple, c.heads)]
    ).sum(0)
    ours = il.function_vector(c.model, c.batch, c.heads)
    assert_close(ours, total / len(c.batch), scale=float(total.abs().max()))


@checks("indirect_effects")
def indirect_effects(c: Both) -> None:
    ours = il.indirect_effects(c.model, c.batch, c.other)
    before = c.scored(c.clean_log_probs)["log_prob"].exp()
    mean = c.mean_z(last=True)
    for layer, head in c.heads:
        log_probs = c.log_probs(lambda row, h=(layer, head): c.removed([h], last=True, value=mean))
        assert_close(ours[:, layer, head], c.scored(log_probs)["log_prob"].exp() - before)


@checks("AddVector")
def vector_added(c: Both) -> None:
    for layer in (0, families.N_LAYERS - 1):
        for positions, index in (("last", [-1]), ("all", slice(None)), ([2, -3], [2, -3])):
            for replaced in (False, True):
                added = lambda x, new=replaced: c.vectors[0].to(x) + (0 if new else x)  # noqa: E731
                edit = writing("resid_post", layer, index, added)
                ours = il.AddVector(c.vectors, layer, replace=replaced, positions=positions)
                moves = (positions, layer) != ([2, -3], families.N_LAYERS - 1)
                c.same(
                    il.edited(c.model, ours, batch=c.batch),
                    lambda row, edit=edit: edit,
                    moves=moves,
                )


@checks("AblateSite", "PatchSite")
def sites(c: Both) -> None:
    """Every site at every kind of positions: another prompt's values in one layer and zeros in the
    next or, at all positions, zeros and means over two batches.
    """
    placed = {}
    for role in SITE_ROLES.values():
        placed[role] = [c.places(row, role) for row in range(len(c.ids))]
    values = values_at_sites(c.hf, trimmed(c.stretched))
    references = [c.stretched, c.other]
    reference_values = [*values, *values_at_sites(c.hf, trimmed(c.other))]
    sets, theirs = [], []
    for site, (positions, role) in product(sites_of(c.hf), SITE_ROLES.items()):
        where = reference_site(site)
        if role == "all":
            mean = torch.cat([seen[where, 2] for seen in reference_values]).mean(0)
            edits = [
                il.AblateSite(site, 1),
                il.AblateSite(site, 2, mode="mean", reference=references),
            ]
            edit_of_row = partial(zeroed_then_mean, where, mean)
        else:
            edits = [
                il.PatchSite(site, 1, c.stretched, positions=positions),
                il.AblateSite(site, 2, positions=positions),
            ]
            edit_of_row = partial(patched_then_zeroed, where, placed[role], values)
        sets.append(edits)
        theirs.append(c.log_probs(edit_of_row))
    their_log_probs = torch.stack(theirs, 1)
    moved = (
        (their_log_probs - c.clean_log_probs[:, None])
        .abs()
        .amax((0, 2))
        .unflatten(0, (-1, len(SITE_ROLES)))
    )
    assert (moved[:, :2] > 1e-3).all(), "edits at all positions and at the last"
    ours = il.score(c.model, c.batch, [[], *sets])[:, 1:]
    assert_close(ours, their_log_probs[:, :, [FOO, BAR]])
    for number in (3, 14):
        assert_close(
            c.within(il.edited(c.model, *sets[number], batch=c.batch)), their_log_probs[:, number]
        )


@checks("trace")
def traced(c: Both) -> None:
    """A naive loop over sites, roles and layers, every one a whole pass."""
    ours = il.trace(c.model, c.batch, c.stretched, sites=("resid_pre", "attn_out"), layers=[0, 2])
    values = values_at_sites(c.hf, trimmed(c.stretched))
    intact = c.scored(c.clean_log_probs)["log_odds"]
    for site_number, role_number, layer_number in product(range(2), range(5), range(2)):
        where, layer = reference_site(ours.sites[site_number]), ours.layers[layer_number]

        def exchanged(
            row: int, where: Any = where, layer: int = layer, role: str = ours.roles[role_number]
        ) -> Edit:
            places = c.places(row, SITE_ROLES[role])
            return writing(
                where, layer, places, values[row][where, layer][[place + 1 for place in places]]
            )

        lost = intact - c.scored(c.log_probs(exchanged))["log_odds"]
        assert_close(ours.lost[:, site_number, role_number, layer_number], lost, scale=8.0)


@checks("trace")
def trace_estimated(c: Both) -> None:
    """Slopes of the log-odds along each exchange, from autograd on the plain model; the exact losses
    beside them are those of `traced`.
    """
    sites = sites_of(c.hf)
    options = {"sites": sites, "layers": [1]}
    ours = il.trace(c.model, c.batch, c.stretched, method="gradient", n_checked=1, **options)
    assert_close(ours.exact_lost, il.trace(c.model, c.batch, c.stretched, **options).lost[:1])
    values = values_at_sites(c.hf, trimmed(c.stretched))
    for row, ids in enumerate(c.ids):
        theirs = torch.zeros(len(sites), len(ours.roles))
        for site_number, role_number in product(range(len(sites)), range(len(ours.roles))):
            where, places = (
                reference_site(sites[site_number]),
                c.places(row, SITE_ROLES[ours.roles[role_number]]),
            )
            donated = values[row][where, 1][[place + 1 for place in places]]
            step = torch.zeros((), dtype=donated.dtype, requires_grad=True)

            def moved(x: Tensor, donated: Tensor = donated, step: Tensor = step) -> Tensor:
                return x + step * (donated - x).detach()

            edit = writing(where, 1, places, moved)
            log_probs = reference_passes.run(c.hf, ids, edit, grad=True).log_probs
            (rival,) = c.rivals(row)
            log_odds = log_probs[c.targets[row]] - log_probs[rival]
            if log_odds.requires_grad:
                (slope,) = torch.autograd.grad(log_odds, step)
                theirs[site_number, role_number] = -slope
        assert theirs.abs().max() > 1e-3
        assert_close(ours.lost[row, :, :, 0], theirs, scale=8.0)


def zeroed_then_mean(site: str, mean: Tensor, row: int) -> Edit:
    return in_turn(writing(site, 1, slice(None), 0.0), writing(site, 2, slice(None), mean))


def patched_then_zeroed(
    site: str, placed: list[list[int]], values: list[dict[tuple[str, int], Tensor]], row: int
) -> Edit:
    """Return the edit that writes the values of the stretched prompt, whose tokens are one later."""
    donor = values[row][site, 1][[place + 1 for place in placed[row]]]
    return in_turn(writing(site, 1, placed[row], donor), writing(site, 2, placed[row], 0.0))


def values_at_sites(hf: Any, prompts: Sequence[Tensor]) -> list[dict[tuple[str, int], Tensor]]:
    """Return what each site has at every position of prompts, by site and layer."""
    by_prompt: list[dict[tuple[str, int], Tensor]] = []
    for ids in prompts:
        seen: dict[tuple[str, int], Tensor] = {}

        def record(what: str, layer: int, x: Tensor, seen: Any = seen) -> None:
            seen[what, layer] = x.detach().clone()

        reference_passes.run(hf, ids, record)
        by_prompt.append(seen)
    return by_prompt


SITE_ROLES = {
    "all": "all",
    "last": "last",
    "labels": "label",
    "texts": "text",
    "query": "query",
    "separators": "other",
}
"""Positions of an edit of sites → their role here."""


def reference_site(site: str) -> str:
    return "resid" if site == "resid_pre" else site


def sites_of(hf: Any) -> list[str]:
    """Return the sites that a family has."""
    absent = {"resid_mid"} if reference_hf.is_parallel(hf.config) else set()
    if hf.config.model_type in reference_passes.MIXTURE_TYPES:
        absent |= {"mlp_post"}
    return [site for site in SITES if site not in absent]


@checks("task_vectors", "vector_gains")
def vector_gains(c: Both) -> None:
    """At every layer, the mean of other prompts in place of the residual stream, and added to
    it.
    """
    stream = []
    for ids in trimmed(c.other):
        seen: dict[int, Tensor] = {}
        reference_passes.run(
            c.hf,
            ids,
            lambda what, layer, x, seen=seen: (
                seen.update({layer: x[-1]}) if what == "resid_post" else None
            ),
        )
        stream.append(torch.stack([seen[layer] for layer in range(families.N_LAYERS)]))
    means = torch.stack(stream).mean(0)
    ours = il.task_vectors(c.model, c.other)
    assert_close(ours, means, scale=float(means.abs().max()))
    for replaced in (False, True):
        gains = il.vector_gains(c.model, ours, c.batch, replace=replaced)
        for layer, mean in enumerate(means):
            added = lambda x, mean=mean, new=replaced: mean.to(x) + (0 if new else x)  # noqa: E731
            edit = writing("resid_post", layer, -1, added)
            theirs = c.log_probs(lambda row, edit=edit: edit)
            log_prob = c.scored(theirs)["log_prob"]
            assert_close(gains.log_prob[:, layer], log_prob)
            top = theirs.gather(1, c.targets[:, None])[:, 0] >= theirs.max(1).values
            assert gains.top1[:, layer].tolist() == top.tolist()


@checks("calibrated_scores")
def calibrated(c: Both) -> None:
    """Among two labels, the prior is the mean over two other queries."""

    def p(query: str | None) -> Tensor:
        prompts = (
            c.prompts if query is None else [il.Prompt(x.demonstrations, query) for x in c.prompts]
        )
        batch = il.tokenize(c.model, prompts, prepend_bos=False, labels=("foo", "bar"))
        log_probs = torch.stack(
            [reference_passes.run(c.hf, ids).log_probs for ids in trimmed(batch)]
        )
        return torch.softmax(log_probs[:, [FOO, BAR]], dim=1)

    ratio = p(None) / ((p("one") + p("red")) / 2)
    ours = il.calibrated_scores(c.model, c.batch, inputs=["one", "red"])
    assert_close(ours.exp(), ratio / ratio.sum(1, keepdim=True))


@checks("generate")
def generated(c: Both) -> None:
    continuations = il.generate(c.model, c.batch, [[], [il.Ablate(c.heads)]], max_new_tokens=3)
    for row in range(len(c.batch)):
        for number, edit in enumerate((None, c.removed(c.heads))):
            ids, n, end = c.ids[row], len(c.ids[row]), c.model.tokenizer.eos_token_id
            while len(ids) < n + 3 and (len(ids) == n or int(ids[-1]) != end):
                ids = torch.cat(
                    [ids, reference_passes.run(c.hf, ids, edit).log_probs.argmax()[None]]
                )
            assert list(continuations.tokens[number][row]) == ids[n:].tolist()


# The sweep


def test_no_function_that_takes_a_model_is_forgotten() -> None:
    checked = set().union(*(names for names, _ in CHECKS.values()))
    assert checked == sweep.takes_a_model() | sweep.OTHER_SCORES


IN_TURN = ("gpt2", "gemma2", "llama_gqa", "bloom", "gptj", "qwen3")
"""Biases and positions, soft caps and windows, shared keys, ALiBi, rotation of neighbors, norms of
queries and keys.
"""
READ_NORMS = {"last_query", "label_similarity", "metric", "score_parts"}
"""Checks in which norms of queries and keys matter most."""
LONG = {"circuit", "edges", "patched", "sites", "trace_estimated", "traced", "without_edges"}
"""Checks that take so long that no family is quick."""


def cases() -> Iterator[Any]:
    """Yield every (check, family); quick are one of `IN_TURN`, and increases of each kind."""
    for number, check in enumerate(sorted(CHECKS.keys() - LONG)):
        quick = {"qwen3" if check in READ_NORMS else IN_TURN[number % len(IN_TURN)]}
        quick |= (
            {*families.in_turn(0, families.CONFIGS.keys() - families.SLOW)}
            if check == "increases"
            else set()
        )
        for family in EXACT:
            yield pytest.param(check, family, marks=() if family in quick else pytest.mark.slow)
    yield from (slow(check, family) for check in sorted(LONG) for family in EXACT)


@pytest.mark.parametrize(("check", "family"), list(cases()))
def test_numbers_are_hugging_faces(case_of_family, monkeypatch, family, check) -> None:
    case, (names, compare) = case_of_family(family), CHECKS[check]
    refused = [
        name
        for name in names
        if is_refused(name, family, lambda name=name: CALLS[name].function(case))
    ]
    if refused:
        assert set(refused) == names, (
            "check functions that a family refuses apart from those that it has"
        )
        return
    called: set[str] = set()
    for name in names:
        if "." not in name:
            original = getattr(il, name)
            monkeypatch.setattr(
                il, name, lambda *a, _f=original, _n=name, **k: called.add(_n) or _f(*a, **k)
            )
    compare(case)
    assert called == {name for name in names if "." not in name}, (
        "a check must call what it says that it checks"
    )
