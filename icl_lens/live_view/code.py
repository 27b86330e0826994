"""Write the calls that give the numbers of a live view."""

from collections.abc import Callable
from typing import Any

import torch

from icl_lens.errors import InputError
from icl_lens.live_view.panels import ACTIVATIONS, N_RANDOM, SEED, Scene
from icl_lens.live_view.state import LiveState
from icl_lens.prompts.prompt import Prompt, Template

MAPS = {
    "contrast": "acts = il.capture(model, batch)\n"
    "contrast = il.head_log_prob_increase(\n"
    "    acts, batch.answer_tokens, against=batch.tokens_to_compare(batch.answer_tokens)\n"
    ")  # [batch layer head], nats",
    "increase": "acts = il.capture(model, batch)\n"
    "increase = il.head_log_prob_increase(acts, batch.answer_tokens)  # [batch layer head], nats",
    "effect": "effects = il.head_effects(model, batch)  # .log_odds, .log_prob [batch layer head], nats",
}


def python_code(scene: Scene, state: LiveState) -> str:
    """Return the calls that give what the view shows of a state; they need only `icl_lens`."""
    batch, prompt = scene.batch, scene.prompt
    bos = "" if scene.prepend_bos is None else f", prepend_bos={scene.prepend_bos}"
    options = f"{_template(scene.template)}{bos}"
    own = scene.view.model.W_U.dtype
    dtype = "" if own == torch.float32 else f", dtype={own}"
    decided = "" if batch.decision_index is None else "[-1:].with_own_labels()"
    lines = [
        "import icl_lens as il",
        *(["import torch"] if dtype else []),
        "",
        f"model = il.load_model({scene.view.source!r}{dtype})",
        f"prompt = {_prompt(prompt)}",
        f"batch = il.tokenize(model, prompt{options}){decided}",
        "scores = il.score(model, batch)  # log p of each label, nats",
        "print(scores.exp().to_frame())",
        "",
    ]
    lines += _without_errors(lambda: _map(scene, state, options, decided))
    lines += ["demonstrations = il.demonstration_effects(model, batch)", "print(demonstrations)", ""]
    if state.heads:
        lines += _without_errors(lambda: _change(scene, state, options, decided))
    return "\n".join(lines).rstrip() + "\n"


def _without_errors(lines: Callable[[], list[str]]) -> list[str]:
    """Return the lines, or a comment that says why there are none."""
    try:
        return lines()
    except InputError as error:
        return [f"# Left out: {error}"]


def _map(scene: Scene, state: LiveState, options: str, decided: str) -> list[str]:
    if state.by != "towers":
        return [MAPS[state.by]]
    return [
        "# Every head's query exchanged for that of the same demonstrations with another query.",
        f"source = il.tokenize(model, {_prompt(scene.source('query'), scene.prompt)}{options}){decided}",
        "heads = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]",
        'patches = [il.Patch([head], source, activation="q", positions="last") for head in heads]',
        "exchanged = il.score(model, batch, [[], *([one] for one in patches)])[0]",
        *_log_odds("exchanged", scene),
        "towers = (log_odds[0] - log_odds[1:]).unflatten(0, (model.cfg.n_layers, model.cfg.n_heads))",
    ]


def _change(scene: Scene, state: LiveState, options: str, decided: str) -> list[str]:
    heads, prompt = [str(head) for head in scene.view.check_heads(state.heads)], scene.prompt
    lines = [
        f"chosen = {heads!r}",
        f"controls = il.ablate_with_controls(model, batch, chosen, n_random={N_RANDOM}, seed={SEED})",
        'sets = [chosen, *controls.conditions["same layers"].sets]  # with random sets of the same layers',
    ]
    if state.change == "removed":
        edit = 'il.Ablate(heads, positions="last")'
    else:
        align = "" if state.change == "query" else ', align="labels"'
        source = _prompt(scene.source(state.change), prompt)
        lines.append(f"other = il.tokenize(model, {source}{options}){decided}")
        edit = f'il.Patch(heads, other, activation="{ACTIVATIONS[state.change]}", positions="last"{align})'
    return [
        *lines,
        f"edits = [{edit} for heads in sets]",
        "changed = il.score(model, batch, [[], *([edit] for edit in edits)])[0]",
        *_log_odds("changed", scene),
        "before, after, *random_sets = log_odds.tolist()",
        'print(f"{before:+.3f} → {after:+.3f}; random sets {min(random_sets):+.3f} to {max(random_sets):+.3f}")',
    ]


def _log_odds(name: str, scene: Scene) -> list[str]:
    """Return the lines that compute the answer's log-odds in each row, or its log-probability if it has no others."""
    if not scene.has_others:
        return [f"log_odds = {name}[:, int(batch.answer[0])]  # log p: there is no other label"]
    return [
        f"answer, choices = batch.answer.expand(len({name})), batch.label_mask.expand(len({name}), -1)",
        f"log_odds = il.metrics.label_log_odds({name}, answer, choices=choices)",
    ]


def _prompt(prompt: Prompt, given: Prompt | None = None) -> str:
    """Return the call that makes a prompt; one with the demonstrations of `given`, the code's `prompt`, takes them."""
    used = Prompt(prompt.demonstrations, prompt.query).labels if prompt.demonstrations else ()
    labels = "" if used == prompt.labels else f", labels={list(prompt.labels)!r}"
    rest = f"query={prompt.query!r}, answer={prompt.answer!r}{labels}"
    if given is not None and given.demonstrations == prompt.demonstrations:
        return f"il.Prompt(prompt.demonstrations, {rest})"
    shown = "".join(f"\n        il.Demonstration({one.text!r}, {one.label!r})," for one in prompt.demonstrations)
    return f"il.Prompt(\n    [{shown}\n    ],\n    {rest},\n)"


def _template(template: Template) -> str:
    if template == Template():
        return ""
    fields: dict[str, Any] = {name: getattr(template, name) for name in ("separator", "prefix")}
    given = "".join(f", {name}={value!r}" for name, value in fields.items() if value != getattr(Template(), name))
    return f", template=il.Template({template.demonstration!r}, {template.query!r}{given})"
