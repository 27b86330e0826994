"""Running experiments on one model and task: what is open, one pass for all, then one after the other."""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib import rc_context

from experiments.lab import competence, located
from experiments.lab.drawing import STYLE
from experiments.lab.experiment import Experiment
from experiments.lab.passes import Passes, chunk_folder, code_digest
from experiments.lab.rejudge import verdicts_on
from experiments.lab.results import Result, check_folder, is_done, save
from experiments.lab.study import Study, StudySettings, Variant, batch_limits, folder_of
from experiments.lab.work import Work
from icl_lens.digest import json_digest, weights_digest
from icl_lens.errors import InputError
from icl_lens.locate.folder import RunFolder, opened
from icl_lens.locate.processes import Processes
from icl_lens.models.offload import Weights
from icl_lens.prompts.batch import prompts_digest
from icl_lens.prompts.tasks import data_digest

LEAST_PROMPTS = 20
"""Fewer make halves in which an interval means nothing."""


@dataclass(frozen=True)
class Run:
    """What came of a run: results written now, ids that were done before, and ids that this model cannot run."""

    results: list[Result]
    done: list[str]
    failed: dict[str, str]


def run(
    experiments: Sequence[Experiment],
    settings: StudySettings,
    *,
    load: Callable[[str], Any],
    out: Path,
    overwrite: bool = False,
    processes: Processes | None = None,
    work: Work | None = None,
    say: Callable[[str], None] = lambda line: None,
    warn: Callable[[str], None] = lambda line: None,
) -> Run:
    """Runs experiments that are not yet done and writes their folders, <out>/<model>/<task>/<id>.

    Nothing is computed before every folder has been checked. Every pass leaves chunks in <out>/<model>/<task>/passes:
    a run that was killed goes on from there and ends with the same bytes. Several `processes` compute different chunks;
    the first writes everything. An experiment that the model cannot run (a family without single neurons, say) is
    reported and the others go on. Raises InputError for bad settings, models, tasks and folders, for a folder that
    holds another configuration's result, and for one that another run is writing.
    """
    processes = processes or Processes()
    settings.check()
    if settings.n < LEAST_PROMPTS:
        raise InputError(f"n={settings.n} is too few for two halves and an interval; give at least {LEAST_PROMPTS}")
    folder = out / folder_of(settings)
    with ExitStack() as stack:

        def take() -> None:
            check_folder(out)
            stack.enter_context(opened(folder))

        processes.agreed(take)
        return _run(
            experiments, settings, load(settings.model), folder, overwrite, processes, work or Work(), say, warn
        )


