"""Trace where prompts hold what answers them: exchange what is at each layer and token role for
what a counterfactual prompt has there (activation patching).

1. Donors are the prompts with one thing exchanged (`prompts.donors`), or prompts of your own.
   Control donors have another text of the same class in its place, so that the answer stays.
   With `reference`, what takes its place is instead the mean over prompts of other tasks.
2. Every exchange is one `PatchSite`, or one `AblateSite` with the mean. A pass begins at the edited
   layer and at the first token that changes; roles that come before the first exchanged token are
   not run: nothing changes there.
3. With `method="gradient"`, exchanges are estimated (`trace_estimates`), and only the first prompts
   are exchanged.
4. `Trace` (in `trace_result`) has the log-odds that the answer loses, by prompt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from icl_lens.analyses.trace_estimates import estimated_losses
from icl_lens.analyses.trace_result import Trace
from icl_lens.edits.ablate import Reference
from icl_lens.edits.edit import Edit, Stage
from icl_lens.edits.reference_prompts import reference_batches, reference_in_words
from icl_lens.edits.score import score_sets
from icl_lens.edits.site_hooks import check_site, site_width
from icl_lens.edits.site_positions import ROLE_NAMES, SitePositions, aligned_places, first_changes
from icl_lens.edits.sites import SITES, AblateSite, PatchSite, Site
from icl_lens.errors import InputError, check_at_least, check_choice, check_integers, short_repr
from icl_lens.measures.effects import Method
from icl_lens.models.active_edits import active_edits
from icl_lens.models.loading.bridge_comparison import reads_only_earlier_tokens
from icl_lens.models.passes.memory import RESTART_BYTES
from icl_lens.models.sizes import rows_at_once
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, prompts_digest
from icl_lens.prompts.donors import donor_prompts, same_class_texts
from icl_lens.prompts.plain_text import Text
from icl_lens.prompts.prompt import DEFAULT_TEMPLATE, Prompt, Template
from icl_lens.prompts.tokenize import tokenize, tokenizer_like
from icl_lens.reading.scored_tokens import AnswerTokens
from icl_lens.runs.run import Run
from icl_lens.runs.stream import plan_in_order, start

Donors = Literal["query", "texts", "labels"]
DONORS: tuple[Donors, ...] = get_args(Donors)
ROLES: tuple[SitePositions, ...] = (*ROLE_NAMES, "last")
N_LAYERS = 15
"""Layers that are exchanged by default, at most."""
N_CHECKED = 8
"""Prompts that are exchanged by default, at most, to check estimates."""
Place = tuple[Site, SitePositions, int]
"""A site, a role, and a layer."""


def trace(
    model: Any,
    prompts: PromptBatch | Sequence[Prompt | Text],
    donors: Donors | PromptBatch | Sequence[Prompt | Text] | None = None,
    *,
    controls: PromptBatch | Sequence[Prompt | Text] | None = None,
    reference: Reference = None,
    sites: Sequence[Site] = ("resid_pre",),
    layers: Sequence[int] | None = None,
    method: Method = "exact",
    n_checked: int = N_CHECKED,
    template: Template = DEFAULT_TEMPLATE,
    prepend_bos: bool | None = None,
    run: Run | None = None,
) -> Trace:
    """Exchange what is at each site, layer and token role for what a donor prompt has there, and
    return the log-odds (nats) that the answer loses.

    `donors` are the prompts with one thing exchanged, so that the partner, another label, becomes
    the answer (`il.donor_prompts`):

    - "query", the default: a query of the other class; the control is another query of the same
      class;
    - "texts": the texts of the two classes exchanged; the control has other texts of the same
      classes;
    - "labels": the two labels exchanged; the control is that of "texts";
    - or prompts of your own, one for each prompt, with `controls` of your own, if any.

    With `reference`, batches of prompts of other tasks, what takes the place is the mean over their
    tokens of the same role. It says where a model holds what other tasks do not have. There is no
    control, and what the donors themselves cost is the cost of such means at all roles of the first
    layer. The mean over prompts of the same pairs keeps their task (`SamePairsWarning`).

    Roles are the demonstrations' "texts" and "labels", "separators" (all other tokens before the
    last), the text of the "query", and the "last" token; tokens of two prompts are paired as in
    `PatchSite`. Plain texts (`il.Text`, with `answer` and `against`) have no roles, and each of
    their positions is exchanged; all must have the same number of tokens.

    `sites` are those of `PatchSite`: "resid_pre", the residual stream before the layer, by default.
    `layers` are all layers or, in models with more than 15, 8 to 15 that are evenly spaced.

    `method="gradient"` estimates all losses from one backward pass a prompt (attribution patching):
    −∇ · (donor − prompt), exact only where the log-odds are linear in what is exchanged. The first
    `n_checked` prompts are exchanged, too, so that the result says how far its estimates are off.

    `template` and `prepend_bos` are those of `il.tokenize`, for prompts that are not tokenized, and
    `run` says how the prompts run (see `Run`).

    Raise InputError for prompts without answers or with nothing to compare them with, donors that
    do not match, sites or layers that the model does not have, and `reference` with donors or
    estimates.

    Example:
        >>> prompts = il.load_task("sentiment-number", n=8)
        >>> traced = il.trace(model, prompts, "query", layers=[1, 4, 7])
        >>> traced.to_frame().columns.tolist()[:5]
        ['site', 'role', 'layer', 'log_odds_lost', 'low']
        >>> traced.roles
        ('texts', 'labels', 'query', 'separators', 'last')
    """
    view = ModelView.of(model)

    def tokenized(listed: Any) -> PromptBatch:
        if isinstance(listed, PromptBatch):
            return listed
        return tokenize(model, listed, template=template, prepend_bos=prepend_bos)

    batch = tokenized(prompts)
    check_choice("method", method, ("exact", "gradient"))
    check_at_least(0, n_checked=n_checked)
    if reference is None:
        listed_donors = "query" if donors is None else donors
        counterparts = _donor_batches(model, batch, listed_donors, controls, tokenized)
    else:
        _check_no_donors(donors, controls, method)
        counterparts = Counterparts("means", {}, tuple(reference_batches(reference)))
    checked_sites = _checked_sites(view, sites)
    checked_layers = _checked_layers(view, layers)
    roles = _roles(batch, counterparts.sources.get("donor", batch))
    places = list(product(checked_sites, roles, checked_layers))
    answers = AnswerTokens.from_batch(view, batch, None, None)
    exchanges = _SiteExchanges(view, batch, counterparts, roles, places, answers, method, n_checked)
    options = {
        "sites": list(checked_sites),
        "layers": list(checked_layers),
        **counterparts.digests,
    }
    if method != "exact":
        options |= {"method": method, "n_checked": n_checked}
    n_recorded = max(1, len(counterparts.sources)) + (method == "gradient")
    plan = plan_in_order(batch, run, n_tokens=_tokens_at_once(view, batch, n_recorded, places))
    with start(run, model, batch, "trace", options, plan=plan) as stream:
        columns = stream.map("exchanges", exchanges.columns)
    shape = len(batch), len(checked_sites), len(roles), len(checked_layers)
    kinds = {"donor", *counterparts.sources}
    lost = {kind: columns[kind].astype(float).reshape(shape) for kind in kinds}
    exact_lost = None
    if method == "gradient":
        exact_lost = columns["exact_lost"][:n_checked].astype(float).reshape(-1, *shape[1:])
    answer_names = [str(prompt.answer) for prompt in batch.prompts]
    return Trace(
        model=view.name,
        donors=counterparts.name,
        sites=checked_sites,
        roles=tuple(_role_name(batch, role) for role in roles),
        layers=checked_layers,
        n_layers=view.n_layers,
        lost=lost["donor"],
        control_lost=lost.get("control"),
        log_odds=columns["log_odds"].astype(float),
        donor_log_odds=columns["donor_log_odds"].astype(float),
        queries=batch.queries,
        answers=tuple(answer_names),
        text=batch.texts[0],
        edits=active_edits(view),
        method=method,
        exact_lost=exact_lost,
        reference=counterparts.reference_in_words(batch),
    )


@dataclass(frozen=True, eq=False)
class Counterparts:
    """What takes the place of what prompts have: that of other prompts, or means."""

    name: str
    sources: Mapping[str, PromptBatch]
    """The "donor" of each prompt and, if there is one, its "control"; {} for means."""
    references: tuple[PromptBatch, ...] = ()
    """The prompts over which means are taken."""

    @property
    def digests(self) -> dict[str, Any]:
        """What a stored run depends on."""
        digests: dict[str, Any] = {}
        digests["donors"] = {kind: prompts_digest(batch) for kind, batch in self.sources.items()}
        if self.references:
            digests["reference"] = [prompts_digest(batch) for batch in self.references]
        return digests

    def reference_in_words(self, batch: PromptBatch) -> str:
        """Return over which prompts means are taken; "" for donors."""
        return reference_in_words(batch, self.references) if self.references else ""


@dataclass(frozen=True, eq=False)
class _SiteExchanges:
    """All exchanges of a trace."""

    view: ModelView
    batch: PromptBatch
    counterparts: Counterparts
    roles: Sequence[SitePositions]
    places: Sequence[Place]
    answers: AnswerTokens
    method: Method
    n_checked: int

    def columns(self, rows: list[int]) -> dict[str, Tensor | list[str]]:
        """Return the log-odds of some prompts, "log_odds", and with everything exchanged,
        "donor_log_odds"; what each exchange costs them, "donor" and "control", and with estimates
        what it costs the first prompts, "exact_lost", [prompt place].
        """
        view, piece, answers = self.view, self.batch[rows], self.answers.select(rows)
        references = self.counterparts.references
        if references:
            return _means(view, piece, references, self.places, self.roles, answers)
        sources = {kind: source[rows] for kind, source in self.counterparts.sources.items()}
        of_donor, _ = score_sets(view, sources["donor"], [[]], answers.log_odds)
        columns: dict[str, Tensor | list[str]] = {"donor_log_odds": of_donor[:, 0, 0]}
        if self.method == "exact":
            return columns | _exact(view, piece, sources, self.places, answers)
        columns |= _estimates(view, piece, sources, self.places, answers)
        checked = [number for number, row in enumerate(rows) if row < self.n_checked]
        exact_lost = torch.full((len(rows), len(self.places)), torch.nan)
        if checked:
            of_checked = {"donor": sources["donor"][checked]}
            checked_answers = answers.select(checked)
            lost = _exact(view, piece[checked], of_checked, self.places, checked_answers)["donor"]
            exact_lost[checked] = lost.to(exact_lost)
        return columns | {"exact_lost": exact_lost}


def _exact(
    view: ModelView,
    batch: PromptBatch,
    sources: Mapping[str, PromptBatch],
    places: Sequence[Place],
    answers: AnswerTokens,
) -> dict[str, Tensor]:
    """Return the log-odds of prompts, "log_odds", and by kind of source what each exchange costs
    them [prompt place].
    """
    exchanges: list[tuple[str, int]] = []  # of each set of edits: the source, and the place
    sets: list[list[Edit]] = [[]]
    for kind, source in sources.items():
        for place in _places_that_change(view, batch, source, places):
            site, role, layer = places[place]
            exchanges.append((kind, place))
            sets.append([PatchSite(site, layer, source, positions=role)])
    scores, _ = score_sets(view, batch, sets, answers.log_odds)
    log_odds = scores[:, :, 0].cpu()
    lost = {kind: torch.zeros(len(batch), len(places)).to(log_odds) for kind in sources}
    for number, (kind, place) in enumerate(exchanges, start=1):
        lost[kind][:, place] = log_odds[:, 0] - log_odds[:, number]
    return {"log_odds": log_odds[:, 0], **lost}


def _means(
    view: ModelView,
    batch: PromptBatch,
    references: Sequence[PromptBatch],
    places: Sequence[Place],
    roles: Sequence[SitePositions],
    answers: AnswerTokens,
) -> dict[str, Tensor | list[str]]:
    """Return `_exact` for means over other prompts, with the log-odds when all roles of the first
    layer have them, "donor_log_odds".
    """

    def mean_at(site: Site, role: SitePositions, layer: int) -> AblateSite:
        return AblateSite(site, layer, mode="mean", reference=references, positions=role)

    sets: list[list[Edit]] = [[], [mean_at("resid_pre", role, 0) for role in roles]]
    for place in places:
        sets.append([mean_at(*place)])
    scores, _ = score_sets(view, batch, sets, answers.log_odds)
    log_odds = scores[:, :, 0].cpu()
    lost = log_odds[:, :1] - log_odds[:, 2:]
    return {"log_odds": log_odds[:, 0], "donor_log_odds": log_odds[:, 1], "donor": lost}


def _check_no_donors(donors: object, controls: object, method: Method) -> None:
    """Raise InputError for what has no meaning beside `reference`."""
    if donors is not None or controls is not None:
        raise InputError(
            "donors and controls must be omitted with reference, whose mean takes their place"
        )
    if method != "exact":
        raise InputError(f"method must be 'exact' with reference, got {method!r}")


def _estimates(
    view: ModelView,
    batch: PromptBatch,
    sources: Mapping[str, PromptBatch],
    places: Sequence[Place],
    answers: AnswerTokens,
) -> dict[str, Tensor]:
    """Return `_exact`, with first-order estimates of the costs."""
    exchanges: list[tuple[int, Site, SitePositions, int]] = []
    columns: dict[str, list[int]] = {}
    for number, (kind, source) in enumerate(sources.items()):
        columns[kind] = list(_places_that_change(view, batch, source, places))
        exchanges += [(number, *places[place]) for place in columns[kind]]
    log_odds, _ = score_sets(view, batch, [[]], answers.log_odds)
    by_exchange = estimated_losses(view, batch, list(sources.values()), exchanges, answers).cpu()
    lost, first = {}, 0
    for kind, changing in columns.items():
        lost[kind] = torch.zeros(len(batch), len(places))
        lost[kind][:, changing] = by_exchange[:, first : first + len(changing)]
        first += len(changing)
    return {"log_odds": log_odds[:, 0, 0].cpu(), **lost}


def _tokens_at_once(
    view: ModelView, batch: PromptBatch, n_sources: int, places: Sequence[Place]
) -> int:
    """Return how many tokens of prompts are traced at a time: those that one pass can run, or of
    whose sources what is exchanged can be stored.
    """
    width = batch.tokens.shape[1]
    n_values = 0  # of each token, at all sites and layers
    for site, _ in {(site, layer) for site, _, layer in places}:
        n_values += site_width(view, Stage[site])
    bytes_per_prompt = n_sources * width * n_values * view.model.W_U.element_size()
    return width * max(1, min(rows_at_once(view, width), RESTART_BYTES // bytes_per_prompt))


def _donor_batches(
    model: Any,
    batch: PromptBatch,
    donors: Any,
    controls: Any,
    tokenize_donors: Callable[[Any], PromptBatch],
) -> Counterparts:
    """Return the user's donors with their controls, if any, or those that a rule of `DONORS`
    makes.
    """
    if not isinstance(donors, str):
        sources = {"donor": tokenize_donors(donors)}
        if controls is not None:
            sources["control"] = tokenize_donors(controls)
        for kind, source in sources.items():
            if len(source) != len(batch):
                raise InputError(
                    f"{kind}s must have one prompt per prompt, {len(batch)}, got {len(source)}"
                )
        return Counterparts("your donors", sources)
    check_choice("donors", donors, DONORS)
    if controls is not None:
        raise InputError(f"controls must be None for donors={donors!r}, which have their own")
    if not batch.prompts:
        raise InputError(
            f"donors must be prompts for texts without demonstrations, got {donors!r}; pass one "
            "text per text"
        )
    exchanged = donor_prompts(batch.prompts)
    control_prompts = exchanged["same class"]
    if donors != "query":
        control_prompts = same_class_texts(batch.prompts)
    tokenize_as_batch = tokenizer_like(model, batch)
    rows = range(len(batch))
    sources = {
        "donor": tokenize_as_batch(exchanged[donors], rows),
        "control": tokenize_as_batch(control_prompts, rows),
    }
    return Counterparts(donors, sources)


def _checked_sites(view: ModelView, sites: Sequence[Site]) -> tuple[Site, ...]:
    if isinstance(sites, str) or not sites:
        raise InputError(f"sites must be a list of sites, got {short_repr(sites)}")
    for site in sites:
        check_choice("sites", site, SITES)
        check_site(view, Stage[site])
    return tuple(dict.fromkeys(sites))


def _checked_layers(view: ModelView, layers: Sequence[int] | None) -> tuple[int, ...]:
    """Return the layers to exchange, in order; by default, at most `N_LAYERS` of them."""
    if layers is None:
        step = -(-view.n_layers // N_LAYERS)
        return tuple(range(0, view.n_layers, step))
    names = [f"layers[{number}]" for number in range(len(layers))]
    checked = check_integers(**dict(zip(names, layers, strict=True)))
    if not checked or not all(0 <= layer < view.n_layers for layer in checked):
        raise InputError(
            f"layers must be between 0 and {view.n_layers - 1} for {view.name}, at least one, got "
            f"{short_repr(list(layers))}"
        )
    return tuple(sorted(set(checked)))


def _roles(batch: PromptBatch, donor: PromptBatch) -> tuple[SitePositions, ...]:
    """Return the roles of prompts or, for plain texts, their positions, one by one."""
    if batch.has_demonstrations:
        return ROLES
    lengths = {*(batch.last + 1).tolist(), *(donor.last + 1).tolist()}
    if len(lengths) > 1:
        raise InputError(
            "texts and donors must have the same number of tokens, got "
            f"{min(lengths)} to {max(lengths)}; trace texts of one length at a time"
        )
    return tuple((position,) for position in range(lengths.pop()))


def _role_name(batch: PromptBatch, role: SitePositions) -> str:
    """Return the name of a role, or of a position: its number and the first text's token."""
    if isinstance(role, str):
        return role
    (position,) = role
    return f"{position} {batch.token_names[0][position]}"


def _places_that_change(
    view: ModelView, batch: PromptBatch, source: PromptBatch, places: Sequence[Place]
) -> Iterator[int]:
    """Yield the index of each place whose exchange may change something."""
    may_change: dict[SitePositions, bool] = {}
    for number, (_, role, _) in enumerate(places):
        if role not in may_change:
            may_change[role] = _may_change(view, batch, source, role)
        if may_change[role]:
            yield number


def _may_change(
    view: ModelView, batch: PromptBatch, source: PromptBatch, role: SitePositions
) -> bool:
    """Return whether a token of a role, or one before it, differs between a prompt and its
    source.
    """
    if not reads_only_earlier_tokens(view.model):
        return True
    positions = role if isinstance(role, str) else tuple(role)
    aligned = aligned_places(batch, source, range(len(batch)), positions)
    return bool((first_changes(batch, source, aligned) <= batch.last.cpu()).any())
