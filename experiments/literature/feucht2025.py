"""Are the heads that copy single tokens other heads than those that copy words?

Feucht et al. (arXiv 2504.03022): concept induction heads, which "copy entire lexical units instead
of individual tokens", are "responsible for semantic tasks like word-level translation", and token
induction heads "for tasks that can only be done verbatim (like copying nonsense tokens)".

1. Random tokens and, after them, a word are shown twice, up to the word. A head's output at the last
   random token is put into a run in which other random tokens came first. Its concept copying is
   what this adds to the probability of the word's second token after its first; its token copying,
   with a random token instead of the word, what it adds to the probability of this token. Heads
   among the first of both lists are left out of each.
2. Each list is set to zero at all tokens, as are random heads of the same layers, on other random
   tokens that are shown twice, and on prompts of the task. What comes next is right if it is the
   most probable token.
3. The two claims hold if each list costs its own kind of copying more than the other list does.

The authors copy names of facts in models of 7B and 8B parameters, replace heads by their means and
translate lists of words; here, the task's pairs stand for translations (`--task english-french`).

    python experiments/literature/feucht2025.py --model icl-mini --task animal-country -n 40
"""

import random
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pandas as pd
import torch
from claims import (
    Study,
    Table,
    ZeroedLists,
    first_heads,
    from_command_line,
    top_token_is_answer,
    usable_tokens,
    without_shared,
)
from shared_tasks import category_words

import icl_lens as il

