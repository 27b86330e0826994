"""Exchanges against Hugging Face's own key-value cache and against nested patches; donors; planted models."""

import hf_exchange
import pytest
from family_tables import EXACT
from tolerance import assert_close

import icl_lens as il
from icl_lens.locate.towers import EXCHANGES, exchange_scores, tower_prompts
from icl_lens.models.view import ModelView

PROMPTS = [
    il.Prompt.parse("love : bar like : bar eight : foo two : foo one :", answer="foo"),
    il.Prompt.parse("happy : bar three : foo nine :", answer="foo"),
    il.Prompt.parse("two : foo cat : bar red : bar dog :", answer="bar"),
]
"""Ragged, with texts of one token, so that donors have their labels at the same positions."""


def whole_groups(hf):
    """Some heads by layer, all of the same groups of keys and values."""
    n_heads, n_kv = hf_exchange.groups(hf)
    size = n_heads // n_kv
    return {0: list(range(size)), 2: list(range(n_heads - size, n_heads))}


def ids_of(batch, row):
    return batch.tokens[row, : int(batch.last[row]) + 1]


def places(prompts, name, row):
    """Where the keys or values at a prompt's labels come from, label by label."""
    donor, found = prompts.donors[name], {}
    for index, position in enumerate(prompts.batch.label_positions[row].tolist()):
        if position < 0:
            continue
        if donor.rows is None:
            found[position] = ids_of(donor.batch, row), int(donor.batch.label_positions[row, index])
        elif (place := int(donor.rows[row, index])) >= 0:
            found[position] = ids_of(donor.batch, place), int(donor.batch.last[place])
        assert found[position][1] == position
    return found


def log_odds(log_probs, batch, row):
    labels = log_probs[batch.label_tokens]
    answer = int(batch.answer[row])
    return labels[answer] - labels[1 - answer]


@pytest.mark.parametrize("name", EXACT)
def test_exchanges_are_those_of_hugging_face(family_run, name):
    run = family_run(name)
    own = il.tokenize(run.model, PROMPTS, prepend_bos=False)
    view, heads = ModelView.of(run.model), whole_groups(run.hf)
    chosen = [il.Head(layer, head) for layer, some in heads.items() for head in some]
    prompts = tower_prompts(run.model, own)
    scores, _, reason = exchange_scores(
        view, prompts, [(one, chosen) for one in EXCHANGES], progress=lambda *_: None, stage=""
    )
    assert reason == ""
    worst = 0.0
    for row in range(len(own)):
        ids = ids_of(own, row)
        for place, one in enumerate(EXCHANGES, start=1):
            taken = {
                "q": None if one.q is None else ids_of(prompts.donors[one.q].batch, row),
                "k": None if one.k is None else places(prompts, one.k, row),
                "v": None if one.v is None else places(prompts, one.v, row),
            }
            theirs = log_odds(hf_exchange.exchanged(run.hf, ids, heads, **taken), own, row)
            assert_close(scores.log_odds[row, place], theirs.float(), msg=f"{one.name} of prompt {row}")
            worst = max(worst, abs(float(scores.log_odds[row, place] - theirs)))
    print(name, worst)
    assert worst <= 2e-5
    assert (scores.log_odds[:, 1:8] - scores.log_odds[:, :1]).abs().max() > 1e-3
