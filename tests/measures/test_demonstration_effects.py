"""What each demonstration adds to the answer.

`test_sweep_numbers` compares the effects with plain Hugging Face passes.
"""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from passes import watched
from shared import ragged
from small_tokenizers import model_of
from tolerance import assert_close

import icl_lens as il
from icl_lens.measures.demonstration_effects import HideDemonstration

PROMPTS = [
    il.Prompt.parse("love : bar like : bar eight : foo one :", answer="foo"),
    il.Prompt.parse("two : foo sad : bar three :", answer="foo"),
]
TEMPLATE = il.Template("Q: {text}\nA: {label}", "Q: {text}\nA:", "\n\n", prefix="Classify.\n\n")


@pytest.mark.parametrize("kind", ["byte", "metaspace"])
@pytest.mark.parametrize("bos", [False, True])
def test_demonstrations_with_the_templates_words_end_where_the_next_begins(kind, bos):
    model = model_of(kind)
    batch = il.tokenize(model, PROMPTS, template=TEMPLATE, prepend_bos=bos)
    for row, prompt in enumerate(PROMPTS):
        tokens = batch.tokens[row].tolist()
        ranges = [part for part in batch.demonstration_ranges[row].tolist() if part[0] >= 0]
        texts = [model.tokenizer.decode(tokens[start:end]) for start, end in ranges]
        assert texts == [f"Q: {part.text}\nA: {part.label}\n\n" for part in prompt.demonstrations]
        before, after = tokens[bos : ranges[0][0]], tokens[ranges[-1][1] : int(batch.last[row]) + 1]
        assert model.tokenizer.decode(before).lstrip() == "Classify.\n\n"
        assert model.tokenizer.decode(after) == f"Q: {prompt.query}\nA:"


@pytest.mark.parametrize("way", ["keys", "values"])
def test_in_one_layer_keys_and_values_add_up_to_the_hidden_demonstration(load_tiny, float64, way):
    model = load_tiny("gpt2", dtype=torch.float64)
    batch = ragged(model)
    name, last = "blocks.0.attn.hook_z", (torch.arange(len(batch)), batch.last)

    def z(*edits: il.Edit) -> torch.Tensor:
        with il.edited(model, *edits, batch=batch):
            return model.run_with_cache(batch.tokens, names_filter=name)[1][name][last]

    changes = {
        hidden_part: z(HideDemonstration(1, hidden_part)) - z()
        for hidden_part in ("hidden", "keys", "values")
    }
    assert changes[way].abs().max() > 1e-4
    assert_close(changes["keys"] + changes["values"], changes["hidden"])


def test_all_demonstrations_cost_one_pass_and_rows_of_one_token(load_tiny):
    model = load_tiny("gpt2")
    batch = ragged(model)
    il.demonstration_effects(model, batch)  # checks of heads run once per model
    widths = []
    with watched(lambda _, x: widths.append(x.shape[1]), model.blocks[0]):
        effects = il.demonstration_effects(model, batch)
    assert widths == [batch.tokens.shape[1], 1]
    assert effects.fallback_reason == ""


def test_whole_passes_give_the_same_and_say_why(load_tiny):
    model = load_tiny("gpt2")
    batch = ragged(model)
    rows = il.demonstration_effects(model, batch)
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: x)]):
        whole = il.demonstration_effects(model, batch)
    assert "hooks" in whole.fallback_reason
    for name in ("log_odds", "log_prob", "whole_log_odds", "whole_log_prob"):
        assert_close(getattr(whole, name).nan_to_num(9.0), getattr(rows, name).nan_to_num(9.0))


@pytest.mark.parametrize(
    "options",
    [{}, {"template": il.Template("love {text} : {label}", "love {text} :", prefix="one ")}],
)
def test_removed_is_the_prompt_without_its_text(icl_mini, options):
    model = icl_mini
    batch = il.tokenize(model, PROMPTS, **options)
    effects = il.demonstration_effects(model, batch, ways=["removed"])
    assert effects.whole_log_odds.isnan().all()
    assert effects.log_odds[1, 2].isnan().all()
    for row, prompt in enumerate(PROMPTS):
        intact = il.score(model, batch)[row]
        for place in range(len(prompt.demonstrations)):
            remaining = [
                demonstration
                for number, demonstration in enumerate(prompt.demonstrations)
                if number != place
            ]
            alone = il.Prompt(remaining, prompt.query, prompt.answer, prompt.labels)
            left = il.score(model, il.tokenize(model, alone, labels=batch.labels, **options))[0]
            drop = (intact - left)[int(batch.answer[row])]
            assert_close(effects.log_prob[row, place, 0], drop)
            assert_close(
                effects.log_odds[row, place, 0], drop - (intact - left)[1 - int(batch.answer[row])]
            )
    with pytest.raises(il.InputError, match="batch must have the tokens of its own prompts"):
        il.demonstration_effects(model, batch.at([7]), ways=["removed"])


