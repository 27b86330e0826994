"""Do function-vector heads, rather than induction heads, carry few-shot answers?

Yin and Steinhardt (arXiv 2502.14010): "few-shot ICL performance is driven primarily by FV heads,
especially in larger models", and hardly changes without induction heads.

1. Function-vector heads have the largest indirect effects: how much of the answer's probability a
   head's mean output recovers on prompts with shuffled labels. Induction heads attend most to the
   token after an earlier occurrence, on repeated random tokens. Heads of both lists are left out of
   each.
2. On prompts with other queries, each list is set to zero at all tokens, as are random heads of the
   same layers, which may have heads of the other list. The answer is right if its first token is
   the most probable of the vocabulary.

The authors replace heads by their means; they test models of 70M to 7B parameters on 37 tasks.

    python experiments/literature/yin2025.py --model icl-mini --task animal-country -n 40
"""

import pandas as pd
from claims import (
    Study,
    Table,
    ZeroedLists,
    first_heads,
    from_command_line,
    heads_by_induction,
    top_token_is_answer,
    with_random_labels,
    without_shared,
)

import icl_lens as il

N_RANDOM_SETS = 10


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure what is lost without function-vector heads, and without induction heads."""
    study = Study.from_command_line("yin2025", str(__doc__).splitlines()[0], arguments)
    table = Table(study)
    zeroed = ZeroedLists.of(study, ranked_heads(study), N_RANDOM_SETS)
    names = zeroed.names
    is_right = top_token_is_answer(study, "top token", study.testing, zeroed.edits, names)
    scores = study.scores("ablated", study.testing, lambda rows: zeroed.edits, names)
    lost = is_right[:, :1] - is_right
    by_vector, by_induction = zeroed.heads
    table.add(
        f"accuracy lost without {by_vector}",
        lost[:, zeroed.place(by_vector)],
        lost[:, zeroed.place(by_induction)],
        unit="%",
        versus=f"without {by_induction}",
    )
    log_odds_lost = scores.log_odds[:, :1] - scores.log_odds
    for name in zeroed.heads:
        place, of_random = zeroed.place(name), zeroed.random_places(name)
        about = {"versus": "random heads of the same layers", "note": " ".join(names[name])}
        accuracy = lost[:, place], lost[:, of_random]
        table.add(f"accuracy lost without {name}", *accuracy, unit="%", **about)
        if name == by_vector:
            claim = "Function-vector heads, not induction heads, carry few-shot answers"
            table.state(claim, n_rows=2)
        log_odds = log_odds_lost[:, place], log_odds_lost[:, of_random]
        table.add(f"log-odds lost without {name}", *log_odds, **about)
    table.add("accuracy", is_right[:, 0], 0.0, unit="%", versus="zero")
    return table.write()


def ranked_heads(study: Study) -> dict[str, list[il.Head]]:
    """Return the first heads by indirect effect and by induction; none is in both lists."""
    corrupted = study.tokenize(with_random_labels(study.locating.prompts, study.seed))
    effects = il.indirect_effects(study.model, corrupted, list(study.locating.split(32)))
    k = study.n_located
    lists = {
        "function-vector heads": first_heads(effects.double().mean(0), k),
        "induction heads": heads_by_induction(study, k),
    }
    return without_shared(lists)


if __name__ == "__main__":
    from_command_line(main)
