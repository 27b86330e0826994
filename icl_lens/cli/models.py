"""`icl-lens models`: what can be loaded without a network."""

from rich.console import Console


def models() -> None:
    """List the bundled models, which need no network."""
    from icl_lens import bundled_models

    console = Console()
    for name in bundled_models():
        console.print(name)
    console.print(
        "Any Hugging Face folder or Hub name works too: gpt2-large, EleutherAI/gpt-j-6b, huggyllama/llama-7b, …",
        style="dim",
    )
