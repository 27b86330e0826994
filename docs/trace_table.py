"""Trace what prompts hold, on real models: the table of docs/howto/trace.md. `python docs/refresh.py trace`.

1. `STUDIES` are models on the tasks that they do, as in `experiments/publish.py`.
2. `il.trace` exchanges the query, the texts and the labels of each study's prompts.
3. `trace_maps.csv` has every number; `trace.csv` one line per study and donors, with the layers that the result names.

`--source MODEL=FILE` loads a model from a file, `--only MODEL` measures one model, and runs in `--out` resume.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import icl_lens as il
from icl_lens.analyses.trace_result import stretches_in_words
from icl_lens.result.number_format import interval_text

HOWTO = Path(__file__).parent / "howto"
MAPS, TABLE = HOWTO / "trace_maps.csv", HOWTO / "trace.csv"
WORDS = Path(__file__).parent.parent / "experiments" / "words.json"
SMOLLM2, QWEN, QWEN_LARGE = "smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
SOURCES = {
    SMOLLM2: SMOLLM2,
    QWEN: "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    QWEN_LARGE: "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
}
LINES = il.Template(separator="\n")
STUDY_COLUMNS = ["model", "task", "donors"]


@dataclass(frozen=True)
class Study:
    """A model on a task, with four demonstrations of each class, one a line."""

    model: str
    task: str
    labels: tuple[str, str]
    n: int
    layers: tuple[int, ...]
    donors: tuple[str, ...] = ("query", "labels", "texts")
    path: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.task}, {'/'.join(self.labels)}"

    def prompts(self) -> list[il.Prompt]:
        return il.load_task(self.task, self.path, n=self.n, labels=self.labels, demonstrations=4, template=LINES)


FOO, LETTERS = ("bar", "foo"), ("B", "A")
STUDIES = (
    Study(SMOLLM2, "animal-country", LETTERS, 12, tuple(range(0, 30, 4))),
    Study(SMOLLM2, "joy-number", FOO, 12, tuple(range(0, 30, 4)), path=WORDS),
    Study(QWEN, "animal-country", FOO, 10, tuple(range(0, 24, 4))),
    Study(QWEN, "sentiment-number", FOO, 10, tuple(range(0, 24, 4))),
    Study(QWEN_LARGE, "animal-country", FOO, 10, tuple(range(0, 28, 5))),
    Study(QWEN_LARGE, "sentiment-number", FOO, 10, tuple(range(0, 28, 5))),
)
BATCH_SIZE = 2
"""Prompts at a time: a run that is interrupted loses no more."""


def run(sources: dict[str, str], only: str | None = None, out: Path | None = None) -> None:
    """Trace all studies, or those of one model, and replace their rows in both files."""
    model_name, model = "", None
    for study in STUDIES:
        if only not in (None, study.model):
            continue
        if study.model != model_name:
            model = None  # two models at a time may not fit
            model_name, model = study.model, il.load_model(sources[study.model])
        batch = il.tokenize(model, study.prompts(), template=LINES)
        for donors in study.donors:
            folder = None if out is None else out / study.model / study.task / donors
            traced = il.trace(
                model, batch, donors, layers=study.layers, template=LINES, run=il.Run(folder, batch_size=BATCH_SIZE)
            )
            print(f"{study.model}, {study.name}, {donors}: {traced.finding}", flush=True)
            names = dict(zip(STUDY_COLUMNS, (study.model, study.name, donors), strict=True))
            store(MAPS, traced.to_frame().assign(**names))
            store(TABLE, pd.DataFrame([names | line(traced)]))


def line(traced: Any) -> dict[str, Any]:
    """Return what donors cost, and where the result says that their difference is held."""
    whole = traced.whole
    return {
        "prompts": len(traced.queries),
        "donors cost, nats": interval_text(whole.value, whole.low, whole.high),
        "held in layers (largest loss beyond the control, nats)": "; ".join(held(traced)) or "not shown",
    }


def held(traced: Any) -> Iterator[str]:
    """Yield each role that holds the difference: its layers, and the largest loss beyond the control."""
    frame = traced.to_frame()
    for (_, role), layers in traced.carried.items():
        if layers:
            is_there = (frame["role"] == role) & frame["layer"].isin(layers)
            largest = frame.loc[is_there, "difference"].max()
            yield f"{role} {stretches_in_words(layers, traced.layers)} ({largest:.2f})"


def store(path: Path, rows: pd.DataFrame) -> None:
    """Put rows into a csv file, in the order of `STUDIES`, in place of those of the same study and donors."""
    rows = rows[[*STUDY_COLUMNS, *rows.columns.drop(STUDY_COLUMNS)]]
    if path.exists():
        earlier = pd.read_csv(path)
        is_replaced = earlier.set_index(STUDY_COLUMNS).index.isin(rows.set_index(STUDY_COLUMNS).index)
        rows = pd.concat([earlier[~is_replaced], rows], ignore_index=True)
    order = []
    for study in STUDIES:
        order += [(study.model, study.name, donors) for donors in study.donors]
    places = rows[STUDY_COLUMNS].apply(lambda row: order.index(tuple(row)), axis=1)
    rows = rows.iloc[np.argsort(places, kind="stable")]
    rows.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--source", action="append", default=[], help="MODEL=FILE")
    parser.add_argument("--only", choices=SOURCES, help="the one model to measure")
    parser.add_argument("--out", type=Path, help="folder of runs, which resume")
    options = parser.parse_args(arguments)
    named = dict(source.split("=", 1) for source in options.source)
    run(SOURCES | named, options.only, options.out)


if __name__ == "__main__":
    main()
