"""Appendix E: the FFN neurons that raise the answer most, and which heads drive their coefficients."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.lab.controls import Comparison
from experiments.lab.drawing import WHISKERS, legend_below, name_heads, whiskers
from experiments.lab.experiment import Experiment
from experiments.lab.frames import array, by_prompt, long, stack, where, wide
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study, Variant
from experiments.lab.verdict import Verdict, judge
from icl_lens.attribution.search import layer_gradients
from icl_lens.report.palette import BLUE, GREY, ORANGE
from icl_lens.report.plots import PAGE

Neuron = tuple[int, int]


@dataclass(frozen=True)
class FfnConfig:
    """Neurons shown; heads located (at most one in eight); random sets; prompts of either half, the first ones."""

    neurons: int = 10
    heads: int = 6
    draws: int = 100
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
    """kind, neuron ("L5N123"), name, prompt, value.

    Kinds: "increase" of the best neurons, nats; "located" and "random": share of the neuron's coefficient lost without
    a head's direct contribution, for each located head, and mean of all draws of a head of its layer.
    """
    chosen, tested = (rows[: config.prompts] for rows in study.halves)
    neurons = top_neurons(study, chosen, config.neurons)
    names = [f"L{layer}N{neuron}" for layer, neuron in neurons]
    increases = study.reduce(NeuronIncreases(neurons), Variant(), tested, what="increases of neurons").numpy()
    rows = tested.tolist()
    frames = [long(increases.T[None, :, None], "value", kind=["increase"], neuron=names, name=[""], prompt=rows)]

    compared = Comparison.of(study, study.located(study.few(config.heads)), config.draws)
    drive = study.reduce(CoefficientDrive(neurons, compared.heads), Variant(), tested, what="what drives neurons")
    value = study.reduce(Coefficients(neurons), Variant(), tested, what="coefficients of neurons")
    # Relative to the neuron's mean coefficient, so that neurons of different size count alike.
    share = (drive / (value.mean(0).abs() + 1e-12)[None, :, None] * value.mean(0).sign()[None, :, None]).numpy()
    column = {head: share[:, :, i].T for i, head in enumerate(compared.heads)}
    for head, kind, values in compared.groups(column.__getitem__):
        frames.append(long(values[None, :, None], "value", kind=[kind], neuron=names, name=[str(head)], prompt=rows))
    return stack(*frames)


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
    """Located heads drive the coefficients of the best neurons more than random heads of their layers do."""
    located, control = (by_prompt(table, "value", kind=kind) for kind in ("located", "random"))
    return judge(
        located - control,
        least=0.01,
        unit="of the coefficient a head",
        what="share driven by located minus random heads",
    )


def figure(table: pd.DataFrame) -> Figure:
    """Left: increase by neuron. Right: share of its coefficient a head contributes directly. 95 % intervals."""
    drawn = Figure(figsize=(PAGE, 2.5), layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(1, 1))
    increases = wide(where(table, kind="increase"), "value", index="neuron", columns="prompt")
    at = np.arange(len(increases))
    left.bar(at, increases.mean(axis=1), color=BLUE, width=0.7)
    left.errorbar(at, increases.mean(axis=1), yerr=whiskers(increases.to_numpy()), **WHISKERS)
    left.set_xticks(at, list(increases.index), rotation=60)
    left.set(title="Best neurons", ylabel="Log-probability increase (nats)")
    left.axhline(0, color="0.3", linewidth=0.6)
    names = list(dict.fromkeys(array(where(table, kind="located"), "name")))
    for i, (kind, hue) in enumerate((("located", ORANGE), ("random", GREY))):
        samples = [by_prompt(table, "value", kind=kind, name=name) for name in names]
        spots = np.arange(len(names)) + 0.4 * (i - 0.5)
        label = "located head" if kind == "located" else "random heads, same layer"
        right.bar(spots, [sample.mean() for sample in samples], color=hue, width=0.4, label=label)
        right.errorbar(spots, [sample.mean() for sample in samples], yerr=whiskers(samples), **WHISKERS)
    name_heads(right, names)
    right.set(title="What drives them", ylabel="Share of the neurons' coefficients\ndue to a head", xlabel="Head")
    right.axhline(0, color="0.3", linewidth=0.6)
    legend_below(drawn, right)
    return drawn


EXPERIMENT = Experiment(
    id="ffn",
    title="Which FFN neurons raise the answer, and what drives them",
    source="Appendix E",
    claim="The FFN neurons that raise the answer are switched on by what located heads write.",
    criterion=(
        "Taking a located head's output from the neurons' input costs one hundredth more of their coefficients than "
        "taking that of a random head of the same layer."
    ),
    paper=None,
    config=FfnConfig(),
    needs=(Need(Variant(), head_increases),),
    table=table,
    verdict=claim,
    figure=figure,
)