def test_places_count_from_one_in_both_tables(load_tiny):
    model = load_tiny("gpt2")
    effects = il.demonstration_effects(model, il.tokenize(model, PROMPTS), ways=["hidden"])
    table = effects.to_frame()
    by_place = [place for place in effects.by_place()["place"].unique() if isinstance(place, int)]
    assert sorted(table["place"].unique()) == by_place == list(range(1, 1 + len(by_place)))
    assert table.query("place == 1")["text"].tolist() == [texts[0] for texts in effects.texts]


def test_means_by_place_and_class_by_hand(load_tiny, monkeypatch):
    model = load_tiny("gpt2")
    by_hand = il.demonstration_effects(
        model, il.tokenize(model, [*PROMPTS, *PROMPTS]), ways=["hidden"]
    )
    nan = torch.nan
    effects = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, nan], [3.0, 4.0, 5.0], [6.0, 7.0, nan]])[
        ..., None
    ]
    by_hand = replace(
        by_hand, log_odds=effects, whole_log_odds=torch.tensor([[10.0], [20.0], [30.0], [40.0]])
    )
    means = by_hand.by_place().set_index(["place", "demonstrations"])["mean"]
    expected = {
        (1, "answer"): 5.0,  # "two : foo" in both prompts of the second kind
        (1, "other"): 2.0,
        (1, "both"): 3.5,
        (2, "other"): 4.5,
        (2, "both"): 4.5,
        (3, "answer"): 4.0,
        (3, "both"): 4.0,
        ("sum", "both"): (6 + 9 + 12 + 13) / 4,
        ("all at once", "both"): 25.0,
    }
    pd.testing.assert_series_equal(
        means, pd.Series(expected), check_names=False, check_index_type=False
    )
    assert by_hand.by_place()["low"].isna().all()  # two queries
    monkeypatch.setattr("icl_lens.foundation.intervals.MIN_CLUSTERS", 2)
    table = by_hand.by_place().set_index(["place", "demonstrations"])
    assert table.loc[(1, "both"), "low"] < 3.5 < table.loc[(1, "both"), "high"]
    assert table.loc[(1, "both"), "n"] == 4
    assert by_hand.to_frame()["is_answer"].tolist() == [False, False, True, True, False] * 2


def test_prompts_without_anything_to_compare_are_in_no_mean(load_tiny):
    """The second prompt has one label, so no log-odds; its effects on log p count."""
    model = load_tiny("gpt2")
    alone = il.Prompt.parse("love : bar like : bar two :", answer="bar")
    batch = il.tokenize(model, [PROMPTS[0], alone], labels=("foo", "bar"), prepend_bos=False)
    effects_of_prompts = il.demonstration_effects(model, batch, ways=["hidden"])
    table = effects_of_prompts.by_place().set_index(["place", "demonstrations"])
    for place, effects in (
        ("sum", effects_of_prompts.log_odds[0].sum()),
        ("all at once", effects_of_prompts.whole_log_odds[0]),
    ):
        assert table.loc[(place, "both"), "n"] == 1
        assert_close(table.loc[(place, "both"), "mean"], float(effects))
    table = effects_of_prompts.by_place(outcome="log_prob").set_index(["place", "demonstrations"])
    assert table.loc[("sum", "both"), "n"] == 2


def test_texts_are_removed_from_pairs_and_not_from_rows_that_end_early(load_tiny):
    """Answers of two prompts may share their first token. A row that `at` has cut does not end
    where prompts do.
    """
    model = load_tiny("gpt2")
    pairs = [il.Demonstration("love", "yes"), il.Demonstration("sad", "red")]
    prompts = [
        il.Prompt(pairs, "one", answer, ("yes", "red", answer)) for answer in ("cat dog", "cat bar")
    ]
    batch = il.tokenize(model, prompts, prepend_bos=False)
    log_prob_lost = il.demonstration_effects(model, batch, ways=["removed"]).log_prob
    for row, prompt in enumerate(prompts):
        scores = [
            il.score(
                model,
                il.tokenize(
                    model, replace(prompt, demonstrations=demonstrations), prepend_bos=False
                ),
            )
            for demonstrations in (pairs, pairs[1:])
        ]
        lost = [
            label_scores[0, label_scores.labels.index(prompt.answer)] for label_scores in scores
        ]
        assert_close(log_prob_lost[row, 0, 0], lost[0] - lost[1])
    early = batch.at([3])
    for call in (
        lambda: il.demonstration_effects(model, early, ways=["removed"]),
        lambda: il.calibrated_scores(model, early, inputs=["nine"]),
    ):
        with pytest.raises(il.InputError, match="batch must have the tokens of its own prompts"):
            call()
