"""Appendix E: the FFN neurons that raise the answer most, and which heads drive their coefficients."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.lab.controls import Comparison, beside
from experiments.lab.drawing import WHISKERS, by_name, legend_below, mark_zeros, means, name_heads, whiskers
from experiments.lab.experiment import Experiment
from experiments.lab.frames import by_prompt, long, stack, where
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study, Variant
from experiments.lab.verdict import Verdict, all_of, cannot_tell, verdict
from icl_lens.attribution.search import layer_gradients
from icl_lens.report.palette import BLUE, GREY, ORANGE
from icl_lens.report.plots import PAGE

Neuron = tuple[int, int]


@dataclass(frozen=True)
class FfnConfig:
    """Neurons shown; heads located (at most one in eight); the most controls of a layer; prompts of either half."""

    neurons: int = 10
    heads: int = 6
    controls: int = 20
    prompts: int = 100


def ffn_inputs(acts: il.Activations) -> Float[Tensor, "prompt layer d_model"]:
    """The residual stream that each FFN adds to."""
    x = acts.resid_pre.to(acts.readout.dtype)
    return x if acts.view.parallel else x + acts.attn_out.to(x.dtype)


def neuron_bounds(acts: il.Activations) -> Float[Tensor, "prompt layer neuron"]:
    """An upper bound of each neuron's increase, nats; see `icl_lens.attribution.search`."""
    if acts.mlp_post is None:
        raise il.InputError(f"{acts.view.name} shows no FFN coefficients (mlp.hook_post): neurons cannot be told apart")
    if not acts.readout.is_affine:
        raise il.InputError(f"{acts.view.name} caps its logits, so there is no bound to search its neurons with")
    targets = acts.batch.answer_tokens.to(acts.readout.W_U.device)
    g = layer_gradients(replace(acts, resid_pre=ffn_inputs(acts)), targets, acts.readout).g
    columns = [
        neuron_coefficients(acts, layer) * (g[:, layer] @ acts.view.W_out(layer).to(g.dtype).T)
        for layer in range(acts.view.n_layers)
    ]
    return torch.stack(columns, dim=1)


def neuron_coefficients(acts: il.Activations, layer: int) -> Float[Tensor, "prompt neuron"]:
    """Coefficients, times the scale of a norm that follows the FFN."""
    assert acts.mlp_post is not None
    post = acts.mlp_post[:, layer].to(acts.readout.dtype)
    return post if acts.mlp_scale is None else post * acts.mlp_scale[:, layer, None]


@dataclass(frozen=True)
class NeuronIncreases:
    """Exact log-probability increase of the answer by some neurons, nats."""

    neurons: tuple[Neuron, ...]

    def __call__(self, acts: il.Activations) -> Float[Tensor, "prompt neuron"]:
        x, targets = ffn_inputs(acts), acts.batch.answer_tokens.to(acts.readout.W_U.device)
        columns = []
        for layer, neuron in self.neurons:
            vector = acts.view.W_out(layer)[neuron].to(x.dtype)
            part = neuron_coefficients(acts, layer)[:, neuron, None] * vector
            pair = torch.stack([x[:, layer], x[:, layer] + part], dim=1)
            before, after = acts.readout.token_log_probs(pair, targets).unbind(1)
            columns.append(after - before)
        return torch.stack(columns, dim=1)


@dataclass(frozen=True)
class CoefficientDrive:
    """How much of a neuron's coefficient is lost when a head's output is taken from its input.

    Only the direct way from the head (same layer or earlier) to the neuron; zero for later heads. The last position.
    Raises InputError where the FFN cannot be run on its own.
    """

    neurons: tuple[Neuron, ...]
    heads: tuple[il.Head, ...]

    def __call__(self, acts: il.Activations) -> Float[Tensor, "prompt neuron head"]:
        inputs = ffn_inputs(acts)
        out = inputs.new_zeros((len(acts.batch), len(self.neurons), len(self.heads)))
        outputs = {layer: acts.head_outputs(layer) for layer in {head.layer for head in self.heads}}
        for layer in {layer for layer, _ in self.neurons}:
            before = [i for i, head in enumerate(self.heads) if head.layer < layer + (not acts.view.parallel)]
            x = inputs[:, layer, None]
            without = [x - outputs[self.heads[i].layer][:, self.heads[i].head, None] for i in before]
            post = coefficients(acts, layer, torch.cat([x, *without], dim=1))
            assert acts.mlp_post is not None
            error = (post[:, 0] - acts.mlp_post[:, layer].to(post.dtype)).norm() / (post[:, 0].norm() + 1e-30)
            if not error < 1e-2:
                raise il.InputError(
                    f"the FFN of layer {layer} of {acts.view.name} does not give its own coefficients when run alone "
                    f"(relative error {float(error):.1e}): what drives its neurons cannot be told"
                )
            for column, (own_layer, neuron) in enumerate(self.neurons):
                if own_layer == layer:
                    out[:, column, before] = (post[:, :1, neuron] - post[:, 1:, neuron]).to(out.dtype)
        return out