N_RANDOM_SETS = 10
N_COPIED, N_BEFORE = 24, 20
"""Words that are copied to choose heads, and random tokens before each."""
NAMES = (
    "Abraham Lincoln, Albert Einstein, Amazon River, Apollo Program, Barack Obama, Boeing, Brooklyn "
    "Bridge, Buckingham Palace, Charles Darwin, Eiffel Tower, Golden Gate, Grand Canyon, Great Wall, "
    "Hong Kong, Isaac Newton, Jane Austen, Julius Caesar, Lake Michigan, Leonardo da Vinci, Los "
    "Angeles, Machu Picchu, Mount Everest, Napoleon Bonaparte, New Zealand, Niagara Falls, Nintendo, "
    "Pearl Harbor, Rolls Royce, Saudi Arabia, Silicon Valley, Sri Lanka, Volkswagen"
).split(", ")
CLAIMS = {
    "token-copying heads": "Token-copying heads, not concept-copying heads, copy random tokens",
    "concept-copying heads": "Concept-copying heads, not token-copying heads, carry the answers of the task",
}


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure what each list of heads costs the copying of random tokens, and the task."""
    study = Study.from_command_line("feucht2025", str(__doc__).splitlines()[0], arguments)
    table = Table(study)
    zeroed = ZeroedLists.of(study, ranked_heads(study), N_RANDOM_SETS)
    tokens = shown_twice(study, drawn_tokens(study, study.n, "tested"), 0, "tested")
    measured: dict[str, tuple[str, il.PromptBatch]] = {
        "token-copying heads": ("random tokens copied", tokens),
        "concept-copying heads": ("answers of the task", study.testing),
    }
    for name, (measure, batch) in measured.items():
        (other_name,) = set(measured) - {name}
        is_right = top_token_is_answer(study, measure, batch, zeroed.edits, zeroed.names)
        lost = is_right[:, :1] - is_right
        controls = {
            f"without {other_name}": lost[:, zeroed.place(other_name)],
            "without random heads of the same layers": lost[:, zeroed.random_places(name)],
        }
        about = {"at": f"without {name}", "note": " ".join(zeroed.names[name]), "unit": "%"}
        for versus, control in controls.items():
            quantity = lost[:, zeroed.place(name)]
            table.add(f"{measure}, lost", quantity, control, batch.queries, versus=versus, **about)
        table.state(CLAIMS[name], n_rows=len(controls))
        table.add(measure, is_right[:, 0], 0.0, batch.queries, unit="%", versus="zero")
    return table.write()


def ranked_heads(study: Study) -> dict[str, list[il.Head]]:
    """Return the first heads by token copying and by concept copying; none is in both lists."""
    words = words_of_several_tokens(study)
    copied = {
        "token-copying heads": (drawn_tokens(study, len(words), "copied"), 0),
        "concept-copying heads": (words, 1),
    }
    lists = {}
    for name, (chunks, n_known) in copied.items():
        gains = copying_gains(study, name, chunks, n_known)
        lists[name] = first_heads(gains.mean(0), study.n_located)
    return without_shared(lists)


def copying_gains(study: Study, name: str, chunks: list[list[int]], n_known: int) -> torch.Tensor:
    """Return what each head's output, where a chunk is to be copied, adds to the probability of the
    chunk's token after the known ones if other tokens came first, [row layer head].
    """
    repeated = shown_twice(study, chunks, n_known, name)
    corrupted = shown_twice(study, chunks, n_known, name, is_first_other=True)

    def of_rows(rows: list[int]) -> torch.Tensor:
        positions = [[last - n_known] for last in repeated[rows].last.tolist()]
        z = il.capture(study.model, repeated[rows], positions=positions).z
        edits = [[], *([OutputFrom([head], z, n_known)] for head in study.all_heads())]
        targets = corrupted[rows].answer_tokens

        def of_target(log_probs: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return log_probs.gather(1, targets.to(log_probs.device)[places][:, None])[:, 0]

        return il.score(study.model, corrupted[rows], edits, read=of_target).double().exp()

    options = {"repeated": repeated.tokens.tolist()}
    run = study.run(name)
    probabilities = il.map_prompts(study.model, corrupted, of_rows, options=options, run=run)
    gains = torch.from_numpy(probabilities[:, 1:] - probabilities[:, :1])
    return gains.unflatten(1, (study.model.cfg.n_layers, study.model.cfg.n_heads))


@dataclass(frozen=True, eq=False)
class OutputFrom(il.Edit):
    """Heads write what they do in other runs, `n_back` tokens before the last one."""

    heads: Any
    z: torch.Tensor
    """In the other runs, [prompt layer head d_head]."""
    n_back: int

    @property
    def write_key(self) -> object:
        return id(self.z)

    def first_changes(self, batch: il.PromptBatch) -> torch.Tensor:
        return batch.last - self.n_back

    def write_z(self, z: torch.Tensor, at: Any, layer: int) -> None:
        z[at.row, at.last - self.n_back, at.head] = self.z[at.prompt, layer, at.head]


def shown_twice(
    study: Study, chunks: list[list[int]], n_known: int, name: str, *, is_first_other: bool = False
) -> il.PromptBatch:
    """Return rows of random tokens, a chunk, the same tokens again and the chunk's known tokens.

    The next token is the target. Rows with another first showing have other random tokens there.
    """
    rng, rows = random.Random(f"{name} {study.seed}"), []
    for chunk in chunks:
        tokens = [token for token in usable_tokens(study) if token not in chunk]
        before = rng.sample(tokens, N_BEFORE)
        other = rng.sample(tokens, N_BEFORE + len(chunk))
        rows.append([*(other if is_first_other else before + chunk), *before, *chunk[:n_known]])
    return il.PromptBatch.from_tokens(rows, targets=[chunk[n_known] for chunk in chunks])


def drawn_tokens(study: Study, n: int, name: str) -> list[list[int]]:
    """Return n random tokens, each alone; another name draws others."""
    rng = random.Random(f"{name} {study.seed}")
    return [[token] for token in rng.choices(usable_tokens(study), k=n)]


def words_of_several_tokens(study: Study) -> list[list[int]]:
    """Return the tokens of names and words that have two to five; raise InputError if the model
    knows too few.
    """
    tokenizer, words = study.model.tokenizer, []
    for word in chain(NAMES, *category_words().values()):
        tokens = tokenizer.encode(f" {word}", add_special_tokens=False)
        if 2 <= len(tokens) <= 5 and tokenizer.unk_token_id not in tokens:
            words.append(tokens)
    if len(words) < N_COPIED:
        raise il.InputError(
            f"the model's vocabulary has {len(words)} words of several tokens, and {N_COPIED} are "
            "needed"
        )
    return words[:N_COPIED]


if __name__ == "__main__":
    from_command_line(main)
