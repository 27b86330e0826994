"""The documentation's pages of results: `python -m experiments docs`."""

import json
import shutil
from collections.abc import Collection, Sequence
from dataclasses import asdict
from io import BytesIO
from pathlib import Path

from PIL import Image

from experiments.lab.experiment import EVERYWHERE
from experiments.lab.given import Given
from experiments.lab.located import LocatedHead
from experiments.lab.old_models import FILE as OLD
from experiments.lab.old_models import Row, changes, old_beside_new, read_verdicts
from experiments.lab.report import MARKS, in_order
from experiments.lab.results import Result, figure_name, read_all, read_seconds
from experiments.lab.study import Ranking
from experiments.lab.verdict import Verdict
from icl_lens.errors import InputError
from icl_lens.files import replacing, write_text

SEEDS = "seeds.md"
"""The page of training seeds, which another command writes."""
OTHERS = (OLD, SEEDS, "seeds.json")
"""Files in the folder that are not made from results, and stay."""
COLOURS = 64
"""Of a figure in the documentation, which makes it a quarter of its size."""

Seconds = dict[tuple[str, str, str], dict[str, float]]
"""Times measured beside results, by id, model and task."""


def write_pages(
    out: Path, folder: Path, *, task: str, order: Sequence[str], models: Collection[str] | None = None
) -> None:
    """Writes index.md (verdicts on `task` by model), a page for each experiment, its figures, and results.json.

    Experiments come in this order of their ids; results of other `models`, where these are named, stay out. What
    `folder` held before is removed but for `OTHERS`: where it holds verdicts on old models, the index shows them
    beside the new ones. Raises InputError if there are no results under `out`, or those old verdicts cannot be read.
    """
    results = [one for one in read_all(out) if models is None or one[1].model in models]
    if not results:
        raise InputError(f"there are no results of {', '.join(models or ())} under {str(out)!r}; run some first")
    old = read_verdicts(folder / OLD) if (folder / OLD).exists() else []
    _clear(folder)
    (folder / "figures").mkdir(parents=True)
    by_id: dict[str, list[Result]] = {}
    seconds: Seconds = {}
    for path, result in results:
        seconds[result.id, result.model, result.task] = read_seconds(path)
        by_id.setdefault(result.id, []).append(result)
        for ranking in result.verdicts:
            with replacing(folder / "figures" / _figure(result, ranking)) as beside:
                beside.write_bytes(_small((path / f"{figure_name(ranking)}.png").read_bytes()))
    ids = in_order(by_id, order)
    given = Given.of([result for _, result in results])
    every = [
        {**asdict(one), "id": result.id, "model": result.model, "task": result.task, "by": ranking, "holm": holm}
        for result, ranking, one, holm in given.every()
    ]
    further = ["seeds"] if (folder / SEEDS).exists() else []
    beside = _old_models(old, rounded(every, digits=None), order) if old else []  # the tables round once, not twice
    write_text(folder / "index.md", _index([by_id[name] for name in ids], task, given, beside, further))
    for name in ids:
        write_text(folder / f"{name}.md", _page(by_id[name], given, seconds))
    write_text(folder / "results.json", json.dumps(rounded(every), indent=1, ensure_ascii=False) + "\n")