def coefficients(
    acts: il.Activations, layer: int, x: Float[Tensor, "prompt input d_model"]
) -> Float[Tensor, "prompt input neuron"]:
    """The coefficients of a layer's FFN for given inputs, by running its norm and first half."""
    block, seen = acts.view.model.blocks[layer], []
    norm = block.ln2 if hasattr(block, "ln2") else block.ln1
    with (
        torch.no_grad(),
        acts.view.model.hooks(
            fwd_hooks=[(f"blocks.{layer}.mlp.hook_post", lambda value, hook: seen.append(value.detach()))]
        ),
    ):
        block.mlp(norm(x.to(acts.resid_pre.dtype)))
    return seen[0].to(x.dtype)


def table(study: Study, config: FfnConfig) -> pd.DataFrame:
    """kind, group, layer, name, neuron ("L5N123"), prompt, value.

    Kinds: "increase" of the best neurons, nats; "best" and "random" neurons (as many of the same layers): the share of
    all the group's coefficients together that is lost without a head's direct contribution. Groups: "located" heads,
    and the others of their layers.
    """
    chosen, tested = (rows[: config.prompts] for rows in study.halves)
    neurons = top_neurons(study, chosen, config.neurons)
    names = [f"L{layer}N{neuron}" for layer, neuron in neurons]
    increases = study.reduce(NeuronIncreases(neurons), Variant(), tested, what="increases of neurons").numpy()
    rows = tested.tolist()
    first = long(increases.T, "value", neuron=names, prompt=rows)
    frames = [first.assign(kind="increase", group="", layer=-1, name="")]

    compared = Comparison.of(study, study.located(study.few(config.heads)), config.controls)
    for kind, members in (("best", neurons), ("random", random_neurons(study, neurons))):
        drive = study.reduce(
            CoefficientDrive(members, compared.heads), Variant(), tested, what=f"drive of {kind} neurons"
        )
        value = study.reduce(Coefficients(members), Variant(), tested, what=f"coefficients of {kind} neurons").mean(0)
        # Of all the coefficients together: a neuron that is all but off would make any share of its own huge.
        share = ((drive * value.sign()[None, :, None]).sum(1) / (value.abs().sum() + 1e-12)).numpy()

        def frame(head: il.Head, share: np.ndarray = share, kind: str = kind) -> pd.DataFrame:
            values = long(share[:, compared.heads.index(head)], "value", prompt=rows)
            return values.assign(kind=kind, neuron="")

        frames += compared.rows(frame)
    return stack(*frames)


