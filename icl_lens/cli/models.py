"""`icl-lens models`: list the models that load without a network."""

from rich.table import Table

from icl_lens.cli.console import PlainConsole


def models() -> None:
    """List the models that load by name without a network, once their packages are installed."""
    from icl_lens import bundled_models
    from icl_lens.models.checkpoints.installed import INSTALLED_MODELS

    table = Table(box=None, pad_edge=False)
    for column in ("model", "status", "description"):
        table.add_column(column, overflow="fold")
    for model in INSTALLED_MODELS.values():
        table.add_row(model.name, model.status, model.description)
    for name in bundled_models():
        table.add_row(name, "bundled", "trained on this package's word tasks")
    console = PlainConsole()
    console.print(table)
    for model in INSTALLED_MODELS.values():
        if model.status != "installed":
            console.print(f"To install {model.name}: {model.command}", style="dim", soft_wrap=True)
    console.print(
        "Hugging Face folders, Hub names and GGUF files also work: gpt2-large, "
        "EleutherAI/gpt-j-6b, model.gguf, …",
        style="dim",
    )
