"""Options of commands that test heads: which heads, or how many to locate."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Option

from icl_lens.cli.console import progress
from icl_lens.errors import InputError
from icl_lens.foundation.defaults import N_LOCATED
from icl_lens.foundation.ranking_scores import LOCATING_SCORE, Score

if TYPE_CHECKING:
    from icl_lens.models.head import Head
    from icl_lens.prompts.batch import PromptBatch

NO_HEADS = "--heads must name at least one head, e.g. L1H2,L3H0"
ByOption = Annotated[
    Score | None,
    Option(help="Score that ranks heads.", show_default="contrast; increase without other labels"),
]
LocatingByOption = Annotated[
    Score | None, Option(help="Score that locates heads.", show_default=LOCATING_SCORE)
]


@dataclass(frozen=True, kw_only=True)
class HeadChoice:
    """Heads that the user names, or how many to locate."""

    panel: ClassVar[str] = "Heads"

    heads: Annotated[
        str | None,
        Option(help="Heads to test: L1H2,L3H0 or heads.csv.", show_default="located heads"),
    ] = None
    k: Annotated[
        int | None,
        Option(
            "--top",
            "-k",
            min=1,
            help="Number of heads to locate.",
            show_default=f"{N_LOCATED}, at most half of all",
        ),
    ] = None

    def choose(
        self, model: Any, prompts: "PromptBatch", *, by: Score | None = None
    ) -> "tuple[list[Head], str]":
        """Return the heads named by the options or located on the prompts, and how they were
        chosen.
        """
        from icl_lens.measures.locate import locate, with_predicted_answers
        from icl_lens.models.view import ModelView
        from icl_lens.runs.run import Run

        if self.heads is not None:
            if by is not None:
                raise InputError("pass either --heads, or --by to locate them, not both")
            names = head_names(self.heads)
            if not names:
                raise InputError(f"{NO_HEADS}; omit it to locate heads")
            return [ModelView.of(model).check_head(name) for name in names], "named in --heads"
        by = by or LOCATING_SCORE
        k = self.k or min(N_LOCATED, len(ModelView.of(model).heads()) // 2)
        with progress() as report:
            answered = with_predicted_answers(model, prompts)
            run = Run(progress=report)
            located = locate(model, answered, by=by, k=k, other_scores=False, run=run)
        return located.heads, f"located by {by}"


def head_names(text: str) -> list[str]:
    """Return the heads of an option: names such as "L1H2,L3H0", or the column `name` of a table
    that `icl-lens locate --out` has written.

    Raise InputError for pairs in parentheses, and for a file that is missing or has no such column.
    """
    if "(" in text:
        raise InputError(f"--heads must be names such as L1H2,L3H0, got {text!r}")
    if not text.endswith((".csv", ".parquet")):
        return list(dict.fromkeys(text.replace(",", " ").split()))
    from icl_lens.prompts.datasets import read_files

    rows = list(read_files([Path(text)]).rows)
    if not all("name" in row for row in rows):
        raise InputError(
            f"{text!r} must have the column 'name' with heads such as L1H2; pass heads.csv of the "
            "folder that icl-lens locate --out has written"
        )
    return list(dict.fromkeys(str(row["name"]) for row in rows))


def located_on(locating: "PromptBatch", testing: "PromptBatch") -> str:
    """Return the end of a sentence about located heads: on how many prompts, and how many queries
    also occur here.
    """
    located = {prompt.query for prompt in locating.prompts}
    n_shared = len(located.intersection(prompt.query for prompt in testing.prompts))
    queries = "with other queries"
    if n_shared:
        verb = "occurs" if n_shared == 1 else "occur"
        queries = f"{n_shared} of their {len(located)} queries also {verb} here"
    return f" on {len(locating)} other prompts ({queries})"
