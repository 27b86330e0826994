"""One self-contained page of all results: verdicts first, then every figure with its claim and numbers."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from experiments.lab.experiment import EVERYWHERE
from experiments.lab.given import Given
from experiments.lab.results import Result, figure_name, read_all
from experiments.lab.study import RANKINGS, Ranking
from experiments.lab.verdict import Outcome, Verdict
from icl_lens.errors import InputError
from icl_lens.files import write_text

MARKS: dict[Outcome, str] = {"supported": "●", "not supported": "✕", "undecided": "○"}
"""Beside its colour, so that an outcome is told without it."""

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --quiet: #5d5d5d; --paper: #fff; --rule: #d9d9d9; --wash: #f6f6f4;
  --yes: #00664a; --no: #a33c00; --open: #2b5f8a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e6e3; --quiet: #a5a29d; --paper: #16171a; --rule: #3a3b40;
  --wash: #1f2024; --yes: #4cc79f; --no: #f08a4b; --open: #83b9e6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 Charter, "Bitstream Charter", "Sitka Text", Cambria, Georgia, serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; } h2 { font-size: 1.25rem; margin: 0; }
h3 { font-size: 1rem; margin: 1.5rem 0 .4rem; } p { margin: .4rem 0; }
a { color: inherit; } .quiet { color: var(--quiet); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { font-weight: 600; } td.number { white-space: nowrap; font-variant-numeric: tabular-nums; }
section { border-top: 2px solid var(--ink); margin-top: 2.8rem; padding-top: .8rem; }
figure { margin: .8rem 0; padding: .8rem; background: #fff; border: 1px solid var(--rule); }
figure img { display: block; width: 100%; max-width: 52rem; height: auto; margin: 0 auto; }
.outcome { font-weight: 600; white-space: nowrap; }
.supported { color: var(--yes); } .not-supported { color: var(--no); } .undecided { color: var(--open); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: .6rem 0; }
dt { color: var(--quiet); } dd { margin: 0; }
details { font-size: .85rem; color: var(--quiet); } code { overflow-wrap: anywhere; font-size: .82rem; }
@media (max-width: 36rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
"""


def write_report(out: Path, page: Path, *, order: Sequence[str]) -> Path:
    """Writes the page of all results under `out`, experiments in this order of their ids.

    Raises InputError if there are none or the page cannot be written.
    """
    try:
        results = [(result, _images(folder, result)) for folder, result in read_all(out)]
    except OSError as error:
        raise InputError(f"a result has lost its figure ({error}); remove its folder and run it again") from error
    write_text(page, report_page(results, order=order))
    return page


def _images(folder: Path, result: Result) -> dict[Ranking, bytes]:
    return {by: (folder / f"{figure_name(by)}.png").read_bytes() for by in result.verdicts}


def in_order(ids: Iterable[str], order: Sequence[str]) -> list[str]:
    """Each id once, in the order given; those that it does not name come last, by the alphabet."""
    return sorted(set(ids), key=lambda name: (order.index(name) if name in order else len(order), name))


def report_page(results: Sequence[tuple[Result, Mapping[Ranking, bytes]]], *, order: Sequence[str] = ()) -> str:
    """The page, from results and their figures (PNG). Needs no network; everything written by others is escaped."""
    ids = in_order((result.id for result, _ in results), order)
    models = list(dict.fromkeys(_place(result) for result, _ in results))
    given = Given.of([result for result, _ in results])
    sections = "".join(_section([pair for pair in results if pair[0].id == name], given) for name in ids)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>In-context heads: results</title><link rel="icon" href="data:,"><style>{STYLE}</style></head><body>'
        "<h1>How models learn in context: claims and verdicts</h1>"
        f'<p class="quiet">{len(results)} results of {len(ids)} experiments on {len({m for m, _ in models})} models. '
        "A verdict compares a 95&nbsp;% bootstrap interval over query words with the smallest effect worth the claim. "
        "Claims about located heads are judged with heads located by increase of log p(answer), and by contrast "
        f"between the labels, over both as the answer. {escape(str(given))} p-values stand beside those that allow for "
        "all verdicts (Holm); what does not survive is marked †. "
        "Heads are chosen on one half of the prompts and tested on the other. A model that does not do the task leaves "
        "every claim on how it does it undecided.</p>"
        f'<p class="quiet">{escape(EVERYWHERE)} Each experiment says what else departs from the paper.</p>'
        f"{_verdicts(ids, models, [result for result, _ in results], given)}{sections}</body></html>\n"
    )


