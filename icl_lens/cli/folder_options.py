"""The output folder of a command whose run can be resumed."""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Option

from icl_lens.cli.console import PlainConsole
from icl_lens.cli.options import ModelOptions, TokenOptions
from icl_lens.cli.task_options import TaskOptions
from icl_lens.errors import InputError

if TYPE_CHECKING:
    from icl_lens.prompts.prompt import Prompt
    from icl_lens.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class FolderOptions:
    """The output folder of a resumable run."""

    panel: ClassVar[str] = "Output"

    out: Annotated[
        Path | None,
        Option("--out", "-o", help="Output folder; an interrupted run resumes from it."),
    ] = None

    @contextmanager
    def running(self) -> Iterator[tuple["Run", PlainConsole]]:
        """Yield the run with this folder, and a console that is quiet except in the main process.

        Warnings are printed. On Ctrl-C, end the run with a line that explains how to resume it,
        and exit code 130. An InputError usually occurs in all processes and should be reported
        once. The other processes therefore wait five seconds before they raise it: if the main
        process reports it, too, the launcher ends them before that.
        """
        from icl_lens.runs.folder import CorruptChunk
        from icl_lens.runs.run import Run

        distributed = Run().distributed
        is_main = distributed.is_main
        console = PlainConsole(stderr=True, quiet=not is_main, soft_wrap=True, highlight=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", CorruptChunk)
                warnings.showwarning = lambda message, *_, **__: console.print(
                    f"icl-lens: {message}"
                )
                yield Run(self.out), PlainConsole(quiet=not is_main)
        except InputError as error:
            if is_main:
                raise
            time.sleep(5)
            raise InputError(f"process {distributed.rank} of {distributed.size}: {error}") from None
        except KeyboardInterrupt:
            hint = (
                ""
                if self.out is None
                else f"; rerun the same command to resume from {str(self.out)!r}"
            )
            console.print(f"icl-lens: interrupted{hint}")
            raise SystemExit(130) from None

    def about(
        self,
        task: TaskOptions,
        model: ModelOptions,
        tokens: TokenOptions,
        *,
        prompts: "Sequence[Prompt]",
        n: int,
        seed: int,
    ) -> dict[str, Any]:
        """Return what the folder's manifest says about the model and the prompts."""
        template = replace(
            tokens, chat=False, system=None
        ).prompt_template()  # that of a chat is the model's
        template = template.for_prompts([] if tokens.chat else prompts)
        return {
            "model": model.model,
            "revision": model.revision,
            "dtype": model.dtype,
            "task": task.name or "",
            "n": n,
            "seed": seed,
            "layout": task.layout,
            "demonstrations": task.demonstrations,
            "path": None if task.path is None else str(task.path),
            "columns": None if task.columns is None else task.columns.replace(" ", ""),
            "split": task.split,
            "max_words": task.max_words,
            "classes": task.classes,
            "template": template.demonstration,
            "separator": template.separator,
            "prefix": template.prefix,
            "prepend_bos": tokens.bos,
            # Stored only if they differ from the default, so that older folders stay valid.
            **({"chat": tokens.system or True} if tokens.chat else {}),
            **({"pairs": True} if task.has_pairs else {}),
        }
