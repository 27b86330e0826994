"""`python -m experiments.pieces_world --arch gpt2|llama|gptj --out FOLDER`: a model and its card."""

from pathlib import Path
from typing import Annotated

import typer

from experiments.pieces_world.architectures import NAMES, Arch
from experiments.pieces_world.card import write_card
from experiments.pieces_world.train import Settings, train


def main(
    out: Annotated[Path, typer.Option(help="Folder of the model.")],
    arch: Annotated[Arch, typer.Option(help="Architecture of the model.")] = "gpt2",
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint, if there is one.")] = True,
    card_only: Annotated[bool, typer.Option("--card-only", help="Train nothing, only measure.")] = False,
) -> None:
    """Train a model on words in pieces, write its Hugging Face folder, and measure its model card."""
    if not card_only:
        train(Settings(arch, seed), out, Path("checkpoints") / f"{NAMES[arch]}-{seed}", resume=resume)
    write_card(out)


if __name__ == "__main__":
    typer.run(main)
