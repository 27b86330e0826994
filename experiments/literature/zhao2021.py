"""Do models prefer some labels whatever is asked, and does calibration help?

Zhao et al. (arXiv 2102.09690): few-shot answers are biased toward labels that are frequent, last or
common; dividing each label's probability by its probability for a query without content ("N/A")
raises accuracy.

1. A model's preference for a label is what calibration takes from that label's log-odds; it is zero
   for a model that goes by the text alone.
2. The claim on calibration holds if accuracy rises on the same prompts.

The authors test GPT-2 XL and GPT-3 on 11 tasks.

    python experiments/literature/zhao2021.py --model icl-mini --task animal-country -n 40
"""

import numpy as np
import pandas as pd
import torch
from claims import Study, Table, from_command_line
from shared_tasks import other_data

import icl_lens as il


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure accuracy with and without contextual calibration, in random order."""
    study = Study.from_command_line("zhao2021", str(__doc__).splitlines()[0], arguments)
    table = Table(study)
    batch = study.testing
    raw = study.scores("not calibrated", batch, lambda rows: [[]], {})
    calibrated, inputs = calibrated_with(study)
    correct = il.metrics.is_correct(calibrated, batch)
    is_right = correct.double().cpu().numpy(), raw.correct[:, 0]
    about = {"unit": "%", "versus": "without calibration", "note": f"content-free: {inputs}"}
    table.add("accuracy with calibration", *is_right, **about)
    table.state("Calibration raises accuracy")
    if len(study.labels) != 2:
        return table.write()
    log_odds = il.metrics.label_log_odds(calibrated, batch)
    shift = raw.log_odds[:, 0] - log_odds.double().cpu().numpy()
    is_first = (batch.answer == 0).cpu().numpy()
    preference = np.where(is_first, shift, -shift)
    measure = f"preference for {batch.labels[0]} that calibration removes"
    table.add(measure, preference, 0.0, versus="zero")
    return table.write()


def calibrated_with(study: Study) -> tuple[torch.Tensor, str]:
    """Return scores calibrated with the authors' inputs without content, and these.

    A small vocabulary does not have them; words of other classes take their place.
    """
    try:
        return il.calibrated_scores(study.model, study.testing), "N/A, [MASK], the empty text"
    except il.InputError:
        other_prompts = study.changed(task_source=other_data(study), path=None).prompts()
        words = list(dict.fromkeys(prompt.query for prompt in other_prompts))[:3]
        return il.calibrated_scores(study.model, study.testing, inputs=words), ", ".join(words)


if __name__ == "__main__":
    from_command_line(main)
