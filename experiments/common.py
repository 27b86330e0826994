"""What the scripts share: their options, a model on a task with prompts in two halves, and the
table that they write.

1. `Study.from_command_line` reads the options. A study has a model, a task, and prompts in two
   halves: some of them choose heads, the others, with other queries, test these heads.
2. `Study.located_heads` are the heads that write most of the answer in the first half.
3. `Table.add` takes one number per prompt and its control, and keeps both means with the interval
   of their difference.
4. `Table.write` writes the rows as a csv file, and what they depend on as a json file.

Numbers per prompt are stored in run folders: a script that was interrupted goes on where it
stopped."""

import argparse
import hashlib
import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import torch
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import icl_lens as il

HERE = Path(__file__).parent
N_LOCATED = 12
"""Number of heads to locate: 12, as in the published paper, but at most an eighth of the model's
heads."""
N_RANDOM_SETS = 20
"""Number of random sets of heads that a set of heads is compared with."""
RANKINGS: tuple["Ranking", ...] = ("contrast", "increase")
"""How located heads are ranked: by what they add to the answer's log-odds or, as in the paper, to
its log p."""

PACKAGES = ("icl-lens", "torch", "transformers", "transformer-lens")


Ranking = Literal["contrast", "increase"]
Layout = Literal["random", "last", "first"]


