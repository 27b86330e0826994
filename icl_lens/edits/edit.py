"""What an edit is: a value that names heads and writes into their activations, and knows nothing of
passes.

1. `Edit` is the base class. An edit writes queries, keys, values or the pattern in
   `write_attention`, z in `write_z`, or a site of the residual stream in `write_site`, at the
   stages that it names.
2. `Places` and `Attention` are what these methods get: the same in passes over whole prompts, in
   passes that start at a layer, and in rows of one token, so that an edit is written once.
3. `prepare` runs the passes of its own that an edit needs, once for all edits that share them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from operator import itemgetter
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from icl_lens.edits.recomputed_patterns import ScoreInputs
from icl_lens.errors import InputError, check_choice
from icl_lens.models.active_edits import some_of
from icl_lens.models.head import AnyHead, Head, head_tuple
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

Positions = Literal["all", "last"]
Part = Literal["q", "k", "v"]
"""What a head reads: its queries, keys or values."""
PARTS: tuple[Part, ...] = get_args(Part)


class Stage(IntEnum):
    """Stage at which an edit writes.

    Edits of a layer apply in the order in which the model reaches what they write: `resid_pre`
    first, the others in the order of stages. Edits of one stage apply in the order given.
    """

    inputs = 0
    """Queries and keys."""
    scores = 1
    """The position term of attention scores."""
    pattern = 2
    values = 3
    """Values, on which patterns do not depend."""
    z = 4
    removal = 5
    """Ablation, which sets z after all other edits."""
    resid_pre = 6
    """The residual stream before a layer. This and the following stages are sites."""
    attn_out = 7
    """What attention adds to the residual stream."""
    resid_mid = 8
    """The residual stream between attention and FFN."""
    mlp_post = 9
    """The neurons of the FFN, before its output matrix."""
    mlp_out = 10
    """What the FFN adds to the residual stream."""
    resid_post = 11
    """The residual stream after a layer."""


ATTENTION_STAGES = (Stage.inputs, Stage.scores, Stage.pattern, Stage.values)
Z_STAGES = (Stage.z, Stage.removal)
SITE_STAGES = (
    *(Stage.resid_pre, Stage.attn_out, Stage.resid_mid),
    *(Stage.mlp_post, Stage.mlp_out, Stage.resid_post),
)


class Places(NamedTuple):
    """Where an edit writes z or at a site: one entry for every edited head of every row."""

    row: Int[Tensor, " n"]
    """Row of the pass."""
    head: Int[Tensor, " n"]
    """Head of the layer; -1 for a site, which has one entry per row."""
    prompt: Int[Tensor, " n"]
    """Index of the row's prompt in the batch."""
    last: Int[Tensor, " n"]
    """Index of the row's last position."""
    first: Int[Tensor, " n"]
    """Position in the prompt at which the row begins: 0 in whole passes, and in rows of one token,
    whose only position is `last`.
    """

    @classmethod
    def of(
        cls,
        members: Sequence[tuple[int, Sequence[int]]],
        number: Int[Tensor, " row"],
        prompt: Int[Tensor, " row"],
        last: Int[Tensor, " row"],
        first: int = 0,
    ) -> "Places":
        """Return the places of edited heads, given as (number, heads), in the rows that have this
        number.
        """
        pairs = []
        for member_number, member_heads in members:
            pairs += [(member_number, head) for head in member_heads or [-1]]
        numbers, heads = torch.tensor(pairs, device=number.device).T
        row, pair = (number[:, None] == numbers).nonzero(as_tuple=True)
        last = last[row]
        return cls(row, heads[pair], prompt[row], last, torch.full_like(last, first))