def _verdicts(ids: list[str], models: list[tuple[str, str]], results: list[Result], given: Given) -> str:
    by_place = {(result.id, result.model, result.task): result for result in results}
    head = "".join(
        f'<th scope="col">{escape(model)}<br><span class="quiet">{escape(task)}, by {by}</span></th>'
        for model, task in models
        for by in RANKINGS
    )
    able = "".join(
        f'<td class="number" colspan="2">{next(_accuracy(one) for one in results if _place(one) == place)}</td>'
        for place in models
    )
    rows = f'<tr><th scope="row">accuracy, both labels, orders and classes</th>{able}</tr>'
    for name in ids:
        cells = ""
        for model, task in models:
            result = by_place.get((name, model, task))
            for ranking in RANKINGS:
                if result is None:
                    shown = "–"
                elif ranking not in result.verdicts:
                    shown = "the same"
                else:
                    verdict = result.verdicts[ranking]
                    sure = "" if verdict.outcome == "undecided" else f"<br>{escape(given.said(result, ranking))}"
                    shown = f"{_outcome(verdict)}<br>{_number(verdict)}{sure}"
                cells += f'<td class="number">{shown}</td>'
        rows += f'<tr><th scope="row"><a href="#{escape(name)}">{escape(name)}</a></th>{cells}</tr>'
    return (
        f'<div class="scroll"><table><thead><tr><th scope="col">experiment</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _place(result: Result) -> tuple[str, str]:
    return result.model, result.task


def _section(results: list[tuple[Result, Mapping[Ranking, bytes]]], given: Given) -> str:
    first = results[0][0]
    parts = "".join(_of_model(result, images, given) for result, images in results)
    departs = f"<dt>Departs from the paper</dt><dd>{escape(first.departs)}</dd>" if first.departs else ""
    chosen = f"<dt>Chosen after results were seen</dt><dd>{escape(first.chosen)}</dd>" if first.chosen else ""
    return (
        f'<section id="{escape(first.id)}"><h2>{escape(first.title)}</h2>'
        f'<p class="quiet">{escape(first.id)} · {escape(first.source)}</p><dl>'
        f"<dt>Claim</dt><dd>{escape(first.claim)}</dd><dt>In the paper</dt><dd>{escape(first.paper or 'no number')}"
        "</dd>"
        f"<dt>Supported if</dt><dd>{escape(first.criterion)}</dd><dt>About</dt><dd>{escape(first.about)}</dd>"
        f"{departs}{chosen}"
        f"</dl>{parts}</section>"
    )


def _of_model(result: Result, images: Mapping[Ranking, bytes], given: Given) -> str:
    name = f"{result.model} on {result.task}"
    configuration = ", ".join(f"{key} = {value}" for key, value in result.configuration.items())
    versions = ", ".join(f"{key} {value}" for key, value in result.versions.items())
    parts = f"<h3>{escape(name)}</h3>"
    for ranking, verdict in result.verdicts.items():
        data = base64.b64encode(images[ranking]).decode("ascii")
        by = f"Heads by {ranking}: " if len(result.verdicts) > 1 else ""
        sure = "" if verdict.outcome == "undecided" else f" ({given.said(result, ranking)})"
        shown = f"{result.title}: {name}" + (", heads by contrast" if ranking == "contrast" else "")
        parts += (
            f"<p>{by}{_outcome(verdict)} {_number(verdict)} {escape(verdict.unit)}{escape(sure)}. "
            f'<span class="quiet">{escape(verdict.reason)}</span></p>'
            f'<figure><img alt="{escape(shown)}" src="data:image/png;base64,{data}"></figure>'
        )
    return (
        f"{parts}<details><summary>Configuration</summary><p><code>{escape(configuration)}</code></p>"
        f"<p><code>{escape(versions)}</code></p></details>"
    )


def _outcome(verdict: Verdict) -> str:
    kind = verdict.outcome.replace(" ", "-")
    return f'<span class="outcome {escape(kind)}">{MARKS[verdict.outcome]} {escape(verdict.outcome)}</span>'


def _number(verdict: Verdict) -> str:
    if verdict.low != verdict.low:
        return "no effect to measure"
    return f"{verdict.effect:.3g} [{verdict.low:.3g}, {verdict.high:.3g}]"


def _accuracy(result: Result) -> str:
    able = result.competence
    return f"{able.accuracy:.1%} [{able.low:.1%}, {able.high:.1%}], chance {able.chance:.0%}"
