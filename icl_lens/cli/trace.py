"""`icl-lens trace`: exchange what is at each layer and token role for what other prompts have
there.
"""

import shlex
import sys
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from typer import Option

from icl_lens.cli.console import PlainConsole, progress
from icl_lens.cli.folder_options import FolderOptions
from icl_lens.cli.option_groups import grouped
from icl_lens.cli.options import FileOptions, ModelOptions, SeedOption, TokenOptions
from icl_lens.cli.task_options import TaskOptions
from icl_lens.errors import InputError


@dataclass(frozen=True, kw_only=True)
class TracedTask(TaskOptions):
    """A task whose prompts are traced."""

    n: Annotated[int, Option("--n", "-n", min=2, help="Number of prompts.")] = 40
    check: Annotated[
        bool, Option("--check/--no-check", help="First report what the model does on the task.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """What is exchanged, and where."""

    panel: ClassVar[str] = "Exchanges"

    donors: Annotated[
        Literal["query", "texts", "labels"] | None,
        Option(help="What other prompts have exchanged.", show_default="query"),
    ] = None
    mean_over: Annotated[
        str | None,
        Option(help="Tasks whose mean takes the place instead, e.g. antonyms,present-past."),
    ] = None
    sites: Annotated[str, Option(help="Sites, e.g. resid_pre,attn_out,mlp_out.")] = "resid_pre"
    layers: Annotated[
        str | None, Option(help="Layers, e.g. 0,5,10.", show_default="up to 15, evenly spaced")
    ] = None
    method: Annotated[
        Literal["exact", "gradient"], Option(help="Exchange, or estimate what exchanges cost.")
    ] = "exact"
    checked: Annotated[
        int | None,
        Option(min=0, help="Prompts exchanged to check estimates.", show_default="8"),
    ] = None

    def check(self) -> None:
        """Raise InputError for options that have no effect."""
        if self.mean_over is not None and self.donors is not None:
            raise InputError("pass either --donors or --mean-over, not both")
        if self.mean_over is not None and self.method != "exact":
            raise InputError("--mean-over needs --method exact: means are not estimated")
        if self.checked is not None and self.method == "exact":
            raise InputError(
                "--checked has no effect with --method exact, which exchanges all prompts; add "
                "--method gradient"
            )

    @property
    def site_names(self) -> list[Any]:
        return [name.strip() for name in self.sites.split(",") if name.strip()]

    @property
    def layer_numbers(self) -> list[int] | None:
        """The layers; raise InputError unless they are integers."""
        if self.layers is None:
            return None
        try:
            return [int(layer) for layer in self.layers.split(",")]
        except ValueError:
            raise InputError(
                f"--layers must be layers such as 0,5,10, got {self.layers!r}"
            ) from None


@grouped
def trace(
    files: FileOptions,
    folder: FolderOptions,
    traced: TraceOptions,
    task: TracedTask,
    tokens: TokenOptions,
    model: ModelOptions,
    seed: SeedOption = 0,
) -> None:
    """Trace where a model holds the query's class, the texts' classes, or the labels, by layer and
    token role.

    What is at a site (the residual stream before a layer, by default) of the texts, labels,
    separators, query or last token is exchanged for what a prompt with another query, or with
    exchanged texts or labels, has there. Prompts with other texts of the same class are the
    control. With --mean-over, the mean over other tasks takes its place, without a control.
    """
    from icl_lens.analyses.trace import N_CHECKED
    from icl_lens.analyses.trace import trace as trace_prompts
    from icl_lens.report.renderers import page as page_of
    from icl_lens.runs.run import Run

    files.check()
    traced.check()
    console = PlainConsole()
    loaded, batch = task.start(console, model, tokens, n=task.n, seed=seed)
    behavior = task.print_behavior(console, loaded, tokens, n=task.n, seed=seed)
    reference = None
    if traced.mean_over is not None:
        task_prompts = task.other_tasks(traced.mean_over, n=task.n, seed=seed)
        reference = [tokens.tokenize(loaded, prompts) for prompts in task_prompts]
    with progress() as report:
        result = trace_prompts(
            loaded,
            batch,
            traced.donors,
            reference=reference,
            sites=traced.site_names,
            layers=traced.layer_numbers,
            method=traced.method,
            n_checked=N_CHECKED if traced.checked is None else traced.checked,
            run=Run(folder.out, progress=report),
        )
    command = shlex.join(["icl-lens", *sys.argv[1:]])
    descriptions = {"text": result.text, "command": command, "behavior": str(behavior or "")}
    page = files.write(lambda: page_of(result, **descriptions))
    files.write_json(
        lambda: result.to_json(command=command, task_check=behavior and behavior.to_dict())
    )
    console.print(result)
    files.show(page, console)
