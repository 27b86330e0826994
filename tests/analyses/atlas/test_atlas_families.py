"""An atlas of every model family has the scores that the family can have."""

import pytest
import sweep
from family_tables import EXACT, PARTLY_REFUSED

import icl_lens as il
from icl_lens.analyses.atlas.definitions import DEFINITIONS

TEXTS = ["love like love hate one two", "the cat a dog the red cat blue dog"]
EXCHANGES = {"exchange", "keys", "values"}
FAMILIES = [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.rotating]) for name in EXACT]


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_a_family_cannot_have_is_left_out(load_tiny, family):
    model = load_tiny(family)
    batch = sweep.tokenized(model, sweep.ONE_WORD)
    atlas = il.head_atlas(model, batch, text=TEXTS, n_sequences=3, k=4)
    refused = EXCHANGES if family in PARTLY_REFUSED["locate.exchange"] else set()
    assert set(atlas.left_out) == refused
    assert set(atlas.scores) == set(DEFINITIONS) - refused
    assert atlas.to_frame().notna().all().all()
