"""Atlases of real models, judged: `python docs/atlas_pages.py --source MODEL=FILE …`, without sources SmolLM2's.

1. `STUDIES` are models on the task of docs/howto/atlas.md; other queries are held out.
2. `il.head_atlas` measures every head, and removes each score's first heads on the held-out prompts.
3. The gallery gets the page of each model, and `howto/atlas.csv` what each score's first heads cost.

A run in `--out` resumes.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

import icl_lens as il
from icl_lens.measures.controlled_ablation_result import nats_text

DOCS = Path(__file__).parent
GALLERY, TABLE = DOCS / "gallery", DOCS / "howto" / "atlas.csv"
LINES = il.Template(separator="\n")
TASK = "animal-country"
SMOLLM2 = "smollm2-135m"


@dataclass(frozen=True)
class Study:
    """A model on the task, with four demonstrations of each class, one a line."""

    model: str
    labels: tuple[str, str]
    n: int
    """Prompts whose heads are read."""
    n_edited: int
    """Prompts on which heads are edited one by one, and as many held-out prompts."""
    n_sequences: int

    def prompts(self) -> tuple[list[il.Prompt], list[il.Prompt]]:
        """Return prompts to measure heads on, and prompts with other queries to remove them on."""
        options = {"labels": self.labels, "demonstrations": 4, "template": LINES}
        measured = il.load_task(TASK, n=self.n, **options)
        queries = {prompt.query for prompt in measured}
        drawn = il.load_task(TASK, n=8 * self.n, seed=1, **options)
        held_out = [prompt for prompt in drawn if prompt.query not in queries]
        return measured, held_out[: self.n_edited]


STUDIES = (
    Study(SMOLLM2, ("A", "B"), n=60, n_edited=24, n_sequences=40),
    Study("qwen2.5-coder-0.5b", ("bar", "foo"), n=24, n_edited=12, n_sequences=20),
)


def measured_atlas(study: Study, source: str, out: Path | None) -> il.results.HeadAtlas:
    """Return the atlas of a model, judged; it is called by its name, not by that of its file."""
    model = il.load_model(source)
    measured, held_out = (il.tokenize(model, half, template=LINES) for half in study.prompts())
    atlas = il.head_atlas(
        model,
        measured,
        held_out=held_out,
        n_sequences=study.n_sequences,
        n_edited=study.n_edited,
        run=il.Run(None if out is None else out / study.model),
    )
    return replace(atlas, model=atlas.model.replace(Path(source).name, study.model))


def removal_rows(study: Study, atlas: il.results.HeadAtlas) -> pd.DataFrame:
    """Return what removing each score's first heads costs, as text with 95% intervals."""
    rows = []
    for name in atlas.removal_frame()["score"]:
        removal = atlas.removals[name]
        losses = (removal.lost, removal.lost_by_random, removal.difference)
        rows.append((study.model, name, *map(nats_text, losses)))
    return pd.DataFrame(rows, columns=["model", "score", "lost", "random", "difference"])


def run(sources: dict[str, str], out: Path | None = None) -> None:
    """Measure the models that have a source, and replace their pages and their rows of the table."""
    for study in STUDIES:
        if study.model not in sources:
            continue
        atlas = measured_atlas(study, sources[study.model], out)
        print(study.model, atlas.removal_finding, atlas.finding, sep="\n")
        if out is not None:
            atlas.save(out / f"{study.model}.json")
        atlas.to_html(GALLERY / f"atlas-{study.model}.html")
        frames = [removal_rows(study, atlas)]
        if TABLE.exists():
            frames += [rows for name, rows in pd.read_csv(TABLE).groupby("model") if name != study.model]
        pd.concat(frames).sort_values("model", kind="stable").to_csv(TABLE, index=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", action="append", default=[], metavar="MODEL=FILE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    run(dict(pair.split("=") for pair in options.source) or {SMOLLM2: SMOLLM2}, options.out)