def random_neurons(study: Study, neurons: Sequence[Neuron]) -> tuple[Neuron, ...]:
    """As many other neurons of the same layers, at random."""
    rng = random.Random(study.settings.seed)
    width = study.view.W_out(neurons[0][0]).shape[0]
    drawn = []
    for layer in sorted({layer for layer, _ in neurons}):
        best = [neuron for own, neuron in neurons if own == layer]
        free = [neuron for neuron in range(width) if neuron not in best]
        drawn += [(layer, neuron) for neuron in sorted(rng.sample(free, min(len(best), len(free))))]
    return tuple(drawn)


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of some neurons."""

    neurons: tuple[Neuron, ...]

    def __call__(self, acts: il.Activations) -> Float[Tensor, "prompt neuron"]:
        assert acts.mlp_post is not None
        return torch.stack([acts.mlp_post[:, layer, neuron].float() for layer, neuron in self.neurons], dim=1)


def top_neurons(study: Study, rows: Int[Tensor, " row"], k: int) -> tuple[Neuron, ...]:
    """The k neurons of largest mean increase over some prompts, best first: exact, found by their bounds."""
    bounds = study.reduce(neuron_bounds, Variant(), rows, what="bounds of neurons").mean(0)
    d_mlp = bounds.shape[1]
    order = bounds.flatten().argsort(descending=True).tolist()
    k = min(k, len(order))
    exact: dict[Neuron, float] = {}
    m = min(4 * k, len(order))
    while True:
        fresh = tuple((index // d_mlp, index % d_mlp) for index in order[len(exact) : m])
        means = study.reduce(NeuronIncreases(fresh), Variant(), rows, what="increases of candidate neurons").mean(0)
        exact.update(zip(fresh, means.tolist(), strict=True))
        best = sorted(exact, key=lambda neuron: exact[neuron], reverse=True)[:k]
        if m == len(order) or float(bounds.flatten()[order[m]]) <= exact[best[-1]]:
            return tuple(best)
        m = min(2 * m, len(order))


def claim(table: pd.DataFrame) -> Verdict:
    """Located heads drive the best neurons more than other heads of their layers do, and more than they drive any
    neurons.

    Random neurons are driven by located heads too, since these write much.
    """
    unit = "of the coefficients a head"
    driven = where(table, kind="best")["value"].fillna(0).to_numpy(dtype=float)
    if not driven.any():
        return cannot_tell("the best neurons come before every head that is looked at: none can drive them", unit=unit)
    best, other = (beside(table, "value", kind=kind) for kind in ("best", "random"))
    gap = best.located - best.random
    return all_of(
        verdict(
            best.drawn.estimate(gap),
            least=0.01,
            unit=unit,
            what=f"share driven by located heads minus {best.named} of the same layers",
        ),
        verdict(
            best.drawn.estimate(gap - (other.located - other.random)),
            least=0.0,
            unit=unit,
            what=f"the same beyond random neurons ({other.located[0] - other.random[0]:.3g})",
        ),
    )


def figure(table: pd.DataFrame) -> Figure:
    """Left: increase by neuron. Right: share of its coefficient a head contributes directly. 95 % intervals."""
    drawn = Figure(figsize=(PAGE, 2.5), layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(1, 1))
    increases = where(table, kind="increase")
    neurons = list(dict.fromkeys(increases["neuron"]))
    samples = by_name(increases, "value", neurons, column="neuron")
    at = np.arange(len(neurons))
    left.bar(at, means(samples), color=BLUE, width=0.7)
    left.errorbar(at, means(samples), yerr=whiskers(samples), **WHISKERS)
    left.set_xticks(at, neurons, rotation=60)
    left.set(title="Best neurons", ylabel="Log-probability increase (nats)")
    left.axhline(0, color="0.3", linewidth=0.6)
    located = where(table, kind="best", group="located").drop_duplicates("name")
    names, layers = list(located["name"]), list(located["layer"])
    bars = (
        ("best", "located", ORANGE, "best neurons, located head"),
        ("best", "random", GREY, "best neurons, other heads of the layer"),
        ("random", "located", "white", "random neurons, located head"),
    )
    for i, (kind, group, hue, label) in enumerate(bars):
        samples = [
            by_prompt(
                table, "value", kind=kind, group=group, layer=layer, **({"name": name} if group == "located" else {})
            )
            for name, layer in zip(names, layers, strict=True)
        ]
        spots = np.arange(len(names)) + 0.27 * (i - 1)
        edge = {"edgecolor": ORANGE, "linewidth": 0.6, "hatch": "/////"} if hue == "white" else {}
        right.bar(spots, means(samples), color=hue, width=0.27, label=label, **edge)
        right.errorbar(spots, means(samples), yerr=whiskers(samples), **WHISKERS)
        mark_zeros(right, spots, means(samples))
    name_heads(right, names)
    right.set(title="What drives them", ylabel="Share of the neurons' coefficients\ndue to a head", xlabel="Head")
    right.axhline(0, color="0.3", linewidth=0.6)
    legend_below(drawn, right, columns=3)
    return drawn


EXPERIMENT = Experiment(
    id="ffn",
    title="Which FFN neurons raise the answer, and what drives them",
    source="Open (our reading of Appendix E)",
    claim="The FFN neurons that raise the answer are switched on by what located heads write.",
    criterion=(
        "Taking a located head's output from the neurons' input costs one hundredth more of their coefficients than "
        "taking that of another head of the same layer, and this difference is larger than for random neurons."
    ),
    chosen=(
        "That the verdict is open where no head comes before the best neurons was settled after results on "
        "icl-mini-gptj, whose layers are parallel, had been seen; it holds as well where the best neurons are all in "
        "the "
        "first layers. Read as a claim about these models' best neurons, it does not hold there."
    ),
    departs=(
        "Appendix E has no experiment: it writes an FFN's output as a sum of neurons, each a coefficient times a "
        "vector, takes from earlier work that a larger coefficient raises the answer more, and likens attention to "
        "that coefficient. That located heads drive the best neurons is our reading of the two together, measured on "
        "the direct way at the last position and on at most 100 prompts of either half. Neurons are ranked by increase "
        "beside heads by contrast too; its remark that the order of "
        "the parts hardly changes their increases is not tested."
    ),
    paper=None,
    classes="any",
    config=FfnConfig(),
    needs=(Need(Variant(), head_increases),),
    table=table,
    verdict=claim,
    figure=figure,
)
