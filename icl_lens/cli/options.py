"""Option groups shared by several commands; each group is a panel of the help page."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from icl_lens.cli.malloc import keep_freed_memory

if TYPE_CHECKING:
    from rich.text import Text

    from icl_lens.prompts.batch import PromptBatch
    from icl_lens.prompts.prompt import Prompt, Template


Layout = Literal["order", "reorder", "imbalanced", "random"]
Classes = Literal["binary", "all"]
FinalNorm = Literal["frozen", "own"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
ModelOption = Annotated[str, typer.Option("--model", "-m", help="Bundled model, local folder or Hub name.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="Device, e.g. cpu, cuda or cuda:1.", show_default="GPU if available")
]
DtypeOption = Annotated[Dtype, typer.Option(help="Precision of the weights; the readout uses at least float32.")]
RevisionOption = Annotated[str | None, typer.Option(help="Hub revision: branch, tag or commit.")]
TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task",
        "-t",
        help="Word task (FALSE-TRUE categories) or sentence dataset.",
        show_default="file name of --path",
    ),
]
AnswerOption = Annotated[
    str | None, typer.Option("--answer", "-a", help="Correct label.", show_default="model's prediction")
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, its device and precision."""

    panel: ClassVar[str] = "Model"

    model: ModelOption = "icl-mini"
    device: DeviceOption = None
    dtype: DtypeOption = "float32"
    revision: RevisionOption = None

    def load(self, *, default_device: str | None = None) -> Any:
        """Load the model, on `default_device` unless the user selects a device."""
        return load(
            self.model,
            device=default_device if self.device is None else self.device,
            dtype=self.dtype,
            revision=self.revision,
        )


SharedPrefix = Literal["error", "append"]
By = Literal["increase", "contrast"]
DEFAULT_TEMPLATE = "{text} : {label}"
ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


def unescape(written: str) -> str:
    r"""Replace the escapes `\n`, `\t` and `\\` by a line break, a tab and a backslash."""
    return re.sub(r"\\[nt\\]", lambda found: ESCAPES[found[0]], written)


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """How prompts are formatted and tokenized."""

    panel: ClassVar[str] = "Reading"

    template: Annotated[str, typer.Option(help="Format of a demonstration; \\n and \\t are escapes.")] = (
        DEFAULT_TEMPLATE
    )
    separator: Annotated[str | None, typer.Option(help="Separator between demonstrations.", show_default="space")] = (
        None
    )
    prefix: Annotated[str, typer.Option(help="Text before the first demonstration.")] = ""
    shared_prefix: Annotated[
        SharedPrefix,
        typer.Option(help="If labels share a prefix: fail, or append it."),
    ] = "error"
    bos: Annotated[
        bool | None,
        typer.Option(
            "--bos/--no-bos",
            help="Force or forbid a beginning-of-sequence token.",
            show_default="tokenizer's default",
        ),
    ] = None

    @property
    def demonstration(self) -> str:
        return unescape(self.template)

    @property
    def separator_text(self) -> str:
        return " " if self.separator is None else unescape(self.separator)

    @property
    def is_default(self) -> bool:
        """Whether all options that affect only demonstrations have their defaults."""
        values = (self.template, self.separator, self.prefix, self.shared_prefix)
        return values == (DEFAULT_TEMPLATE, None, "", "error")

    def written(self) -> "Template":
        """Return the template of prompts; the query is formatted up to its label.

        Raises InputError for an invalid template, or one that ends in white space to which the default separator would
        be added.
        """
        from icl_lens.errors import InputError
        from icl_lens.prompts.prompt import Template

        demonstration = self.demonstration
        _, found, after = demonstration.partition("{label}")
        if self.separator is None and found and after != after.rstrip():
            kept, gap = demonstration.rstrip(), after[len(after.rstrip()) :]
            raise InputError(
                f"--template must not end in white space without --separator, got {_shell(demonstration)}; use "
                f"--template {_shell(kept)} --separator {_shell(gap)}"
            )
        query = demonstration.partition("{label}")[0].rstrip(" ")
        return Template(demonstration, query, self.separator_text, unescape(self.prefix))

    def template_kwargs(self) -> dict[str, Any]:
        """Return the template arguments of `explain`; empty for the defaults."""
        return {} if self.is_default else {"template": self.written(), "shared_prefix": self.shared_prefix}

    def tokenize(self, model: Any, prompts: "Sequence[Prompt]") -> "PromptBatch":
        """Format and tokenize prompts."""
        from icl_lens.prompts.tokenize import tokenize

        return tokenize(
            model,
            prompts,
            template=self.written(),
            prepend_bos=self.bos,
            shared_prefix=self.shared_prefix,
        )


def _shell(text: str) -> str:
    for escape, character in reversed(ESCAPES.items()):
        text = text.replace(character, escape)
    return f"'{text}'"


def preview(batch: "PromptBatch") -> "Text":
    """Return the first prompt as the model reads it, to print before a run."""
    from rich.text import Text

    return Text(f"First of {len(batch):,} prompts:\n{batch.texts[0]}\n", "dim")


