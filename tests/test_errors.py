"""One form of sentence for a choice that does not exist, wherever it is asked for."""

import families
import pytest

import icl_lens as il
from icl_lens.errors import check_choice


def test_the_sentence():
    check_choice("mode", "zero", ("zero", "mean"))
    with pytest.raises(il.InputError, match=r"^mode must be one of 'zero', 'mean', got 'half'$"):
        check_choice("mode", "half", ("zero", "mean"))
    with pytest.raises(il.InputError, match=r"^kind must be one of 'a', 'b', 'c', got 'x'$"):
        check_choice("kind", "x", ("a", "b", "c"))


ASKED = {
    "layout": lambda model, acts: il.load_task("sentiment-number", layout="x"),
    "query_class": lambda model, acts: il.load_task("sentiment-number", query_class="x"),
    "classes": lambda model, acts: il.TextTask("sst2", classes="x"),
    "dtype": lambda model, acts: il.load_model("icl-mini", dtype="x"),
    "final_norm": lambda model, acts: acts.readout.using(final_norm="x", bias=True),
    "source": lambda model, acts: il.label_keys(acts, (0, 0), source="x"),
    "mode": lambda model, acts: il.ablate_heads(model, [(0, 0)], mode="x").__enter__(),
    "positions": lambda model, acts: il.remove_position(model, [(0, 0)], positions="x").__enter__(),
    "activation": lambda model, acts: il.patch_heads(model, [(0, 0)], acts.batch, activation="x").__enter__(),
    "table": lambda model, acts: il.explain(model, families.PROMPT, k=1, n_ablated=1).to_frame("x"),
}


@pytest.mark.parametrize("name", sorted(ASKED))
def test_every_choice_is_refused_in_the_same_words(no_type_checks, gpt2, gpt2_acts, name):
    with pytest.raises(il.InputError, match=rf"^{name} must be one of '.*', '\w+', got 'x'$"):
        ASKED[name](gpt2, gpt2_acts)
