"""`python -m experiments.bundled_models COMMAND`: train, measure and package the bundled models."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from experiments.bundled_models.architectures import NAMES, Arch
from icl_lens.cli.console import PlainConsole
from icl_lens.cli.program import new_app, run_program
from icl_lens.errors import InputError
from icl_lens.files import write_text
from icl_lens.report.terminal import new_table

app = new_app(help="Train and measure the bundled models, and put them into the package.", no_args_is_help=True)
FoldersArgument = Annotated[list[Path], typer.Argument(metavar="FOLDER…", help="Folders that `train` wrote.")]
PromptsOption = Annotated[int, typer.Option("-n", help="Prompts: heads are located on half, measured on the other.")]


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder of the model.")],
    arch: Annotated[Arch, typer.Option(help="Architecture of the model.")] = "gpt2",
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    resume: Annotated[bool, typer.Option(help="Resume from the last checkpoint, if there is one.")] = True,
    checkpoints: Annotated[Path, typer.Option(help="Folder of checkpoints and snapshots.")] = Path("checkpoints"),
) -> None:
    """Train a model and write its Hugging Face folder."""
    from experiments.bundled_models.train import TrainConfig
    from experiments.bundled_models.train import train as run

    run(TrainConfig(arch, seed), out, checkpoints / f"{NAMES[arch]}-{seed}", resume=resume)


@app.command()
def card(
    folders: FoldersArgument,
    seeds: Annotated[list[Path] | None, typer.Option(help="Trained folders of other seeds, for the table.")] = None,
) -> None:
    """Measure what models do, and write a model card into each folder."""
    from experiments.bundled_models.head_locations import locations_in
    from experiments.bundled_models.model_card import write_card

    other_seeds = [locations_in(folder) for folder in seeds or ()]
    for folder in folders:
        write_card(folder, other_seeds=other_seeds)


@app.command()
def where(
    folders: FoldersArgument,
    n: PromptsOption = 320,
) -> None:
    """Show the layers of located heads, what they attend to, and what zeroing them costs."""
    from experiments.bundled_models import head_locations as locations

    found = [locations.locations_in(folder, n=n) for folder in folders]
    _print("where the located heads are, and what they attend to", locations.PLACES, locations.place_rows(found))
    title = "points of accuracy lost without them: between the labels / over all words"
    _print(title, locations.COSTS, locations.cost_rows(found))


def _print(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    table = new_table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    PlainConsole().print(table)


@app.command()
def emergence(
    checkpoints: Annotated[Path, typer.Argument(metavar="CHECKPOINTS", help="Folder of a run's snapshots.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The model that the run ended with.")],
    n: PromptsOption = 320,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for tables, figure and summary.")] = Path(
        "emergence"
    ),
) -> None:
    """Show how heads form in training: accuracy, located heads, their attention and induction, by snapshot."""
    from experiments.bundled_models.emergence import head_onsets, measure, trajectory
    from experiments.bundled_models.emergence_page import HEADS, head_rows, write

    run = measure(checkpoints, folder, n=n)
    write(run, out)
    steps = trajectory(run).map("{:.2f}".format).reset_index()
    _print("by step", steps.columns, steps.astype(str).to_numpy().tolist())
    _print("located heads appear", HEADS, head_rows(head_onsets(run)))


@app.command()
def emergence_page(
    folder: Annotated[Path, typer.Argument(help="Folder of the folders that `emergence` wrote.")] = Path(
        "docs/emergence"
    ),
) -> None:
    """Write one page of all runs that `emergence` has measured: FOLDER/index.md."""
    from experiments.bundled_models.emergence_page import page

    write_text(folder / "index.md", page(folder))


@app.command()
def keep(folders: FoldersArgument) -> None:
    """Store trained models of other seeds, in half precision, where the findings look for them."""
    from experiments.bundled_models import SEEDS
    from experiments.bundled_models.episodes import load_words
    from experiments.bundled_models.head_locations import training_record
    from experiments.bundled_models.ship import store_half_precision

    for folder in folders:
        run = training_record(folder)
        target = SEEDS / f"{NAMES[run['arch']]}-{run['seed']}"
        change = store_half_precision(folder, target, load_words())
        PlainConsole().print(f"{target.name}: float16, log-probabilities change by at most {change.nats:.4f} nats")


@app.command()
def ship(
    models: Annotated[list[str], typer.Argument(metavar="ARCH=FOLDER…", help="Such as gpt2=models/gpt2-0.")],
    seeds: Annotated[list[Path] | None, typer.Option(help="Trained folders of other seeds, for the cards.")] = None,
) -> None:
    """Check trained models of seed 0, store them in half precision, measure their cards, and bundle them."""
    from experiments.bundled_models.head_locations import locations_in
    from experiments.bundled_models.ship import ship as bundle

    folders: dict[Arch, Path] = {}
    for model in models:
        arch, equals, folder = model.partition("=")
        if not equals or arch not in NAMES:
            raise InputError(f"models must be ARCH=FOLDER with one of {', '.join(NAMES)} as ARCH, got {model!r}")
        folders[arch] = Path(folder)
    for name, change in bundle(folders, [locations_in(folder) for folder in seeds or ()]).items():
        PlainConsole().print(
            f"{name}: float16 changes labels' log-probabilities by at most {change.nats:.4f} nats and accuracy by"
            f" {change.points:.1f} points"
        )


def main() -> None:
    """Report an InputError in one line on stderr, with exit code 2."""
    run_program(app, "python -m experiments.bundled_models")


if __name__ == "__main__":
    main()
