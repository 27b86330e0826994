"""Write the Python code of models, prompts and templates: what "copy as Python" is made of."""

from collections.abc import Mapping
from typing import Any

import torch

from icl_lens.prompts.prompt import Prompt, Template


def call(function: str, *arguments: str, **options: Any) -> str:
    """Return a call with one argument a line; `arguments` are code, `options` any values."""
    lines = [*arguments, *(f"{name}={value!r}" for name, value in options.items())]
    body = "".join(f"    {_indented(line)},\n" for line in lines)
    return f"{function}(\n{body})"


def model_lines(source: str, dtype: torch.dtype = torch.float32) -> list[str]:
    """Return the lines that import the packages and load a model."""
    if dtype == torch.float32:
        return ["import icl_lens as il", "", f"model = il.load_model({source!r})"]
    return [
        "import torch",
        "",
        "import icl_lens as il",
        "",
        f"model = il.load_model({source!r}, dtype={dtype})",
    ]


def prompt_call(prompt: Prompt, *, known: Prompt | None = None) -> str:
    """Return the call that makes a prompt.

    `known` is what the code calls `prompt`: one with the same demonstrations takes them from it.
    """
    options: dict[str, Any] = {"query": prompt.query, "answer": prompt.answer}
    used = Prompt(prompt.demonstrations, prompt.query).labels if prompt.demonstrations else ()
    if used != prompt.labels:
        options["labels"] = list(prompt.labels)
    if known is not None and known.demonstrations == prompt.demonstrations:
        return call("il.Prompt", "prompt.demonstrations", **options)
    demonstrations = ""
    for demonstration in prompt.demonstrations:
        made = f"il.Demonstration({demonstration.text!r}, {demonstration.label!r})"
        demonstrations += f"\n    {made},"
    return call("il.Prompt", f"[{demonstrations}\n]" if demonstrations else "[]", **options)


def template_options(template: Template) -> Mapping[str, "Code"]:
    """Return the option `template` of a call; empty for the template of `Prompt.parse`."""
    default = Template().for_prompts([])
    template = template.for_prompts([])
    if template == default:
        return {}
    arguments = [repr(template.demonstration), repr(template.query)]
    for name in ("separator", "prefix"):
        value = getattr(template, name)
        if value != getattr(default, name):
            arguments.append(f"{name}={value!r}")
    return {"template": Code(f"il.Template({', '.join(arguments)})")}


class Code(str):
    """Code that stands for itself where other values are written as their `repr`."""

    def __repr__(self) -> str:
        return str(self)


def _indented(code: str) -> str:
    """Return code in which every line but the first is indented."""
    return code.replace("\n", "\n    ")
