"""Options that several commands share, and the loading they describe."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from icl_lens.prompts.prompt import Prompt


class LayoutChoice(StrEnum):
    order = "order"
    reorder = "reorder"
    imbalanced = "imbalanced"


class ClassesChoice(StrEnum):
    binary = "binary"
    all = "all"


class FinalNormChoice(StrEnum):
    frozen = "frozen"
    own = "own"


class DtypeChoice(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


ModelOption = Annotated[str, typer.Option("--model", "-m", help="Bundled model, local folder or Hub name.")]
OpenOption = Annotated[
    bool, typer.Option("--open", help="Open the page in the browser; without --html, from a temporary file.")
]
DeviceOption = Annotated[
    str | None, typer.Option(help="Where to run: cpu, cuda, cuda:1. Default: a GPU if there is one.")
]
DtypeOption = Annotated[DtypeChoice, typer.Option(help="The weights' precision; the readout is float32 at least.")]
RevisionOption = Annotated[str | None, typer.Option(help="Hub revision: branch, tag or commit.")]
FinalNormOption = Annotated[
    FinalNormChoice, typer.Option(help="Scale of the final norm: frozen at the final residual, or own.")
]
BiasOption = Annotated[
    bool, typer.Option("--bias/--no-bias", help="Read out with or without the final norm's shift and b_U.")
]
BosOption = Annotated[
    bool | None,
    typer.Option(
        "--bos/--no-bos",
        help="Force or forbid a beginning-of-sequence token.",
        show_default="the tokenizer's own habit",
    ),
]

LayoutOption = Annotated[LayoutChoice, typer.Option(help="Where the true demonstrations stand.")]
DemonstrationsOption = Annotated[int, typer.Option(help="Demonstrations of each class.")]
PathOption = Annotated[
    Path | None, typer.Option(help="Word list (.json), or file or folder of sentences (.jsonl, .csv, .parquet).")
]
ColumnsOption = Annotated[str, typer.Option(help="The columns of texts and labels in your own sentences.")]
SplitOption = Annotated[str, typer.Option(help="The split that queries are from.")]
MaxWordsOption = Annotated[int | None, typer.Option(help="Leave out longer texts.")]
ClassesOption = Annotated[ClassesChoice, typer.Option(help="Two classes a prompt, or all of a sentence dataset's.")]
LabelsOption = Annotated[
    str | None,
    typer.Option(help="Label words, the true class's first; with --classes all in order of the classes' names."),
]

COMMAND_LINE = {
    "columns=(text, label)": "--columns TEXT,LABEL",
    "path=": "--path",
    "max_words": "--max-words",
    "labels=": "--labels ",
    "layout=": "--layout ",
    "demonstrations=": "--demonstrations ",
}
"""What messages about tasks call arguments, and what they are called in the shell."""


def task_prompts(name: str, *, columns: str, labels: str | None, **more: Any) -> "list[Prompt]":
    """The prompts that the options name; raises InputError that speaks of options."""
    from icl_lens.errors import InputError
    from icl_lens.prompts.tasks import load_task

    text, _, label = columns.partition(",")
    if not (text and label) or "," in label:
        raise InputError(f"--columns {columns!r} must name two columns, texts and labels, such as review,stars")
    try:
        words = None if labels is None else [word.strip() for word in labels.split(",")]
        return load_task(name, columns=(text.strip(), label.strip()), labels=words, **more)
    except InputError as error:
        message = str(error)
        for argument, option in COMMAND_LINE.items():
            message = message.replace(argument, option)
        raise InputError(message) from error


def load(name: str, *, device: str | None, dtype: DtypeChoice, revision: str | None) -> Any:
    """The model the options name."""
    import torch

    from icl_lens import load_model

    return load_model(name, device=device, dtype=getattr(torch, dtype.value), revision=revision)
