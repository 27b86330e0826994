"""Options that several commands share, in groups, and what each group loads: help shows a panel for each."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from icl_lens.cli.malloc import keep_freed_memory

if TYPE_CHECKING:
    from rich.text import Text

    from icl_lens.prompts.batch import PromptBatch
    from icl_lens.prompts.prompt import Prompt, Template


class LayoutChoice(StrEnum):
    order = "order"
    reorder = "reorder"
    imbalanced = "imbalanced"
    random = "random"


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
DeviceOption = Annotated[
    str | None, typer.Option(help="Where to run: cpu, cuda, cuda:1. Default: a GPU if there is one.")
]
DtypeOption = Annotated[DtypeChoice, typer.Option(help="The weights' precision; the readout is float32 at least.")]
RevisionOption = Annotated[str | None, typer.Option(help="Hub revision: branch, tag or commit.")]
TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task",
        "-t",
        help="Word task (FALSE-TRUE categories) or sentence dataset.",
        show_default="with --path, the file's name",
    ),
]
AnswerOption = Annotated[
    str | None, typer.Option("--answer", "-a", help="The right label; default: what the model says.")
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and how its weights are held."""

    panel: ClassVar[str] = "Model"

    model: ModelOption = "icl-mini"
    device: DeviceOption = None
    dtype: DtypeOption = DtypeChoice.float32
    revision: RevisionOption = None

    def load(self, *, default_device: str | None = None) -> Any:
        """The model, on `default_device` unless the user names one."""
        return load(
            self.model,
            device=default_device if self.device is None else self.device,
            dtype=self.dtype,
            revision=self.revision,
        )


class SharedPrefixChoice(StrEnum):
    error = "error"
    append = "append"


class ByChoice(StrEnum):
    increase = "increase"
    contrast = "contrast"


DEFAULT_TEMPLATE = "{text} : {label}"
ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


