"""Options that several commands share, and the loading they describe."""

from enum import StrEnum
from typing import Annotated, Any

import typer


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


def load(name: str, *, device: str | None, dtype: DtypeChoice, revision: str | None) -> Any:
    """The model the options name."""
    import torch

    from icl_lens import load_model

    return load_model(name, device=device, dtype=getattr(torch, dtype.value), revision=revision)
