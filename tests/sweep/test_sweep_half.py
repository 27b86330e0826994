"""Half precision: log-probabilities near Hugging Face's in every family; every function finite in
each kind.
"""

from collections.abc import Callable
from functools import cache
from itertools import product

import families
import pytest
import sweep
import torch
from cases import slow_except
from family_tables import EXACT, NOT_HALF
from sweep import CALLS, OTHERS, PROMPTS, Case, is_refused, trimmed
from transformers import AutoModelForCausalLM

from icl_lens.reading.last_logits import last_log_probs

pytestmark = pytest.mark.usefixtures("no_type_checks")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDINGS = 40
"""How many units in the last place of the largest logit may differ: each layer rounds several
times.
"""


@pytest.fixture(scope="module")
def half(load_tiny) -> Callable[[str, str], Case]:
    @cache
    def get(family: str, dtype: str) -> Case:
        return Case(load_tiny(family, dtype=DTYPES[dtype]), PROMPTS, OTHERS)

    return get


QUICK = {("olmo2", "bfloat16"), ("olmo2", "float16"), ("gpt2", "float16")}


@pytest.mark.parametrize(
    ("family", "dtype"),
    slow_except(QUICK, product(EXACT, sorted(DTYPES))),
)
def test_log_probabilities_are_hugging_faces_up_to_rounding(
    half, family_folder, family, dtype
) -> None:
    case = half(family, dtype)
    hf = AutoModelForCausalLM.from_pretrained(
        family_folder(family), dtype=DTYPES[dtype], **families.EAGER
    ).eval()
    exact = AutoModelForCausalLM.from_pretrained(
        family_folder(family), dtype=torch.float64, **families.EAGER
    ).eval()
    ours = last_log_probs(case.model, case.batch).double()
    for row, ids in enumerate(trimmed(case.batch)):
        with torch.no_grad():
            theirs, full = (
                model(ids[None], use_cache=True).logits[0, -1].double() for model in (hf, exact)
            )
        unit = torch.finfo(DTYPES[dtype]).eps * float(theirs.abs().max().clamp(min=1))
        theirs, full = (logits.log_softmax(-1) for logits in (theirs, full))
        noise = float((theirs - full).abs().max())  # what the precision itself costs
        assert float((ours[row] - theirs).abs().max()) <= max(ROUNDINGS * unit, 2 * noise)
        assert noise > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(NOT_HALF))
def test_what_is_left_out_fails_without_the_package(half, family) -> None:
    case = half(family, "bfloat16")
    with pytest.raises(RuntimeError, match="same dtype"):
        case.model(case.batch.tokens, attention_mask=case.batch.attention_mask)


def in_turn() -> list[tuple[str, str, str]]:
    """Return every (function, dtype, family) with a family of each kind: families and dtypes take
    turns.
    """
    half_families = [family for family in EXACT if family not in NOT_HALF]
    dtypes = sorted(DTYPES)
    return [
        (function, dtypes[(i + j) % len(dtypes)], family)
        for i, function in enumerate(sorted(CALLS))
        for j, family in enumerate(families.in_turn(i, half_families))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "dtype", "family"), in_turn())
def test_every_function_gives_finite_numbers(half, family, dtype, function) -> None:
    case = half(family, dtype)
    if is_refused(function, family, lambda: CALLS[function].function(case)):
        return
    results = list(sweep.numbers(CALLS[function].function(case)))
    assert results
    for numbers in results:
        assert numbers.isfinite().all(), numbers
