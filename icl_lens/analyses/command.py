"""The command or Python code that reproduces an explanation."""

import shlex
from collections.abc import Sequence

from icl_lens.analyses.explanation import Explanation
from icl_lens.errors import InputError
from icl_lens.prompts.prompt import Prompt, Template


def command(explanation: Explanation) -> str:
    """Return the shell command that reproduces the explanation, or Python code if the CLI cannot express it."""
    model = explanation.settings.source or explanation.model  # a folder's path, not its name
    settings, prompt = explanation.settings, explanation.input.prompt
    if _fits_command_line(explanation):
        if prompt is None:
            words = ["icl-lens", "explain", "--text", explanation.input.text, "--model", model]
            words += [] if settings.target is None else ["--answer", str(settings.target)]
        else:
            words = ["icl-lens", "explain", str(prompt), "--model", model]
            words += ["--answer", prompt.answer] if prompt.answer is not None else []
        words += [word for other in settings.against or () for word in ("--against", str(other))]
        default_by = "contrast" if explanation.scores.compared_with else "increase"
        words += ["--by", settings.by] if settings.by != default_by else []
        words += ["--why", settings.why] if settings.why is not None else []
        words += ["--top", str(settings.k), "--ablate", str(settings.n_ablated), "--seed", str(settings.seed)]
        words += ["--final-norm", settings.final_norm, "--bias" if settings.bias else "--no-bias"]
        words += [] if settings.prepend_bos is None else ["--bos" if settings.prepend_bos else "--no-bos"]
        words += ["--dtype", settings.dtype]
        return shlex.join(words)
    against = "" if settings.against is None else f"    against={list(settings.against)!r},\n"
    what = _plain_text_code(explanation) if prompt is None else _prompt_code(explanation, prompt)
    return (
        "import icl_lens as il\n"
        "import torch\n"
        f"model = il.load_model({model!r}, dtype=torch.{settings.dtype})\n"
        f"il.explain(\n    model,\n{what}{'' if prompt is None else against}"
        f"    final_norm={settings.final_norm!r},\n    bias={settings.bias},\n    by={settings.by!r},\n"
        f"    why={settings.why!r},\n"
        f"    k={settings.k},\n"
        f"    n_ablated={settings.n_ablated},\n    n_random={settings.n_random},\n    seed={settings.seed},\n)"
    )


def _prompt_code(explanation: Explanation, prompt: Prompt) -> str:
    """Return the code of a prompt and of its tokenization."""
    demonstrations = ",\n         ".join(
        f"il.Demonstration({shown.text!r}, {shown.label!r})" for shown in prompt.demonstrations
    )
    template, labels = explanation.input.template, explanation.labels
    if explanation.scores.whole_log_probs and {*labels} != {*prompt.labels}:
        labels = prompt.labels  # those of the scores may stand for several that begin alike
    parts = (template.demonstration, template.query, template.separator, template.prefix)
    return (
        f"    il.Prompt(\n        [{demonstrations}],\n        query={prompt.query!r},\n"
        f"        answer={prompt.answer!r},\n        labels={list(prompt.labels)!r},\n    ),\n"
        f"    template=il.Template({', '.join(map(repr, parts))}),\n"
        f"    labels={list(labels)!r},\n    prepend_bos={explanation.settings.prepend_bos},\n"
    )


def _plain_text_code(explanation: Explanation) -> str:
    """Return the code of plain text and of its tokenization."""
    settings = explanation.settings
    against = None if settings.against is None else list(settings.against)
    return (
        f"    il.Text(\n        {explanation.input.text!r},\n"
        f"        answer={settings.target!r},\n        against={against!r},\n    ),\n"
        f"    prepend_bos={settings.prepend_bos},\n"
    )


def _fits_command_line(explanation: Explanation) -> bool:
    """Return whether the command line can express all settings."""
    settings = explanation.settings
    if settings.n_random != 20:
        return False
    if explanation.input.prompt is not None:
        return explanation.input.template == Template() and _reads_back(explanation.input.prompt, explanation.labels)
    words = [settings.target, *(settings.against or ())]
    return not any(isinstance(word, int) or "\n" in (word or "") for word in [*words, explanation.input.text])


def _reads_back(prompt: Prompt, labels: Sequence[str]) -> bool:
    """Return whether the command line parses the same prompt, with the same labels, from its text."""
    try:
        same = Prompt.parse(str(prompt), answer=prompt.answer) == prompt
    except InputError:
        return False
    return same and set(labels) == set(prompt.labels) and "\n" not in str(prompt)
