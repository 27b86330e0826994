"""Option groups shared by several commands; each group is a panel of the help page."""

import re
import tempfile
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from rich.console import Console
from rich.text import Text
from typer import Option

from icl_lens.cli.console import PlainConsole, report_error
from icl_lens.cli.option_groups import reject_options
from icl_lens.errors import InputError

if TYPE_CHECKING:
    import torch

    from icl_lens.prompts.batch import PromptBatch
    from icl_lens.prompts.prompt import Prompt, Template


FinalNorm = Literal["frozen", "own"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Positions = Literal["last", "all"]
ReaderAt = Literal["last", "label", "text", "query", "other"]

PAPER_PROMPT, PAPER_ANSWER = "love : bar like : bar eight : foo two : foo one :", "foo"

SeedOption = Annotated[int, Option(help="Seed for prompts and random heads.")]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, its device and precision."""

    panel: ClassVar[str] = "Model"

    model: Annotated[
        str, Option("--model", "-m", help="Bundled model, folder, GGUF file or Hub name.")
    ] = "icl-mini"
    device: Annotated[
        str | None,
        Option(help="Device, e.g. cpu, cuda or cuda:1.", show_default="GPU if available"),
    ] = None
    dtype: Annotated[
        Dtype, Option(help="Precision of the weights; the readout uses at least float32.")
    ] = "float32"
    revision: Annotated[str | None, Option(help="Hub revision: branch, tag or commit.")] = None

    def load(self, *, default_device: "torch.device | None" = None) -> Any:
        """Load the model, a `TransformerBridge`, on `default_device` unless the user selects a
        device. A terminal shows that it is being loaded, on standard error.
        """
        import torch

        from icl_lens import load_model

        console = PlainConsole(stderr=True, highlight=False)
        if console.is_terminal:
            console.print(f"loading {self.model} …", style="dim")
        device = default_device if self.device is None else self.device
        return load_model(
            self.model, device=device, dtype=getattr(torch, self.dtype), revision=self.revision
        )

    def warn_of_words(self, console: Console, prompts: "Sequence[Prompt]") -> None:
        """Warn, on standard error, if a bundled model does not know the words of prompts that it
        has read.
        """
        from icl_lens.cli.own_data import unknown_words_warning

        warning = unknown_words_warning(self.model, prompts)
        if warning is not None and not console.quiet:
            report_error("icl-lens", warning)


ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


def unescape(text: str) -> str:
    r"""Replace the escapes `\n`, `\t` and `\\` by a line break, a tab and a backslash."""
    return re.sub(r"\\[nt\\]", lambda escape: ESCAPES[escape[0]], text)


def parse_prompt(text: str, answer: str | None) -> "Prompt":
    """Parse a prompt of the command line, with the escapes of `--separator` and `--template`.

    Raise InputError like `Prompt.parse`.
    """
    from icl_lens.prompts.prompt import Prompt

    return Prompt.parse(unescape(text), answer=answer)


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """How prompts are formatted and tokenized."""

    panel: ClassVar[str] = "Prompt format"

    template: Annotated[str, Option(help="Format of a demonstration; \\n and \\t are escapes.")] = (
        "{text} : {label}"
    )
    separator: Annotated[
        str | None,
        Option(
            help="Separator between demonstrations.",
            show_default="space or newline",
        ),
    ] = None
    prefix: Annotated[str, Option(help="Text before the first demonstration.")] = ""
    chat: Annotated[
        bool, Option("--chat", help="Write demonstrations as turns of the model's chat.")
    ] = False
    system: Annotated[
        str | None,
        Option(help="With --chat: system message.", show_default="the chat template's own"),
    ] = None
    bos: Annotated[
        bool | None,
        Option(
            "--bos/--no-bos",
            help="Add or omit a beginning-of-sequence token.",
            show_default="tokenizer's default",
        ),
    ] = None

    def prompt_template(self, model: Any = None) -> "Template":
        """Return the template of prompts, in which the query has the format of a demonstration up
        to the label.

        With --chat, it is the chat template of `model`, which is needed only then. Spaces before
        {label} are not part of the query.

        Raise InputError for an invalid template, for one with labels before texts, for one that
        ends in white space unless a separator is given (the default separator would be added to
        it), and for options of the other kind: --template, --separator or --prefix with --chat,
        --system without it.
        """
        from icl_lens.prompts.prompt import Template

        if self.chat:
            reject_options(
                self, "template", "separator", "prefix", reason="--chat has the chat template's own"
            )
            return Template.chat(model, system=self.system)
        reject_options(self, "system", reason="only --chat has a system message")
        demonstration = unescape(self.template)
        before, _, after = demonstration.partition("{label}")
        if "{label}" in demonstration and "{text}" in after:
            raise InputError(
                f"--template must have {{text}} before {{label}}, got {_quoted(demonstration)}; in "
                "Python, il.Template(demonstration, query) takes labels before texts"
            )
        gap = after[len(after.rstrip()) :]
        if self.separator is None and gap:
            raise InputError(
                "--template must not end in white space without --separator, got "
                f"{_quoted(demonstration)}; use --template {_quoted(demonstration.rstrip())} "
                f"--separator {_quoted(gap)}"
            )
        separator = None if self.separator is None else unescape(self.separator)
        return Template(demonstration, before.rstrip(" "), separator, unescape(self.prefix))

    def tokenize_arguments(self, model: Any) -> dict[str, Any]:
        """Return the keyword arguments of `il.tokenize`."""
        return {"template": self.prompt_template(model), "prepend_bos": self.bos}

    def tokenize(self, model: Any, prompts: "Sequence[Prompt]") -> "PromptBatch":
        """Format and tokenize prompts.

        Pairs whose answers all begin with one token are left out, since the model cannot choose
        between them there; a sentence on standard error says so. Raise InputError if none is left.
        """
        from icl_lens.errors import quoted_list
        from icl_lens.prompts.batch import count_prompts
        from icl_lens.prompts.tokenize import tokenize

        batch = tokenize(model, prompts, **self.tokenize_arguments(model))
        # Labels that begin alike are compared where they part.
        if len(batch) > count_prompts(batch):
            return batch
        told_apart: list[int] = []
        alike: list[Prompt] = []
        for row, prompt in enumerate(batch.prompts):
            if len(prompt.labels) > 1 and int(batch.label_mask[row].sum()) < 2:
                alike.append(prompt)
            else:
                told_apart.append(row)
        if not alike:
            return batch
        reason = f"the answers, such as {quoted_list(alike[0].labels)}, begin with the same token"
        if not told_apart:
            raise InputError(f"the model cannot choose between answers of these prompts: {reason}")
        are_left_out = "prompt is" if len(alike) == 1 else "prompts are"
        report_error("icl-lens", f"{len(alike)} {are_left_out} left out, because {reason}.")
        return batch[told_apart]


def _quoted(text: str) -> str:
    """Return text as it is written in a shell: escaped, in single quotes."""
    for escape, character in reversed(ESCAPES.items()):
        text = text.replace(character, escape)
    return f"'{text}'"


def preview(batch: "PromptBatch", *, n: int | None = None, demonstrations: str = "") -> Text:
    """Return the first of n prompts (by default those of the batch) as the model reads it, to print
    before a run; `demonstrations` says how many they have.
    """
    from icl_lens.prompts.batch import count_in_words

    what = count_in_words(batch) if n is None else f"{n:,} prompts"
    if demonstrations:
        what += f", {demonstrations}"
    return Text(f"First of {what}:\n{batch.texts[0]}\n", "dim")


@dataclass(frozen=True, kw_only=True)
class ReadoutOptions(TokenOptions):
    """How prompts are formatted and tokenized, and how vectors are read out."""

    panel: ClassVar[str] = "Prompt format and readout"

    final_norm: Annotated[
        FinalNorm, Option(help="Final norm's scale: frozen at the final residual, or recomputed.")
    ] = "frozen"
    bias: Annotated[
        bool, Option("--bias/--no-bias", help="Include the final norm's shift and b_U.")
    ] = True

    def readout_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments `final_norm` and `bias`."""
        return {"final_norm": self.final_norm, "bias": self.bias}


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """The results page: its path, and whether to open it."""

    panel: ClassVar[str] = "Output"

    html: Annotated[Path | None, Option(help="Write a self-contained page.")] = None
    open_page: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False

    def check(self) -> None:
        """Raise InputError if an output file cannot be written."""
        from icl_lens.foundation.files import check_writable

        check_writable(*(path for name, path in vars(self).items() if name != "open_page"))

    def write(self, page: Callable[[], str]) -> Path | None:
        """Write the page to `--html` or, for `--open` alone, to a temporary file that is not
        deleted.

        Return None if neither is given. Raise InputError if the folder is not writable.
        """
        from icl_lens.foundation.files import write_text

        if self.html is None and not self.open_page:
            return None
        path = self.html or Path(tempfile.mkdtemp(prefix="icl-lens-")) / "page.html"
        write_text(path, page())
        return path

    def show(self, path: Path | None, console: Console) -> None:
        """Print the path of a page that was written and, with `--open`, open it in the browser."""
        if path is not None:
            console.print(f"Page: {path}", soft_wrap=True)
        if path is not None and self.open_page and not webbrowser.open(path.resolve().as_uri()):
            console.print("No browser could be started; open the page manually.")


@dataclass(frozen=True, kw_only=True)
class FileOptions(PageOptions):
    """The results page and the JSON file."""

    json_file: Annotated[Path | None, Option("--json", help="Write all numbers as JSON.")] = None

    def write_json(self, text: Callable[[], str]) -> None:
        """Write the text to `--json`, if given."""
        from icl_lens.foundation.files import write_text

        if self.json_file is not None:
            write_text(self.json_file, text())

    def show(self, path: Path | None, console: Console) -> None:
        """Also print the path of the JSON file."""
        if self.json_file is not None:
            console.print(f"JSON: {self.json_file}", soft_wrap=True)
        super().show(path, console)
