"""Write the calls that give the numbers of a live view."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from icl_lens.analyses.python_code import call, model_lines, prompt_call, template_options
from icl_lens.errors import InputError
from icl_lens.foundation.defaults import N_RANDOM_SETS
from icl_lens.report.live_view.panels import ACTIVATIONS, SEED, Scene
from icl_lens.report.live_view.state import LiveState

MAPS = {
    "contrast": "acts = il.capture(model, batch)\n"
    "contrast = il.head_log_prob_increase(\n"
    "    acts, batch.answer_tokens, against=batch.other_label_tokens\n"
    ")  # [batch layer head], nats",
    "increase": "acts = il.capture(model, batch)\n"
    "increase = il.head_log_prob_increase(acts, batch.answer_tokens)  # [batch layer head], nats",
    "effect": "effects = il.head_effects(model, batch)  # .log_odds [batch layer head], nats",
}


def python_code(scene: Scene, state: LiveState) -> str:
    """Return the calls that give what the view shows of a state; they need only `icl_lens`."""
    written = SceneCode(scene, state)
    lines = [
        *model_lines(scene.view.source, scene.view.model.W_U.dtype),
        *written.imports(),
        f"prompt = {prompt_call(scene.prompt)}",
        f"batch = {written.tokenized('prompt')}",
        "scores = il.score(model, batch)  # log p of each label, nats",
        "print(scores.exp().to_frame())",
        "",
    ]
    lines += _without_errors(written.all_heads)
    lines += [
        "demonstrations = il.demonstration_effects(model, batch)",
        "print(demonstrations)",
        "",
    ]
    if state.heads:
        lines += _without_errors(written.change)
    return "\n".join(lines).rstrip() + "\n"


def _without_errors(lines: Callable[[], list[str]]) -> list[str]:
    """Return the lines, or a comment that says why there are none."""
    try:
        return lines()
    except InputError as error:
        return [f"# Left out: {error}"]


@dataclass(frozen=True)
class SceneCode:
    """The code of a scene in a state, in pieces."""

    scene: Scene
    state: LiveState

    @property
    def has_decisions(self) -> bool:
        """Whether the prompt has several rows, of which the view shows the last."""
        return self.scene.batch.decisions.prompt_index is not None

    def tokenized(self, prompt: str) -> str:
        """Return the call that tokenizes a prompt like the scene's; `prompt` is code."""
        options: dict[str, Any] = dict(template_options(self.scene.template))
        if self.scene.prepend_bos is not None:
            options["prepend_bos"] = self.scene.prepend_bos
        if options or "\n" in prompt:
            tokenized = call("il.tokenize", "model", prompt, **options)
        else:
            tokenized = f"il.tokenize(model, {prompt})"
        if not self.has_decisions:
            return tokenized
        return f"with_own_labels({tokenized}[-1:])"

    def imports(self) -> list[str]:
        """Return the lines that import what `tokenized` calls besides `il`."""
        if not self.has_decisions:
            return []
        return ["from icl_lens.prompts.decision_rows import with_own_labels"]

    def all_heads(self) -> list[str]:
        """Return the lines that compute the map of all heads; contrasts are increases if there is
        no other label.
        """
        if self.state.by == "contrast" and not self.scene.has_others:
            return [MAPS["increase"]]
        if self.state.by != "exchange":
            return [MAPS[self.state.by]]
        source = prompt_call(self.scene.source("query"), known=self.scene.prompt)
        return [
            "# Every head's query exchanged for that of the same demonstrations with another query.",
            f"source = {self.tokenized(source)}",
            "n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads",
            "heads = [(layer, head) for layer in range(n_layers) for head in range(n_heads)]",
            "patches = []",
            "for head in heads:",
            '    patches.append([il.Patch([head], source, activation="q", positions="last")])',
            "exchanged = il.score(model, batch, [[], *patches])[0]",
            *self._log_odds("exchanged"),
            "exchange = (log_odds[0] - log_odds[1:]).unflatten(0, (n_layers, n_heads))",
        ]

    def change(self) -> list[str]:
        """Return the lines that change the chosen heads, and as many random ones."""
        heads = [str(head) for head in self.scene.view.check_heads(self.state.heads)]
        controls = "il.ablate_with_controls(model, batch, heads"
        return [
            f"heads = {heads!r}",
            f"controls = {controls}, n_random={N_RANDOM_SETS}, seed={SEED})",
            "# With random sets of the same layers.",
            'head_sets = [heads, *controls.conditions["same layers"].sets]',
            *self._edits(),
            "changed = il.score(model, batch, [[], *edits])[0]",
            *self._log_odds("changed"),
            "before, after, *random = log_odds.tolist()",
            'print(f"{before:+.3f} → {after:+.3f}; random sets {min(random):+.3f} to {max(random):+.3f}")',
        ]

    def _edits(self) -> list[str]:
        """Return the lines that make `edits`, one for each of `head_sets`."""
        if self.state.change == "removed":
            return [
                'edits = [[il.Ablate(heads, positions="last")] for heads in head_sets]',
            ]
        source = prompt_call(self.scene.source(self.state.change), known=self.scene.prompt)
        options = {"activation": ACTIVATIONS[self.state.change], "positions": "last"}
        if self.state.change != "query":
            options["align"] = "labels"
        arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return [
            f"other = {self.tokenized(source)}",
            f"edits = [[il.Patch(heads, other, {arguments})] for heads in head_sets]",
        ]

    def _log_odds(self, name: str) -> list[str]:
        """Return the lines that compute the answer's log-odds in each row, or its log-probability
        if it has no others.
        """
        if not self.scene.has_others:
            return [f"log_odds = {name}[:, int(batch.answer[0])]  # log p: there is no other label"]
        return [
            f"answer = batch.answer.expand(len({name}))",
            f"choices = batch.label_mask.expand(len({name}), -1)",
            f"log_odds = il.metrics.label_log_odds({name}, answer, choices=choices)",
        ]
