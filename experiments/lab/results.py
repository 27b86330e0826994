"""Result folders: what is in them, whether they are done, and writing them.

Their bytes depend on the configuration, the program and the packages, not on when or how fast they were made.
"""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.lab.competence import Competence
from experiments.lab.experiment import Caption
from experiments.lab.located import LocatedHead
from experiments.lab.study import Ranking
from experiments.lab.verdict import Verdict
from icl_lens.errors import InputError
from icl_lens.files import other_configuration, remove_halves, replacing, write_text

RESULT = "result.json"
"""Written last: a folder with it is complete."""
SECONDS = "seconds.json"
"""What took how long, where an experiment measures that. Times differ from run to run: no other file has any."""


@dataclass(frozen=True, kw_only=True)
class Result(Caption):
    """result.json: everything about one experiment on one model and task but its table and figure."""

    model: str
    task: str
    configuration: dict[str, Any]
    verdict: Verdict
    """With heads located by the paper's ranking."""
    contrast: Verdict | None
    """With heads located by contrast; None where the claim is about no located heads, and the verdict the same."""
    competence: Competence
    heads: tuple[LocatedHead, ...]
    """Those located, by either ranking; none where no claim of the run was about located heads."""
    versions: dict[str, str]

    @property
    def verdicts(self) -> dict[Ranking, Verdict]:
        """By what heads are located: one verdict or two."""
        found: dict[Ranking, Verdict] = {"increase": self.verdict}
        if self.contrast is not None:
            found["contrast"] = self.contrast
        return found

    def to_json(self) -> str:
        """The result as JSON; numbers that are not finite become null."""
        return json.dumps(_finite(asdict(self)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> "Result":
        """The result in a folder; raises InputError if it is no result of this program."""
        path = folder / RESULT
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(raw, dict):
                raise TypeError("it is no object")
            for name in ("configuration", "verdict", "competence"):
                if not isinstance(raw[name], dict):
                    raise TypeError(f"its {name} is no object")
            raw["verdict"] = Verdict(**_numbers(raw["verdict"]))
            raw["contrast"] = None if raw["contrast"] is None else Verdict(**_numbers(raw["contrast"]))
            raw["heads"] = tuple(LocatedHead(**one) for one in raw["heads"])
            raw["competence"] = Competence(**_numbers(raw["competence"]))
            raw.setdefault("departs", "")  # there are results from before there was such a caption
            return cls(**{field.name: raw[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(
                f"{str(path)!r} cannot be read as a result ({type(error).__name__}: {error}); remove its folder"
            ) from error


def is_done(folder: Path, configuration: dict[str, Any], *, overwrite: bool) -> bool:
    """Whether a folder holds the result of this configuration.

    Raises InputError if it holds the result of another one, unless that may be overwritten.
    """
    if not (folder / RESULT).exists():
        return False
    remedy = "choose another --out, or allow it with --overwrite"
    other = other_configuration(folder, Result.read(folder).configuration, configuration, remedy=remedy)
    if other is not None and not overwrite:
        raise other
    return other is None


def check_folder(out: Path) -> None:
    """Makes the folder for results; raises InputError if it cannot be made or written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write results to {str(out)!r}: {error.strerror or error}; choose another folder with --out"
        ) from error


def figure_name(ranking: str) -> str:
    """The stem of a figure's files: that of the paper's ranking is the figure."""
    return "figure" if ranking == "increase" else f"figure-{ranking}"


def save(
    folder: Path,
    result: Result,
    table: pd.DataFrame,
    figures: Mapping[Ranking, Figure],
    seconds: Mapping[str, float] | None = None,
) -> None:
    """Writes table.parquet, table.csv, a figure for each ranking (figure_name; .png, .pdf) and, last, result.json.

    Measured times are written beside it, with three digits. Half-written files of a run that was killed are removed.
    """
    check_folder(folder)
    remove_halves(folder)
    (folder / RESULT).unlink(missing_ok=True)
    with replacing(folder / "table.parquet") as path:
        table.to_parquet(path, index=False)
    with replacing(folder / "table.csv") as path:
        table.to_csv(path, index=False, float_format="%.6g", lineterminator=os.linesep)
    save_figures(folder, figures)
    if seconds is not None:
        rounded = {name: float(f"{value:.3g}") for name, value in seconds.items()}
        write_text(folder / SECONDS, json.dumps(rounded, indent=2, ensure_ascii=False) + "\n")
    save_result(folder, result)


def save_figures(folder: Path, figures: Mapping[Ranking, Figure]) -> None:
    """Writes a figure for each ranking, .png and .pdf; the same figure is the same bytes: no time of writing."""
    for ranking, figure in figures.items():
        for kind, dateless in (("png", None), ("pdf", {"CreationDate": None})):
            with replacing(folder / f"{figure_name(ranking)}.{kind}") as path:
                figure.savefig(path, dpi=200, bbox_inches="tight", metadata=dateless)


def save_result(folder: Path, result: Result) -> None:
    """Writes result.json."""
    write_text(folder / RESULT, result.to_json())


def read_seconds(folder: Path) -> dict[str, float]:
    """The times measured beside a result; none where it has none. Raises InputError for a file that holds none."""
    path = folder / SECONDS
    if not path.exists():
        return {}
    try:
        return {str(name): float(value) for name, value in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{str(path)!r} cannot be read as times ({type(error).__name__}); remove it") from error


def read_all(out: Path) -> list[tuple[Path, Result]]:
    """Every complete result under a folder, <model>/<task>/<id>; raises InputError if there is none."""
    paths = sorted(out.glob(f"*/*/*/{RESULT}"))
    if not paths:
        raise InputError(
            f"there are no results under {str(out)!r}; run experiments first: python -m experiments run --all"
        )
    return [(path.parent, Result.read(path.parent)) for path in paths]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(raw: dict[str, Any]) -> dict[str, Any]:
    """null back to NaN."""
    return {key: math.nan if value is None else value for key, value in raw.items()}
