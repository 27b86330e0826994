"""`icl-lens live`: edit a prompt, click heads, and see what changes, in a browser."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from typer import Argument, Option

from icl_lens.cli.console import PlainConsole
from icl_lens.cli.head_options import head_names
from icl_lens.cli.option_groups import grouped
from icl_lens.cli.options import (
    PAPER_ANSWER,
    PAPER_PROMPT,
    ModelOptions,
    TokenOptions,
    parse_prompt,
)
from icl_lens.errors import InputError

if TYPE_CHECKING:
    from icl_lens.report.live_view.widget import LiveView


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where the page is served, and whether it is opened."""

    panel: ClassVar[str] = "Page"

    port: Annotated[
        int | None,
        Option(min=1, max=65535, help="Port on this machine.", show_default="a free one"),
    ] = None
    open_browser: Annotated[
        bool, Option("--open/--no-open", help="Open the page in the browser.")
    ] = True


@grouped
def live(
    server: ServerOptions,
    tokens: TokenOptions,
    model: ModelOptions,
    prompt: Annotated[
        str | None,
        Argument(
            help='Prompt, e.g. "happy : bar three : foo nine :" (\\n: line break).',
            show_default=PAPER_PROMPT,
        ),
    ] = None,
    answer: Annotated[
        str | None,
        Option(
            "--answer",
            "-a",
            help="Correct label.",
            show_default="model's prediction; foo for the default prompt",
        ),
    ] = None,
    heads: Annotated[
        str, Option(help="Heads to choose first, e.g. L17H3,L20H6.", show_default="none")
    ] = "",
    atlas: Annotated[
        Path | None,
        Option(help="Atlas of this model (icl-lens atlas --json), whose scores the map offers."),
    ] = None,
) -> None:
    """Open a prompt in the browser: edit demonstrations, click heads, and see what changes.

    The page is served on this machine only, at an address with a token, until Ctrl-C. Each tab is a
    view of its own.
    """
    from icl_lens import live as live_view
    from icl_lens.analyses.atlas.head_atlas_result import HeadAtlas
    from icl_lens.models.view import ModelView
    from icl_lens.prompts.prompt import Prompt
    from icl_lens.report.live_view.browser import Address, check_installed, serve
    from icl_lens.report.live_view.view import scores_of_atlas

    check_installed()
    if prompt is None:
        first_prompt = Prompt.parse(PAPER_PROMPT, answer=answer or PAPER_ANSWER)
    else:
        first_prompt = parse_prompt(prompt, answer)
    if not first_prompt.demonstrations:
        raise InputError("the prompt must have demonstrations, such as 'happy : bar nine :'")
    head_atlas = None if atlas is None else HeadAtlas.load(atlas)
    loaded = model.load()
    if head_atlas is not None:
        scores_of_atlas(ModelView.of(loaded), head_atlas)  # is of this model
    first_heads = ModelView.of(loaded).check_heads(head_names(heads))
    arguments = tokens.tokenize_arguments(loaded)
    # What is wrong with the prompt is said here, not in the page.
    tokens.tokenize(loaded, [first_prompt])
    console = PlainConsole(soft_wrap=True, highlight=False)
    model.warn_of_words(console, [first_prompt])

    def new_view() -> "LiveView":
        return live_view(loaded, first_prompt, heads=first_heads, atlas=head_atlas, **arguments)

    def announce(address: Address) -> None:
        console.print(f"{address}\nThe live view is at this address; Ctrl-C ends it.")

    serve(new_view, port=server.port, open_browser=server.open_browser, announce=announce)
    # Kernels of marimo whose tab was open at Ctrl-C never end, and Python would wait for them.
    sys.stdout.flush()
    os._exit(0)
