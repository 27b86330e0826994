"""The command or Python code that reproduces an explanation."""

import shlex
from collections.abc import Sequence
from typing import Any

import torch

from icl_lens.analyses.explanation.result import Explanation
from icl_lens.analyses.python_code import call, model_lines, prompt_call, template_options
from icl_lens.errors import InputError
from icl_lens.foundation.defaults import N_RANDOM_SETS
from icl_lens.prompts.prompt import Prompt


def command(explanation: Explanation) -> str:
    """Return the shell command that reproduces the explanation, or Python code if there is none."""
    if _fits_command_line(explanation):
        return _shell_command(explanation)
    return _python_code(explanation)


def _shell_command(explanation: Explanation) -> str:
    settings, prompt = explanation.settings, explanation.input.prompt
    words = ["icl-lens", "explain"]
    words += ["--text", explanation.input.text] if prompt is None else [str(prompt)]
    words += ["--model", settings.source or explanation.model]  # a folder's path, not its name
    answer = settings.target if prompt is None else prompt.answer
    if answer is not None:
        words += ["--answer", str(answer)]
    for name in settings.against or ():
        words += ["--against", str(name)]
    if settings.by != ("contrast" if explanation.scores.compared_with else "increase"):
        words += ["--by", settings.by]
    if settings.why is not None:
        words += ["--why", settings.why]
    words += ["--top", str(settings.k), "--ablate", str(settings.n_ablated)]
    words += ["--seed", str(settings.seed), "--final-norm", settings.final_norm]
    words.append("--bias" if settings.bias else "--no-bias")
    if settings.prepend_bos is not None:
        words.append("--bos" if settings.prepend_bos else "--no-bos")
    words += ["--dtype", settings.dtype]
    return shlex.join(words)


def _python_code(explanation: Explanation) -> str:
    settings, prompt = explanation.settings, explanation.input.prompt
    against = None if settings.against is None else list(settings.against)
    options: dict[str, Any] = {}
    if prompt is None:
        read = call(
            "il.Text", repr(explanation.input.text), answer=settings.target, against=against
        )
    else:
        read = prompt_call(prompt)
        options |= template_options(explanation.input.template)
        options["labels"] = list(_tokenized_labels(explanation, prompt))
        if against is not None:
            options["against"] = against
    for name in ("prepend_bos", "final_norm", "bias", "by", "why", "k", "n_ablated", "n_random"):
        options[name] = getattr(settings, name)
    lines = model_lines(settings.source or explanation.model, getattr(torch, settings.dtype))
    lines.append(f"prompt = {read}")
    lines.append(call("il.explain", "model", "prompt", **options, seed=settings.seed))
    return "\n".join(lines)


def _tokenized_labels(explanation: Explanation, prompt: Prompt) -> tuple[str, ...]:
    """Return the labels that were tokenized, of which several may be one label of the scores."""
    if explanation.scores.whole_log_probs and {*explanation.labels} != {*prompt.labels}:
        return prompt.labels
    return explanation.labels


def _fits_command_line(explanation: Explanation) -> bool:
    """Return whether the command line can express all settings."""
    settings = explanation.settings
    if settings.n_random != N_RANDOM_SETS:
        return False
    if explanation.input.prompt is not None:
        return not template_options(explanation.input.template) and _reads_back(
            explanation.input.prompt, explanation.labels
        )
    for word in (settings.target, *(settings.against or ()), explanation.input.text):
        if isinstance(word, int) or "\n" in (word or ""):
            return False
    return True


def _reads_back(prompt: Prompt, labels: Sequence[str]) -> bool:
    """Return whether the command line reads the same prompt and labels from the prompt's text."""
    try:
        same = Prompt.parse(str(prompt), answer=prompt.answer) == prompt
    except InputError:
        return False
    return same and set(labels) == set(prompt.labels) and "\n" not in str(prompt)