class Scores(NamedTuple):
    """How prompts are answered under each of some sets of edits, [prompt set]."""

    log_odds: np.ndarray
    """log p(answer) − log p(other labels), nats."""
    correct: np.ndarray
    """1 where the answer is the most probable label, else 0."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A model on a task. Rows of `testing` are in the same order in every layout."""

    question: str
    """The script's name, which names its files."""
    model_source: str
    """What `il.load_model` loads."""
    model_name: str
    """The name in tables and folders."""
    task_source: str
    """What `il.load_task` loads: a name, or the path of a file."""
    path: str | None
    task_name: str
    labels: tuple[str, ...]
    """Empty for the task's own."""
    demonstrations: int
    """Demonstrations of each class; of a task of pairs, of all."""
    separator: str
    """What stands between demonstrations."""
    n: int
    """Maximum number of prompts in each half."""
    n_heads: int | None = None
    """How many heads are located; None is the number for the model's size."""
    seed: int
    out: Path

    @classmethod
    def from_command_line(
        cls, question: str, description: str, arguments: Sequence[str] | None = None
    ) -> "Study":
        """Return the study that the command line asks for."""
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        add = parser.add_argument
        add("--model", default="icl-mini", help="model name, path or Hub repository")
        add(
            "--task",
            default="animal-country",
            help="word task, dataset, or a file with the columns text and label",
        )
        add(
            "-n",
            type=int,
            default=200,
            help="most prompts to choose heads on, and as many to test them on",
        )
        add(
            "--heads",
            type=int,
            default=None,
            help="heads to locate; by default 12, at most an eighth of all",
        )
        add(
            "--labels",
            default="bar,foo",
            help="label words, not names of the classes where labels are exchanged; '' for the "
            "task's own, as pairs need",
        )
        add("--demonstrations", type=int, default=2, help="demonstrations of each class")
        add("--separator", default=" ", help=r"text between demonstrations; \n is a line break")
        add("--path", default=None, help="file or folder that the task is read from")
        add("--seed", type=int, default=0, help="seed of prompts and random heads")
        add("--name", default=None, help="model's name in tables and folders")
        add("--task-name", default=None, help="task's name in tables and folders")
        add("--out", type=Path, default=Path("results"), help="folder of tables and runs")
        options = parser.parse_args(arguments)
        labels = tuple(word.strip() for word in options.labels.split(",") if word.strip())
        task_name = Path(options.task).stem
        if labels:
            task_name += f", {'/'.join(labels)}"
        return cls(
            question=question,
            model_source=options.model,
            model_name=options.name or Path(options.model).stem,
            task_source=options.task,
            path=options.path,
            task_name=options.task_name or task_name,
            labels=labels,
            demonstrations=options.demonstrations,
            separator=options.separator.replace("\\n", "\n"),
            n=options.n,
            n_heads=options.heads,
            seed=options.seed,
            out=options.out,
        )

    def changed(self, **fields: Any) -> "Study":
        """Return the study with other fields, such as another seed, on the same model."""
        return replace(self, **fields).with_model(self.model)

    def with_model(self, model: Any) -> "Study":
        """Return the study on a model that has been loaded already."""
        study = replace(self)
        study.__dict__["model"] = model
        return study

    # Model and prompts

    @cached_property
    def model(self) -> Any:
        return il.load_model(self.model_source)

    def halves(self, layout: Layout = "random") -> list[il.PromptBatch]:
        """Return prompts to choose heads on and prompts to test them on, which share no query.

        The same texts are shown in every layout: in random order, or with the query's class last or
        first."""
        return [self.tokenize(half) for half in il.split_by_query(self.prompts(layout), self.n)]

    def prompts(
        self,
        layout: Layout = "random",
        *,
        demonstrations: int | None = None,
        same_length: bool = False,
    ) -> list[il.Prompt]:
        """Return three times as many prompts as a half has, because all prompts of a query are in
        the same half.

        With `same_length`, all texts have the same number of tokens.
        """
        return il.load_task(
            self.task_source,
            self.path,
            n=3 * self.n,
            seed=self.seed,
            layout=layout,
            labels=self.labels or None,
            demonstrations=demonstrations or self.demonstrations,
            same_length_for=self.model if same_length else None,
            template=self.template,
        )

    def halves_with(
        self, demonstrations: int, *, same_length: bool = False
    ) -> tuple[list[il.Prompt], list[il.Prompt]]:
        """Return prompts in random order with this many demonstrations of each class.

        Their texts differ from those of `halves`, but a query stays in its half.
        """
        half_of = dict.fromkeys(self.locating.queries, 0) | dict.fromkeys(self.testing.queries, 1)
        prompts = self.prompts(demonstrations=demonstrations, same_length=same_length)
        return il.split_by_query(prompts, self.n, assigned=half_of)

    def tokenize(self, prompts: Sequence[il.Prompt]) -> il.PromptBatch:
        """Tokenize prompts in the study's template, with the labels in one order."""
        labels = sorted(self.labels) or None
        return il.tokenize(self.model, prompts, template=self.template, labels=labels)

    @property
    def template(self) -> il.Template:
        return il.Template(separator=self.separator)

    @cached_property
    def locating(self) -> il.PromptBatch:
        return self.halves()[0]

    @cached_property
    def testing(self) -> il.PromptBatch:
        return self.halves()[1]

    # Heads

    @property
    def n_located(self) -> int:
        return self.n_heads or min(N_LOCATED, self.model.cfg.n_layers * self.model.cfg.n_heads // 8)

    def control_heads(self, located: Sequence[il.Head]) -> dict[int, list[il.Head]]:
        """Return, for each layer of located heads, its other heads, or those of the nearest layer
        that has some."""
        located_heads = set(located)
        other_heads = [head for head in self.all_heads() if head not in located_heads]
        by_layer = {}
        for layer in sorted({head.layer for head in located}):
            distance = min(abs(head.layer - layer) for head in other_heads)
            by_layer[layer] = [head for head in other_heads if abs(head.layer - layer) == distance]
        return by_layer

    def all_heads(self) -> list[il.Head]:
        n_heads = self.model.cfg.n_heads
        return [
            il.Head.from_index(index, n_heads) for index in range(self.model.cfg.n_layers * n_heads)
        ]

    def located_heads(self, ranking: Ranking, k: int | None = None) -> list[il.Head]:
        """Return the k heads that add most to the answer on the locating prompts, best first."""
        run = self.run(f"located by {ranking}, {k}")
        n_heads = k or self.n_located
        located = il.locate(
            self.model, self.locating, by=ranking, k=n_heads, other_scores=False, run=run
        )
        return located.heads

    # Scores

    def scores(
        self,
        part: str,
        batch: il.PromptBatch,
        edits_of: Callable[[list[int]], Sequence[Sequence[Any]]],
        options: dict[str, Any],
    ) -> Scores:
        """Return how the prompts are answered under sets of edits; an empty set is the intact
        model.

        `edits_of` returns the sets for some rows of the batch, `options` name what they depend on,
        and `part` is where the numbers are stored."""

        def label_log_probs(rows: list[int]) -> torch.Tensor:
            return il.score(self.model, batch[rows], edits_of(rows))

        log_probs = il.map_prompts(
            self.model, batch, label_log_probs, options=options, run=self.run(part)
        )
        log_odds, correct = [], []
        for of_set in torch.from_numpy(log_probs).unbind(1):
            log_odds.append(il.metrics.label_log_odds(of_set, batch))
            correct.append(il.metrics.is_correct(of_set, batch))
        return Scores(
            torch.stack(log_odds, 1).double().numpy(), torch.stack(correct, 1).double().numpy()
        )

    def read(
        self,
        part: str,
        batch: il.PromptBatch,
        measure: Callable[[il.Activations], torch.Tensor],
        **options: Any,
    ) -> np.ndarray:
        """Return what `measure` reads from the activations of every prompt, [prompt ...], in double
        precision.

        `options` name what it depends on, and `part` is where the numbers are stored.
        """

        def measured(rows: list[int]) -> torch.Tensor:
            return measure(il.capture(self.model, batch[rows])).double()

        return il.map_prompts(self.model, batch, measured, options=options, run=self.run(part))

    # Files

    @property
    def command(self) -> str:
        """The command line that computes the tables again; files are named without their folders."""
        name = f"{self.question.replace('-', '_')}.py"
        script = next(HERE.rglob(name)).relative_to(HERE.parent)
        words = ["python", script.as_posix(), "--model", Path(self.model_source).name]
        words += ["--task", self.task_source]
        if self.path is not None:
            words += ["--path", Path(self.path).name]
        if self.n_heads is not None:
            words += ["--heads", str(self.n_heads)]
        words += ["--labels", ",".join(self.labels)]
        words += ["--demonstrations", str(self.demonstrations)]
        words += ["--separator", self.separator.replace("\n", r"\n")]
        words += ["-n", str(self.n), "--seed", str(self.seed)]
        words += ["--name", self.model_name, "--task-name", self.task_name]
        return shlex.join(words)

    @property
    def folder(self) -> Path:
        return self.out / file_name(self.model_name) / file_name(self.task_name)

    def run(self, part: str) -> il.Run:
        """Return where a part is stored; other numbers of prompts or demonstrations, and seeds,
        have other folders."""
        settings = f"{self.question}, {self.demonstrations} per class, n {self.n}, seed {self.seed}"
        return il.Run(self.folder / "runs" / file_name(settings) / file_name(part), processes=1)


def file_name(name: str) -> str:
    """Return a name without the characters that folders may not have."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)


@dataclass
class Table:
    """The rows of a question's answer: means over prompts beside their control, in the unit of the
    row."""

    study: Study
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        measure: str,
        quantity: np.ndarray,
        control: np.ndarray | float,
        queries: Sequence[str] | None = None,
        *,
        versus: str,
        unit: str = "nats",
        ranking: str = "",
        at: object = "",
        note: str = "",
    ) -> None:
        """Add a measure: one number per prompt, and the same for the control.

        A control of random sets has one number per prompt and set. In the unit "%", numbers are
        shares from 0 to 1 or, if some are negative, their differences, −1 to 1. `queries` are the
        prompts' queries; by default, those of the testing half. `at` says which head, layer or
        number of heads the row is about.
        `low` and `high` are the 95% interval of quantity − control over queries and, of a control
        of random sets, over these sets.
        """
        queries = list(self.study.testing.queries if queries is None else queries)
        scale = 100.0 if unit == "%" else 1.0
        quantity = scale * np.asarray(quantity, dtype=float)
        control = scale * np.asarray(control, dtype=float)
        set_means = None
        if control.ndim == 2:
            set_means, control = control.mean(0), control.mean(1)
        control = np.broadcast_to(control, quantity.shape)
        bounds = None
        if unit == "%":
            mean_control = float(control.mean())
            are_differences = bool((quantity < 0).any() or (control < 0).any())
            lowest = -scale if are_differences else 0.0
            bounds = (lowest - mean_control, scale - mean_control)
        difference = quantity - control
        interval = il.metrics.bootstrap_interval(difference, clusters=queries, bounds=bounds)
        if set_means is not None:
            interval = il.metrics.with_random_sets(interval, set_means, bounds=bounds)
        numbers = {"quantity": quantity.mean(), "control": control.mean()}
        numbers |= {"low": interval.low, "high": interval.high}
        sizes = {"prompts": len(quantity), "queries": len(set(queries))}
        about = {"versus": versus, "unit": unit, "ranking": ranking, "at": at, "note": note}
        self.add_row(measure, **numbers, **sizes, **about)

    def add_statistic(
        self,
        measure: str,
        rows: np.ndarray,
        quantity: Callable[[np.ndarray], float],
        control: Callable[[np.ndarray], float],
        queries: Sequence[str] | None = None,
        *,
        unit: str = "nats",
        set_values: np.ndarray | None = None,
        **columns: Any,
    ) -> None:
        """Add a measure that is no mean over prompts, such as a ratio of means.

        `rows` has what `quantity` and `control` need of each prompt; both are computed from any of
        the rows. If the control is a mean over random sets, `set_values` are their values.
        """
        queries = list(self.study.testing.queries if queries is None else queries)
        scale = 100.0 if unit == "%" else 1.0

        def difference(draws: np.ndarray) -> float:
            return scale * (quantity(draws) - control(draws))

        interval = il.metrics.bootstrap_interval(rows, statistic=difference, clusters=queries)
        if set_values is not None:
            interval = il.metrics.with_random_sets(interval, scale * set_values)
        numbers = {"quantity": scale * quantity(rows), "control": scale * control(rows)}
        numbers |= {"low": interval.low, "high": interval.high}
        sizes = {"prompts": len(rows), "queries": len(set(queries))}
        self.add_row(measure, **numbers, **sizes, unit=unit, **columns)

    def add_row(self, measure: str, **columns: Any) -> None:
        """Add a row of numbers that have been computed already."""
        about = {"model": self.study.model_name, "task": self.study.task_name, "measure": measure}
        self.rows.append(about | columns)

    def add_difference_of_shares(
        self,
        measure: str,
        quantity: np.ndarray,
        control: np.ndarray,
        queries: Sequence[str],
        **columns: Any,
    ) -> None:
        """Add a measure like `add`, whose numbers are differences of shares, −1 to 1, shown in
        points."""
        points = 100 * np.asarray(quantity, dtype=float)
        self.add(
            measure,
            points,
            100 * np.asarray(control, dtype=float),
            queries,
            unit="points",
            **columns,
        )

    def add_missing(self, measure: str, reason: object, **columns: Any) -> None:
        """Add a measure that this model or task does not allow, with the reason."""
        self.add_row(measure, note=str(reason), **columns)

    def to_frame(self) -> pd.DataFrame:
        """Return the rows, with the same columns in every script."""
        names = [
            "model",
            "task",
            "measure",
            "at",
            "ranking",
            "quantity",
            "control",
            "low",
            "high",
            "unit",
            "versus",
        ]
        return pd.DataFrame(self.rows).reindex(columns=[*names, "prompts", "queries", "note"])

    def write(self, figure: Figure | None = None) -> pd.DataFrame:
        """Write the table, what it depends on, and the figure; print and return the table."""
        table = self.save(figure)
        names = ["measure", "at", "ranking", "quantity", "control", "low", "high", "unit"]
        options = ("display.width", 160, "display.max_columns", None, "display.max_rows", None)
        with pd.option_context(*options):
            print(table[names].round(2))
        n_locating, n_testing = len(self.study.locating), len(self.study.testing)
        print(
            f"at most {n_locating} prompts choose heads; {n_testing} with other queries test them"
        )
        print(f"written: {(self.study.folder / self.study.question).with_suffix('.csv')}")
        return table

    def save(self, figure: Figure | None = None) -> pd.DataFrame:
        """Write what has been added so far, as `write` does, but print nothing."""
        study, table = self.study, self.to_frame()
        path = study.folder / study.question
        table.to_csv(
            path.with_suffix(".csv"), index=False, float_format="%.6g", lineterminator="\n"
        )
        about: dict[str, Any] = asdict(study)
        del about["out"]  # folders differ from machine to machine
        about["model_source"] = Path(study.model_source).name
        about["path"] = None if study.path is None else Path(study.path).name
        about["prompts"] = [digest(half.texts) for half in (study.locating, study.testing)]
        about["weights"] = self._weights()
        about["command"] = study.command
        about["date"] = datetime.now(UTC).date().isoformat()
        about["versions"] = {name: version(name) for name in PACKAGES}
        path.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        if figure is not None:
            save_figure(figure, path.with_suffix(".svg"))
        return table

    def _weights(self) -> str:
        """Return the digest of the weights that the runs' manifests contain."""
        manifests = sorted(
            (self.study.folder / "runs").glob(f"{self.study.question}-*/**/manifest.json")
        )
        return json.loads(manifests[0].read_text(encoding="utf-8"))["weights"] if manifests else ""


Rows = TypeVar("Rows", list[il.Prompt], il.PromptBatch)


def thinned(rows: Rows, n: int) -> Rows:
    """Return evenly spaced rows: n to twice as many, or all if there are fewer than 2 · n."""
    return rows[:: max(1, len(rows) // n)]


def from_command_line(main: Callable[[], object]) -> None:
    """Run a script; end with one sentence if its input is wrong."""
    try:
        main()
    except il.InputError as error:
        raise SystemExit(f"error: {error}") from None


def digest(texts: Sequence[str]) -> str:
    """Return 16 hexadecimal digits that change when a text does."""
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()[:16]


# Figures


rcParams.update(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "icl_lens",
    }
)
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def panels(
    table: pd.DataFrame, height: float = 2.3
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """Return a figure with one panel per model and task, three in a row, and each panel's rows of
    the table."""
    groups: list[tuple[Any, pd.DataFrame]] = list(table.groupby(["model", "task"], sort=False))
    n_columns = min(3, len(groups))
    n_rows = math.ceil(len(groups) / n_columns)
    figure = Figure(figsize=(7.2, height * n_rows), layout="constrained")
    all_axes = figure.subplots(n_rows, n_columns, squeeze=False).flatten()
    for axes in all_axes[len(groups) :]:
        axes.set_visible(False)
    pairs = []
    for axes, (names, rows) in zip(all_axes, groups, strict=False):
        axes.set_title("\n".join(names), fontsize=8)
        pairs.append((axes, rows))
    return figure, pairs


def grid(
    table: pd.DataFrame, columns: int, **options: Any
) -> tuple[Figure, list[tuple[Sequence[Axes], str, pd.DataFrame]]]:
    """Return a figure with a row of panels per model and task: its panels, title and rows."""
    groups: list[tuple[Any, pd.DataFrame]] = list(table.groupby(["model", "task"], sort=False))
    figure = Figure(figsize=(7.2, 0.5 + 2.1 * len(groups)), layout="constrained")
    all_axes = figure.subplots(len(groups), columns, squeeze=False, **options)
    rows_of_panels = []
    for row, (names, rows) in zip(all_axes, groups, strict=True):
        rows_of_panels.append((list(row), ", ".join(names), rows))
    return figure, rows_of_panels


def dots(table: pd.DataFrame, *, label: str, names: tuple[str, str]) -> Figure:
    """Draw every measure with its interval (dot, bar) and its control (circle): one panel per model
    and task, with the measures in the same order, because only the first of a row names them."""
    measures = list(dict.fromkeys(table["measure"]))
    figure, pairs = panels(table, height=max(2.3, 0.9 + 0.2 * len(measures)))
    for place, (axes, rows) in enumerate(pairs):
        in_order = rows.set_index("measure").reindex(measures)
        draw_beside_control(axes, in_order, measures, names)
        axes.margins(y=0.5 / len(measures))
        if place % 3:
            axes.set_yticklabels([])
        axes.set_xlabel(label, fontsize=8)
    legend_below(figure, pairs[0][0])
    return figure


def draw_beside_control(
    axes: Axes, rows: pd.DataFrame, lines: Sequence[str], names: tuple[str, str]
) -> None:
    """Draw each row on a line of its own: dot and interval, and a circle for the control."""
    low, high = rows["control"] + rows["low"], rows["control"] + rows["high"]
    axes.hlines(lines, low, high, color=COLORS[0], lw=2)
    axes.plot(rows["quantity"], lines, "o", color=COLORS[0], label=names[0])
    circle: dict[str, Any] = {"mfc": "none", "mec": COLORS[1], "mew": 1.3, "ms": 8}
    axes.plot(rows["control"], lines, "o", label=names[1], **circle)
    axes.axvline(0, color="black", lw=0.8, ls="--")
    axes.invert_yaxis()


def head_dots(
    table: pd.DataFrame, *, label: str, names: tuple[str, str]
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """Draw a dot and, for its control, a circle for every head: one panel per model and task."""
    figure, pairs = panels(table)
    for axes, rows in pairs:
        heads = rows["at"].astype(str)
        dot: dict[str, Any] = {"color": COLORS[0], "clip_on": False}
        circle: dict[str, Any] = {"mfc": "none", "mec": COLORS[1], "ms": 8, "clip_on": False}
        axes.plot(heads, rows["quantity"], "o", label=names[0], **dot)
        axes.plot(heads, rows["control"], "o", label=names[1], **circle)
        axes.tick_params(axis="x", rotation=60, labelsize=7)
        axes.margins(x=0.08)
    pairs[0][0].set_ylabel(label, fontsize=8)
    legend_below(figure, pairs[0][0])
    return figure, pairs


def legend_below(figure: Figure, *all_axes: Axes, columns: int = 3) -> None:
    """Put the labels of these axes below the figure."""
    handles, labels = [], []
    for axes in all_axes:
        axes_handles, axes_labels = axes.get_legend_handles_labels()
        handles += axes_handles
        labels += axes_labels
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, the same bytes for the same figure."""
    figure.savefig(path, format="svg", metadata={"Date": None})