@dataclass
class Attention:
    """One layer's attention in one pass, for the edited heads, before z is computed."""

    edited_heads: list[int]
    inputs: ScoreInputs | None
    """Inputs of the attention scores; None if only patterns are edited and the model's own pattern
    was recorded.
    """
    v: Float[Tensor, "row key head d_head"]
    """Values, with key-value groups repeated."""
    weight: Float[Tensor, "row head query"]
    """Factor by which the scores' position term is multiplied; 1 is unedited."""
    last: Int[Tensor, " row"]
    """Index of each row's last query; 0 in rows of one token, whose only query it is."""
    prompt: Int[Tensor, " row"]
    """Index of each row's prompt in the batch."""
    queries: Int[Tensor, "row query"] | None = None
    """Positions of the queries; None if there is one at every position."""
    rescored: set[int] = field(default_factory=set)
    """Heads, by index in `edited_heads`, whose pattern must be recomputed."""
    pattern: Float[Tensor, "row head query key"] | None = None
    """Attention probabilities; None before the pattern stage."""
    has_sink: bool = False
    """Whether heads can attend to nothing, so that a pattern's rows sum to less than 1."""

    def indices_of(self, heads: Sequence[int]) -> list[int]:
        """Return where heads of the layer are on the head axes."""
        return [self.edited_heads.index(head) for head in heads]

    @property
    def last_queries(self) -> tuple[Tensor, Tensor]:
        """Indices of each row and of its last query, to select from [row query …]."""
        return torch.arange(len(self.last), device=self.last.device), self.last


class Edit:
    """Base class of edits: values that name heads, and write into their activations.

    A subclass is a frozen dataclass with a field `heads` that defines `write_z`, or `stages` and
    `write_attention`. With `positions="last"`, it promises to change and read only the last
    position: `score` then re-runs one token per prompt, in which z has no other position. Docs:
    docs/howto/edits.md.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True, eq=False)
        ... class Halve(il.Edit):
        ...     heads: list
        ...     positions: str = "last"
        ...     def write_z(self, z, at, layer):
        ...         z[at.row, at.last, at.head] /= 2
        >>> il.score(model, batch, [[], [Halve(["L2H0"])]]).shape
        torch.Size([1, 2, 2])
    """

    heads: Iterable[AnyHead]

    stages: tuple[Stage, ...] = (Stage.z,)
    """The stages at which the edit writes.

    A subclass names them in a tuple: "inputs" (queries and keys), "scores" (the position term of
    attention scores), "pattern", "values", "z", "removal" (z, after all other edits), or a site, by
    TransformerLens' name: "resid_pre", "resid_mid" or "resid_post" (the residual stream before,
    within and after a layer), "attn_out" or "mlp_out" (what attention or FFN adds to it), and
    "mlp_post" (the FFN's neurons).
    """
    positions: Any = "all"
    """With "last", the edit changes and reads only the last position of each row."""
    description: str = "edited"
    """What is done to the heads, such as "zeroed"; it follows their names."""
    supports_cache: bool = False
    """Whether passes that continue a KV cache are edited like whole passes."""
    needs_batch: bool = False
    """Whether the edit belongs to particular prompts, which every pass must run; tokens may follow
    them.
    """
    at_prompt_end: bool = False
    """Whether "last" is the last token of the prompts also in passes in which generated tokens
    follow them.
    """

    def __init_subclass__(cls) -> None:
        names = vars(cls).get("stages")
        if not isinstance(names, tuple):
            return
        stages = []
        for name in names:
            if isinstance(name, Stage):
                stages.append(name)
            else:
                check_choice("stages", name, tuple(Stage.__members__))
                stages.append(Stage[name])
        cls.stages = tuple(stages)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", head_tuple(self.heads))

    @property
    def write_key(self) -> object:
        """A value that edits of one type have in common if they write the same, except at other
        heads, so that they can write at once; by default, edits have none in common.
        """
        return id(self)

    def changes_only_last(self, batch: PromptBatch) -> bool:
        """Return whether only the last position of the prompts changes, so that one token per
        prompt can run again.
        """
        return self.positions == "last"

    def first_changes(self, batch: PromptBatch) -> Int[Tensor, " prompt"]:
        """Return the first position of each prompt that the edit, without others, changes or reads,
        so that passes may begin there; after the prompt's last for nothing.

        By default, 0: anything may change.
        """
        return torch.zeros(len(batch), dtype=torch.long)

    def by_layer(self, view: ModelView) -> dict[int, list[int]]:
        """Return layer -> edited heads; raise InputError for a head that the model does not
        have.
        """
        return group_by_layer(view, self.heads)

    @classmethod
    def prepare(
        cls, view: ModelView, edits: Sequence["Edit"], batch: PromptBatch | None
    ) -> Sequence["Edit"]:
        """Return the edits with what they need from passes of their own, run once for all; raise
        InputError if invalid.

        `batch` are the prompts that will be run, None in a block without a batch.
        """
        return edits

    def write_attention(self, attention: Attention, heads: list[int], layer: int) -> None:
        """Change `attention` in place for some heads of a layer."""
        raise self._missing("write_attention")

    def write_z(self, z: Float[Tensor, "row pos head d_head"], at: Places, layer: int) -> None:
        """Change z in place."""
        raise self._missing("write_z")

    def write_site(self, x: Float[Tensor, "row pos width"], at: Places, layer: int) -> None:
        """Change what is at a site of a layer in place."""
        raise self._missing("write_site")

    def _missing(self, method: str) -> InputError:
        names = ", ".join(stage.name for stage in self.stages)
        return InputError(
            f"{type(self).__name__} must define {method}, because it writes at the stage {names}"
        )

    write_rows: ClassVar[Callable[..., None] | None] = None
    """If defined, writes z of all rows of one token that the type edits at once, instead of
    `write_attention`; see `one_token_rows`. It is called with z, the members, each a row, its edit
    and the edited heads, the layer, and the layer's `LayerRows`."""