@dataclass(frozen=True, kw_only=True)
class ReadoutOptions(TokenOptions):
    """Conventions of the readout, and how prompts are tokenized."""

    final_norm: Annotated[
        FinalNorm, typer.Option(help="Final norm's scale: frozen at the final residual, or recomputed.")
    ] = "frozen"
    bias: Annotated[bool, typer.Option("--bias/--no-bias", help="Include the final norm's shift and b_U.")] = True


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """The results page: its path, and whether to open it."""

    panel: ClassVar[str] = "Output"

    html: Annotated[Path | None, typer.Option(help="Write a self-contained page.")] = None
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False

    @property
    def wanted(self) -> bool:
        return self.html is not None or self.open_page


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """A task, and how its prompts are sampled and arranged."""

    panel: ClassVar[str] = "Task"

    task: TaskOption = None
    classes: Annotated[Classes, typer.Option(help="Two classes per prompt, or all of a dataset.")] = "binary"
    layout: Annotated[Layout, typer.Option(help="Position of demonstrations of the query's class.")] = "order"
    demonstrations: Annotated[int, typer.Option(help="Demonstrations per class.")] = 2
    path: Annotated[
        Path | None, typer.Option(help="Word list (.json), or sentences (.jsonl, .csv, .parquet, or folder).")
    ] = None
    columns: Annotated[str, typer.Option(help="Text and label columns of your sentences.")] = "text,label"
    split: Annotated[str, typer.Option(help="Split to draw queries from.")] = "test"
    max_words: Annotated[int | None, typer.Option(help="Skip texts with more words.")] = None
    labels: Annotated[
        str | None,
        typer.Option(help="Label words, true class first (all: alphabetical by class)."),
    ] = None

    @property
    def name(self) -> str | None:
        """The task's name; by default the stem of `path`."""
        return self.path.stem if self.task is None and self.path is not None else self.task

    def check_no_task(self) -> None:
        """Raise InputError for task options without a task."""
        own = [field.name for field in fields(self)]
        reject_options(*own, reason="it requires --task or --path")

    def sample_prompts(self, n: int, *, seed: int, conflicting: "Sequence[str | None]") -> "list[Prompt]":
        """Return the task's first prompts, or none without a task.

        Raises InputError if a prompt or an answer (`conflicting`) is also given, or for task options without a task.
        """
        from icl_lens.errors import InputError

        if self.name is None:
            self.check_no_task()
            return []
        if any(given is not None for given in conflicting):
            raise InputError(
                "a prompt, --answer, --text and --target have no effect with a task; remove them, or --task and --path"
            )
        return self.prompts(n=n, seed=seed)

    def prompts(self, *, n: int, seed: int, balanced: bool = False) -> "list[Prompt]":
        """Return the prompts of `load_task`.

        Raises InputError like `load_task`, without a task, and for options that have no effect.
        """
        from icl_lens.errors import InputError
        from icl_lens.prompts.tasks import load_task, named_task
        from icl_lens.prompts.text_task import TextTask

        if self.name is None:
            raise InputError("pass --task, e.g. --task sentiment-number, or your own sentences with --path")
        text, _, label = self.columns.partition(",")
        if not (text and label) or "," in label:
            raise InputError(f"--columns must name a text and a label column, e.g. review,stars, got {self.columns!r}")
        task: str | TextTask = self.name
        if isinstance(named_task(self.name, self.path), TextTask):
            if self.path is None:
                reject_options("columns", reason="the columns of Hub datasets are known")
            elif self.path.is_file():
                reject_options("split", reason="a single file has no splits")
            task = TextTask(
                self.name,
                self.path,
                columns=(text.strip(), label.strip()),
                split=self.split,
                max_words=self.max_words,
                classes=self.classes,
            )
        else:
            reject_options("columns", "split", "max_words", "classes", reason="it does not apply to word tasks")
        return load_task(
            task,
            n=n,
            seed=seed,
            balanced=balanced,
            layout=self.layout,
            demonstrations=self.demonstrations,
            path=None if isinstance(task, TextTask) else self.path,
            labels=None if self.labels is None else [word.strip() for word in self.labels.split(",")],
        )


def reject_options(*names: str, reason: str) -> None:
    """Raise InputError if the user passed one of these parameters, which would be ignored."""
    from icl_lens.errors import InputError

    # Click, or the copy bundled with newer versions of Typer.
    click = typer.Context.__mro__[1].__module__.rpartition(".")[0]
    context = import_module(f"{click}.globals").get_current_context(silent=True)
    if context is None:
        return
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            option = max(parameter.opts, key=len)
            raise InputError(f"{option} has no effect here: {reason}; remove it")


def load(name: str, *, device: str | None, dtype: Dtype, revision: str | None) -> Any:
    """Load a model, then keep memory that passes free in this process."""
    import torch

    from icl_lens import load_model

    model = load_model(name, device=device, dtype=getattr(torch, dtype), revision=revision)
    keep_freed_memory()  # not the temporary memory of loading
    return model