def _run(
    experiments: Sequence[Experiment],
    settings: StudySettings,
    model: Any,
    folder: Path,
    overwrite: bool,
    processes: Processes,
    work: Work,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> Run:
    """The same in a folder that is this run's."""
    study = Study(model, settings)
    for task in (None, *settings.others):
        study.batch(Variant(task=task))  # a bad task shows here
    failed = {experiment.id: why for experiment in experiments if (why := experiment.refusal(settings)) is not None}
    for name, why in failed.items():
        say(f"{name}: cannot be run: {why}")
    experiments = [experiment for experiment in experiments if experiment.id not in failed]
    configurations = {experiment.id: configuration(experiment, study) for experiment in experiments}

    def checked() -> list[str]:
        return [name for name, wanted in configurations.items() if is_done(folder / name, wanted, overwrite=overwrite)]

    done = processes.agreed(checked)
    for name in done:
        say(f"{name}: done before, {folder / name}")
    todo = [experiment for experiment in experiments if experiment.id not in done]
    if not todo:
        return Run([], done, failed)

    chunks: list[RunFolder] = []
    processes.agreed(lambda: chunks.append(chunk_folder(folder, pass_configuration(study), overwrite=overwrite)))
    study.passes = Passes(chunks[0] if chunks else None, processes, work, warn)
    about_heads = any(len(experiment.rankings) > 1 for experiment in todo)
    shared = [*competence.NEEDS, *(located.NEEDS if about_heads else ())]
    needs = [*shared, *(need for experiment in todo for need in experiment.all_needs(settings))]
    work.expect(study, needs, todo)
    work.begin("shared")
    study.collect(needs)
    able = competence.measure(study)
    heads = located.located_heads(study) if about_heads else ()
    work.end()
    say(
        f"{settings.model} on {settings.said}: accuracy {able.accuracy:.1%} [{able.low:.1%}, {able.high:.1%}] over "
        f"both labels and orders, chance {able.chance:.0%}"
    )
    results = []
    for experiment in todo:
        start = time.perf_counter()
        work.begin(experiment.id)
        try:
            with study.passes.part(experiment.id):
                table = experiment.tabulate(study)
        except InputError as error:
            failed[experiment.id] = str(error)
            say(f"{experiment.id}: cannot be run: {error}")
            continue
        finally:
            work.end()
        if not processes.first:
            continue
        result = _result(experiment, study, table, able, heads, configurations[experiment.id])
        with rc_context(STYLE):
            figures = experiment.figures(table)
            seconds_of = None if experiment.timed is None else experiment.timed(study, experiment.config)
            save(folder / experiment.id, result, table, figures, seconds_of)
        results.append(result)
        seconds = time.perf_counter() - start
        say(f"{experiment.id}: {result.verdict.outcome}: {result.verdict.reason} ({seconds:.1f} s)")
        if result.contrast is not None and result.contrast.outcome != result.verdict.outcome:
            say(f"{experiment.id}, heads by contrast: {result.contrast.outcome}: {result.contrast.reason}")
    return Run(results, done, failed)


def _result(
    experiment: Experiment,
    study: Study,
    table: pd.DataFrame,
    able: competence.Competence,
    heads: tuple[located.LocatedHead, ...],
    made_with: dict[str, Any],
) -> Result:
    """The verdict on a table, and everything else that result.json holds."""
    verdicts = verdicts_on(experiment, table, able)
    return Result(
        **experiment.caption(),
        model=study.folder().parts[0],
        task=_of(experiment, study.settings).said,
        configuration=made_with,
        verdict=verdicts["increase"],
        contrast=verdicts.get("contrast"),
        competence=able,
        heads=heads,
        versions=versions(),
    )


def configuration(experiment: Experiment, study: Study) -> dict[str, Any]:
    """Everything a result depends on: settings, the experiment's own configuration, weights, prompts and data.

    "prompts_digest" is one of the prompts under study as tokens and answers; "data" one of all that prompts are drawn
    from, in the task's other layouts and in other word tasks too. Tasks given to be compared with belong to the claims
    that compare: others are the same without them.
    """
    settings = _of(experiment, study.settings)
    return {**settings.described(), **asdict(experiment.config), **_contents(study, settings)}


def _of(experiment: Experiment, settings: StudySettings) -> StudySettings:
    """The settings that an experiment depends on: most look at no other task."""
    return settings if experiment.compares else replace(settings, compared=())


def pass_configuration(study: Study) -> dict[str, Any]:
    """Everything a chunk depends on, beside which pass it is of."""
    return {
        **study.settings.described(),
        **_contents(study, study.settings),
        "dtype": str(study.model.W_U.dtype).removeprefix("torch."),
        "device": study.view.home.type,
        "batches": batch_limits(),
        "code": code_digest(),
        "versions": versions(),
    }


def _contents(study: Study, settings: StudySettings) -> dict[str, Any]:
    """What names stand for: digests of weights, prompts and data."""
    own = data_digest(
        settings.task,
        path=settings.path,
        split=settings.split,
        columns=settings.columns,
        max_words=settings.max_words,
    )
    read = [own, data_digest(StudySettings.task)]
    read += [
        data_digest(task, path=settings.path_of(task), split=settings.split, max_words=settings.max_words)
        for task in settings.others
    ]
    return {
        "weights": study.once("weights", lambda: fingerprint(study.model)),
        "prompts_digest": prompts_digest(study.batch()),
        "data": json_digest(read),
    }


def fingerprint(model: Any) -> str:
    """Twelve digits that change with a model's weights: a digest of up to 64 numbers from every parameter."""
    state: Mapping[str, Any] = model.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        state = Weights(model)
    return weights_digest(state, sample=64, most=64, dtype=torch.float64, digits=12)


def versions() -> dict[str, str]:
    """Of Python and the packages that numbers depend on."""
    packages = ("icl-lens", "torch", "transformers", "transformer-lens", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
