"""`python -m experiments.icl_mini --arch gpt2|llama|gptj`: a bundled model trained from nothing, and its card."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from experiments.icl_mini.card import write_card
from experiments.icl_mini.episodes import BUNDLED
from experiments.icl_mini.train import NAMES, RECIPES, Arch, train


def main(
    arch: Annotated[Arch, typer.Option(help="Architecture of the model.")] = "gpt2",
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of learning; the recipe's if not given.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and dropped heads.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the model; the bundled one if not given.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint, if there is one.")] = True,
    card_only: Annotated[bool, typer.Option("--card-only", help="Train nothing, only measure.")] = False,
) -> None:
    """Train a bundled model, write its Hugging Face folder, and measure its model card."""
    folder = out or BUNDLED / NAMES[arch]
    if not card_only:
        recipe = replace(RECIPES[arch], seed=seed, steps=steps or RECIPES[arch].steps)
        train(recipe, folder, Path("checkpoints") / folder.name, resume=resume)
    write_card(folder)


if __name__ == "__main__":
    typer.run(main)