@dataclass(frozen=True, eq=False)
class EditAtLayers:
    """An edit that is ready to write, with its heads by layer, and the prompts that passes must
    run, if any.
    """

    edit: Edit
    heads: Mapping[int, list[int]]
    batch: PromptBatch | None = None
    prompt: Int[Tensor, " row"] | None = None
    """Index of each prompt of `batch` among those for which the edit was prepared; None if these
    are the same.
    """

    @property
    def description(self) -> str:
        """What is done to which heads, such as "L5H0, L4H1 zeroed"."""
        names = []
        for layer, heads in sorted(self.heads.items()):
            names += [str(Head(layer, head)) for head in heads]
        return f"{some_of(names, 'heads')} {self.edit.description}".lstrip()

    def select(self, prompts: Sequence[int]) -> "EditAtLayers":
        """Return the edit for passes that run only some of the prompts."""
        rows = torch.tensor(list(prompts))
        batch = None if self.batch is None else self.batch[rows]
        return replace(
            self, batch=batch, prompt=rows if self.prompt is None else self.prompt.cpu()[rows]
        )


LayerEdits = list[tuple[Stage, EditAtLayers, list[int]]]
"""Edits of a layer, each with the stage and the heads at which it writes, in the order in which
they apply.
"""


def edits_at(edits: Iterable[EditAtLayers], layer: int, stages: Sequence[Stage]) -> LayerEdits:
    """Return what edits of a layer write at some stages, in the order of the stages."""
    layer_edits = []
    for edit in edits:
        if layer not in edit.heads:
            continue
        for stage in edit.edit.stages:
            if stage in stages:
                layer_edits.append((stage, edit, edit.heads[layer]))
    return sorted(layer_edits, key=itemgetter(0))


def writes_at(
    sets: Sequence[Sequence[EditAtLayers]], layer: int, stages: Sequence[Stage]
) -> list[tuple[Edit, list[tuple[int, list[int]]]]]:
    """Return the edits of several sets at some stages of a layer, in the order in which they apply.

    Edits that write alike are joined into one, with the index and the heads of each of its sets.
    """
    writes: dict[tuple[Stage, int, object], tuple[Edit, list[tuple[int, list[int]]]]] = {}
    for number, edits in enumerate(sets):
        for place, (stage, edit, heads) in enumerate(edits_at(edits, layer, stages)):
            key = stage, place, (type(edit.edit), edit.edit.write_key)
            _, members = writes.setdefault(key, (edit.edit, []))
            members.append((number, heads))
    return [writes[key] for key in sorted(writes, key=lambda key: key[:2])]


def group_by_layer(view: ModelView, heads: Iterable[AnyHead]) -> dict[int, list[int]]:
    """Return layer -> its chosen heads, without duplicates; raise InputError for an unknown
    head.
    """
    by_layer: dict[int, list[int]] = {}
    for layer, index in sorted(view.check_heads(heads)):
        by_layer.setdefault(layer, []).append(index)
    return by_layer


def of_prompts(
    x: Shaped[Tensor, "prompt *rest"], prompt: Int[Tensor, " n"]
) -> Shaped[Tensor, "n *rest"]:
    """Return what belongs to each row's prompt; a single prompt's is used for all rows."""
    return x[prompt.to(x.device)] if len(x) > 1 else x.expand(len(prompt), *x.shape[1:])