def unescape(written: str) -> str:
    r"""What the user wrote with `\n` and `\t` as a line break and a tab; `\\` is a backslash."""
    return re.sub(r"\\[nt\\]", lambda found: ESCAPES[found[0]], written)


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """How prompts are written, and become tokens."""

    panel: ClassVar[str] = "Reading"

    template: Annotated[
        str, typer.Option(help="How a demonstration is written; \\n and \\t are a line break and a tab.")
    ] = DEFAULT_TEMPLATE
    separator: Annotated[
        str | None, typer.Option(help="What stands between demonstrations.", show_default="a blank")
    ] = None
    prefix: Annotated[str, typer.Option(help="What stands before the first demonstration.")] = ""
    shared_prefix: Annotated[
        SharedPrefixChoice,
        typer.Option(help="Labels that begin with the same tokens: an error, or those are appended to the prompt."),
    ] = SharedPrefixChoice.error
    bos: Annotated[
        bool | None,
        typer.Option(
            "--bos/--no-bos",
            help="Force or forbid a beginning-of-sequence token.",
            show_default="the tokenizer's own habit",
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
        """Whether these are the defaults, which mean nothing for a text without demonstrations."""
        asked = (self.template, self.separator, self.prefix, self.shared_prefix)
        return asked == (DEFAULT_TEMPLATE, None, "", SharedPrefixChoice.error)

    def written(self) -> "Template":
        """The template that prompts are written by; the query is written as far as its label.

        Raises InputError for a template that no prompt can be written by, or that ends in white space to which the
        default separator would be added.
        """
        from icl_lens.errors import InputError
        from icl_lens.prompts.prompt import Template

        demonstration = self.demonstration
        _, found, after = demonstration.partition("{label}")
        if self.separator is None and found and after != after.rstrip():
            kept, gap = demonstration.rstrip(), after[len(after.rstrip()) :]
            raise InputError(
                f"the template {_shell(demonstration)} ends in white space, to which the default separator adds a "
                f"blank, so that all demonstrations but the first begin with it; write --template {_shell(kept)} "
                f"--separator {_shell(gap)}"
            )
        query = demonstration.partition("{label}")[0].rstrip(" ")
        return Template(demonstration, query, self.separator_text, unescape(self.prefix))

    def template_kwargs(self) -> dict[str, Any]:
        """What `explain` is told of how a prompt is written; nothing where that is the default."""
        return {} if self.is_default else {"template": self.written(), "shared_prefix": self.shared_prefix.value}

    def tokenize(self, model: Any, prompts: "Sequence[Prompt]") -> "PromptBatch":
        """The prompts as these options write them."""
        from icl_lens.prompts.tokenize import tokenize

        return tokenize(
            model,
            prompts,
            template=self.written(),
            prepend_bos=self.bos,
            shared_prefix=self.shared_prefix.value,
        )


def _shell(text: str) -> str:
    for escaped, meant in reversed(ESCAPES.items()):
        text = text.replace(meant, escaped)
    return f"'{text}'"


def preview(batch: "PromptBatch") -> "Text":
    """The first prompt as the model reads it, to be shown before a run."""
    from rich.text import Text

    return Text(f"First of {len(batch):,} prompts:\n{batch.texts[0]}\n", "dim")


@dataclass(frozen=True, kw_only=True)
class ReadoutOptions(TokenOptions):
    """The conventions of the readout, and how prompts become tokens."""

    final_norm: Annotated[
        FinalNormChoice, typer.Option(help="Scale of the final norm: frozen at the final residual, or own.")
    ] = FinalNormChoice.frozen
    bias: Annotated[
        bool, typer.Option("--bias/--no-bias", help="Read out with or without the final norm's shift and b_U.")
    ] = True


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """The page that shows what was found: where it is written, and whether it is opened."""

    panel: ClassVar[str] = "Output"

    html: Annotated[Path | None, typer.Option(help="Write a self-contained page.")] = None
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser; without --html, from a temporary file.")
    ] = False

    @property
    def wanted(self) -> bool:
        return self.html is not None or self.open_page


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """A task: how its prompts are drawn and arranged."""

    panel: ClassVar[str] = "Task"

    task: TaskOption = None
    classes: Annotated[ClassesChoice, typer.Option(help="Two classes per prompt, or all of a sentence dataset's.")] = (
        ClassesChoice.binary
    )
    layout: Annotated[LayoutChoice, typer.Option(help="Where the true demonstrations stand.")] = LayoutChoice.order
    demonstrations: Annotated[int, typer.Option(help="Demonstrations of each class.")] = 2
    path: Annotated[
        Path | None, typer.Option(help="Word list (.json), or file or folder of sentences (.jsonl, .csv, .parquet).")
    ] = None
    columns: Annotated[str, typer.Option(help="The columns of texts and labels in your own sentences.")] = "text,label"
    split: Annotated[str, typer.Option(help="The split that queries are from.")] = "test"
    max_words: Annotated[int | None, typer.Option(help="Leave out longer texts.")] = None
    labels: Annotated[
        str | None,
        typer.Option(help="Label words, the true class's first; with --classes all in order of the classes' names."),
    ] = None

    @property
    def name(self) -> str | None:
        """What the task is called: of your own file or folder, its name where none is given."""
        return self.path.stem if self.task is None and self.path is not None else self.task

    def check_no_task(self) -> None:
        """Raises InputError for a task's options where there is no task that they could be about."""
        own = [field.name for field in fields(self)]
        reject_options(*own, reason="it is a task's, and a prompt says all of it itself")

    def sample_prompts(self, n: int, *, seed: int, conflicting: "Sequence[str | None]") -> "list[Prompt]":
        """The task's first prompts; none where no task is asked for.

        Raises InputError where a prompt or an answer (`beside`) is given as well, or a task's options without a task.
        """
        from icl_lens.errors import InputError

        if self.name is None:
            self.check_no_task()
            return []
        if any(given is not None for given in conflicting):
            raise InputError(
                "a task has its own prompts and answers: give either a prompt, or --task or --path, and --answer, "
                "--text and --target only without a task"
            )
        return self.prompts(n=n, seed=seed)

    def prompts(self, *, n: int, seed: int, balanced: bool = False) -> "list[Prompt]":
        """The prompts of `load_task`.

        Raises InputError, also where no task is named, and for options that would do nothing.
        """
        from icl_lens.errors import InputError
        from icl_lens.prompts.tasks import load_task

        if self.name is None:
            raise InputError("give --task, for instance --task sentiment-number, or your own sentences with --path")
        text, _, label = self.columns.partition(",")
        if not (text and label) or "," in label:
            raise InputError(
                f"--columns {self.columns!r} must name two columns, texts and labels, such as review,stars"
            )
        self._check_used(self.name)
        return load_task(
            self.name,
            n=n,
            seed=seed,
            balanced=balanced,
            classes=self.classes.value,
            layout=self.layout.value,
            demonstrations=self.demonstrations,
            path=self.path,
            columns=(text.strip(), label.strip()),
            split=self.split,
            max_words=self.max_words,
            labels=None if self.labels is None else [word.strip() for word in self.labels.split(",")],
        )

    def _check_used(self, name: str) -> None:
        """Raises InputError for options that would change nothing about this task."""
        from icl_lens.prompts.tasks import SENTENCE_TASKS

        if (self.path is None and name not in SENTENCE_TASKS) or (self.path and self.path.suffix == ".json"):
            reject_options("columns", "split", "max_words", "classes", reason="a word task has no such thing")
        elif self.path is None:
            reject_options("columns", reason="the columns of a dataset of the Hub are known")
        elif self.path.is_file():
            reject_options("split", reason="a single file has one split")


def reject_options(*names: str, reason: str) -> None:
    """Raises InputError if the user gave one of these parameters, which would be ignored."""
    from icl_lens.errors import InputError

    # Click itself, or the copy of it that newer versions of Typer bring along.
    click = typer.Context.__mro__[1].__module__.rpartition(".")[0]
    context = import_module(f"{click}.globals").get_current_context(silent=True)
    if context is None:
        return
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            option = max(parameter.opts, key=len)
            raise InputError(f"{option} has nothing to do here: {reason}; leave it out")


def load(name: str, *, device: str | None, dtype: DtypeChoice, revision: str | None) -> Any:
    """The model the options name, in a process that keeps the memory its passes free."""
    import torch

    from icl_lens import load_model

    model = load_model(name, device=device, dtype=getattr(torch, dtype.value), revision=revision)
    keep_freed_memory()  # not what loading takes for a moment
    return model