def _clear(folder: Path) -> None:
    """Removes what the folder holds, but for `OTHERS`."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in OTHERS:
            path.unlink()


def _old_models(old: Sequence[Row], rows: Sequence[Row], order: Sequence[str]) -> list[str]:
    rules = (
        "The old ones were given by earlier rules, too: over single prompts, with one ranking of heads, and with other "
        "smallest effects. A difference is one of models, of rules, or of both."
        if all(row["by"] is None for row in old)
        else "Both were given by the rules of today."
    )
    return [
        "## Old models beside new ones",
        "",
        f"Verdicts on the models that bore these names before, and on those of today. {rules} {changes(old, rows)} "
        f"Bold: another verdict than the old one by the same ranking. The old ones as a file: {{download}}`{OLD}`.",
        "",
        *old_beside_new(old, rows, order=order),
        "",
    ]


def _figure(result: Result, ranking: Ranking) -> str:
    by = "" if ranking == "increase" else f"-{ranking}"
    name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in result.task)
    return f"{result.id}-{result.model}-{name}{by}.png"


def _small(png: bytes) -> bytes:
    """A figure with few colours."""
    buffer = BytesIO()
    Image.open(BytesIO(png)).convert("RGB").quantize(COLOURS).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def rounded(rows: list[dict], *, digits: int | None = 4) -> list[dict]:
    """Effects with so many digits, or as they are, and null for what is not finite."""

    def short(value: object) -> object:
        if not isinstance(value, float):
            return value
        if not abs(value) < float("inf"):
            return None
        return value if digits is None else float(f"{value:.{digits}g}")

    return [{key: short(value) for key, value in row.items()} for row in rows]


def _said(verdict: Verdict) -> str:
    return f"{MARKS[verdict.outcome]} {verdict.outcome}"


def _number(verdict: Verdict) -> str:
    if verdict.low != verdict.low:
        return "no effect to measure"
    return f"{verdict.effect:.3g} [{verdict.low:.3g}, {verdict.high:.3g}] {verdict.unit}"


def _cell(result: Result, ranking: Ranking, given: Given) -> str:
    verdict = result.verdicts[ranking]
    lines = [_said(verdict), _number(verdict)]
    if verdict.outcome != "undecided":
        lines.append(given.said(result, ranking))
    return "<br>".join(lines)


def _index(
    experiments: list[list[Result]], task: str, given: Given, beside: Sequence[str], further: Sequence[str]
) -> str:
    results = [result for same_id in experiments for result in same_id if result.task == task]
    models = list(dict.fromkeys(result.model for result in results))
    first = results[0]
    able = [next(result.competence for result in results if result.model == model) for model in models]
    accuracies = [f"{measured.accuracy:.1%} [{measured.low:.1%}, {measured.high:.1%}] | same" for measured in able]
    seeds = ["Which verdicts change with the seed that a model was trained with: [training seeds](seeds.md).", ""]
    lines = [
        "# Results of the bundled models",
        "",
        "Made by `python -m experiments docs`. The claims of the paper, and those beyond it, tried on the bundled "
        f"models: {first.configuration['n']:,} prompts of {task}, heads chosen on one half and tested on the other. "
        "Claims about located heads are judged twice: with heads located by *increase* of log p(answer), the paper's "
        "ranking, and by *contrast*, the answer's log-odds against the other label, over both labels as the answer. An "
        "effect is that of the part of the claim that decided, where all hold the least sure one (of ablation it may "
        "be what random heads cost), with its 95 % interval over query words; "
        "[how verdicts are given](../verdicts.md) has the rules, claim by claim. These are small models trained from "
        "nothing, by a recipe fixed before; where they contradict the paper, they contradict it as a claim about every "
        "model, not about the models it studied. Where a claim names figures of sentence tasks, it is tried on word "
        "tasks: sentence tasks are not run here (`run --task sst2` does).",
        "",
        f"{given} A p-value stands beside the one that allows for all of them (Holm's method); a verdict that does not "
        "survive it is marked †.",
        "",
        f"{EVERYWHERE} Each page says what else departs from the paper.",
        "",
        *(seeds if "seeds" in further else ()),
        "| experiment | in the paper | " + " | ".join(f"{model}, by increase | by contrast" for model in models) + " |",
        "|---|---|" + "---|---|" * len(models),
        "| accuracy, both labels, orders and classes | | " + " | ".join(accuracies) + " |",
    ]
    for same_id in experiments:
        cells = []
        for model in models:
            result = next((one for one in same_id if (one.model, one.task) == (model, task)), None)
            cells.append("–" if result is None else _cell(result, "increase", given))
            one_verdict = result is not None and "contrast" not in result.verdicts
            cells.append("–" if result is None else "the same" if one_verdict else _cell(result, "contrast", given))
        lines.append(f"| [{same_id[0].id}]({same_id[0].id}.md) | {same_id[0].source} | " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    return "\n".join(
        [
            *lines,
            "",
            *_located(results, models),
            *beside,
            f"Made with {versions}. The numbers as a file: {{download}}`results.json`.",
            "",
            "```{toctree}",
            ":hidden:",
            "",
            *(same_id[0].id for same_id in experiments),
            *further,
            "```",
            "",
        ]
    )


def _located(results: list[Result], models: list[str]) -> list[str]:
    """Which heads are located, and which of them tell the labels apart."""
    lines = ["## Located heads", ""]
    lines += [
        "With what each adds to log p(answer) and, after the stroke, to its log-odds against the other label (nats), "
        "on the "
        "half that heads are chosen on, means over both labels as the answer. By increase the best for one label and "
        "the best for the other take turns, so that the first of a row need not add most to both. **Bold** ones tell "
        "the labels apart: their contrast is at least half of their "
        "increase. The others raise both labels.",
        "",
        "| model | by increase | by contrast |",
        "|---|---|---|",
    ]
    for model in models:
        heads = next((result.heads for result in results if result.model == model and result.heads), ())
        cells = [", ".join(_head(one) for one in heads if one.ranked_by == by) for by in ("increase", "contrast")]
        lines.append(f"| {model} | " + " | ".join(cell or "–" for cell in cells) + " |")
    return [*lines, ""]


def _head(located: LocatedHead) -> str:
    name = f"**{located.head}**" if located.tells_apart else located.head
    return f"{name} {located.increase:.2f}/{located.contrast:.2f}"


def _page(results: list[Result], given: Given, seconds: Seconds) -> str:
    caption = results[0]
    lines = [
        f"# {caption.id}: {caption.title[0].lower()}{caption.title[1:]}",
        "",
        f"*{caption.source}*",
        "",
        f"Claim\n: {caption.claim}",
        "",
        f"Supported if\n: {caption.criterion}",
        "",
        f"About\n: {_sentence(caption.about)}",
        "",
        f"In the paper\n: {caption.paper or 'no number'}",
        "",
        *([f"Departs from the paper\n: {caption.departs}", ""] if caption.departs else []),
        *([f"Chosen after results were seen\n: {caption.chosen}", ""] if caption.chosen else []),
        "Again\n: `" + f"python -m experiments run {caption.id}`",
        "",
        "Effects are those of the part that decided, with 95 % intervals over query words; see "
        "[how verdicts are given](../verdicts.md), and [where all experiments depart](index.md) from the paper.",
        "",
    ]
    for result in results:
        lines += [f"## {result.model}, {result.task}", ""]
        for ranking, verdict in result.verdicts.items():
            by = f"Heads by {ranking}: " if len(result.verdicts) > 1 else ""
            sure = "" if verdict.outcome == "undecided" else f" ({given.said(result, ranking)})"
            lines += [
                f"{by}**{_said(verdict)}**: {_number(verdict)}{sure}. {_sentence(verdict.reason)}",
                "",
                f"```{{image}} figures/{_figure(result, ranking)}",
                f":alt: {caption.title}: {result.model} on "
                f"{result.task}{', heads by contrast' if by and ranking != 'increase' else ''}",
                ":class: figure",
                "```",
                "",
            ]
        lines += _times(seconds.get((result.id, result.model, result.task), {}))
    return "\n".join(lines)


def _times(seconds: dict[str, float]) -> list[str]:
    """A table of times, where any were measured."""
    if not seconds:
        return []
    rows = [f"| {name} | {value:.3g} |" for name, value in seconds.items()]
    return ["| seconds for 100 prompts, measured on the machine that made this page | |", "|---|---|", *rows, ""]


def _sentence(reason: str) -> str:
    text = reason[0].upper() + reason[1:]
    return text if text.endswith(".") else text + "."
