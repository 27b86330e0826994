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
    first_heads,
    from_command_line,
    heads_by_induction,
    top_token_is_answer,
    with_random_labels,
)

import icl_lens as il

N_RANDOM_SETS = 10


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure what is lost without function-vector heads, and without induction heads."""
    study = Study.from_command_line("yin2025", str(__doc__).splitlines()[0], arguments)
    table = Table(study)
    head_sets = ranked_heads(study)
    edits: list[list[il.Ablate]] = [[]]
    for heads in head_sets.values():
        edits.append([il.Ablate(heads, positions="all")])
        for random_heads in random_sets(study, heads):
            edits.append([il.Ablate(random_heads, positions="all")])
    names = {name: list(map(str, heads)) for name, heads in head_sets.items()}
    is_right = top_token_is_answer(study, "top token", study.testing, edits, names)
    scores = study.scores("ablated", study.testing, lambda rows: edits, names)
    places = {name: 1 + number * (1 + N_RANDOM_SETS) for number, name in enumerate(head_sets)}
    lost = is_right[:, :1] - is_right
    table.add(
        "accuracy lost without function-vector heads",
        lost[:, places["function-vector heads"]],
        lost[:, places["induction heads"]],
        unit="%",
        versus="without induction heads",
    )
    log_odds_lost = scores.log_odds[:, :1] - scores.log_odds
    for name, place in places.items():
        of_random = slice(place + 1, place + 1 + N_RANDOM_SETS)
        about = {"versus": "random heads of the same layers", "note": " ".join(names[name])}
        accuracy = lost[:, place], lost[:, of_random]
        table.add(f"accuracy lost without {name}", *accuracy, unit="%", **about)
        if name == "function-vector heads":
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
    by_effect = first_heads(effects.double().mean(0), k)
    by_induction = heads_by_induction(study, k)
    in_both = set(by_effect).intersection(by_induction)
    if len(in_both) == k:
        raise il.InputError(f"the first {k} heads of both lists are the same; pass fewer --heads")
    return {
        "function-vector heads": [head for head in by_effect if head not in in_both],
        "induction heads": [head for head in by_induction if head not in in_both],
    }


def random_sets(study: Study, heads: list[il.Head]) -> list[list[il.Head]]:
    """Return random sets of as many heads of the same layers."""
    return il.random_head_sets(study.model, heads, draws=N_RANDOM_SETS, seed=study.seed)


if __name__ == "__main__":
    from_command_line(main)
