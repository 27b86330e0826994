"""`map_prompts`: a function of one's own over many prompts, stored and resumed; and the donors of
prompts.
"""

import numpy as np
import pytest

import icl_lens as il


@pytest.fixture(scope="module")
def model():
    return il.load_model("icl-mini")


@pytest.fixture(scope="module")
def many(model):
    return il.tokenize(model, il.load_task("sentiment-number", n=7))


def test_values_are_those_of_single_prompts_in_order(model, many):
    lengths = many.last + 1
    doubled = il.map_prompts(model, many, lambda rows: 2 * lengths[rows], run=il.Run(batch_size=3))
    assert doubled.tolist() == (2 * lengths).tolist()


def test_an_interrupted_run_computes_only_the_missing_batches(model, many, tmp_path):
    run, computed = il.Run(tmp_path / "run", batch_size=3), []

    def failing(rows):
        if rows[0] == 3:
            raise KeyboardInterrupt
        return many.last[rows]

    def recorded(rows):
        computed.append(rows)
        return many.last[rows]

    with pytest.raises(KeyboardInterrupt):
        il.map_prompts(model, many, failing, options={"what": "last"}, run=run)
    resumed = il.map_prompts(model, many, recorded, options={"what": "last"}, run=run)
    assert computed == [[3, 4, 5], [6]]
    np.testing.assert_array_equal(resumed, many.last.numpy())


def test_other_options_need_another_folder(model, many, tmp_path):
    run = il.Run(tmp_path / "run")
    il.map_prompts(model, many, lambda rows: many.last[rows], options={"heads": ["L0H0"]}, run=run)
    with pytest.raises(il.InputError, match=r"options\.heads="):
        il.map_prompts(
            model, many, lambda rows: many.last[rows], options={"heads": ["L0H1"]}, run=run
        )


def test_a_mean_over_prompts_is_refused(model, many):
    with pytest.raises(il.InputError, match="one row per prompt, got 1 rows for 7 prompts"):
        il.map_prompts(model, many, lambda rows: many.last[rows].float().mean(0, keepdim=True))


def test_donors_change_one_thing(many):
    donors = il.donor_prompts(many.prompts)
    assert list(donors) == ["query", "same class", "texts", "labels"]
    for prompt, of_other_class, same, texts, labels in zip(
        many.prompts, *donors.values(), strict=True
    ):
        assert of_other_class.demonstrations == same.demonstrations == prompt.demonstrations
        assert of_other_class.query != prompt.query != same.query
        assert [demonstration.label for demonstration in texts.demonstrations] == [
            demonstration.label for demonstration in prompt.demonstrations
        ]
        assert [demonstration.text for demonstration in labels.demonstrations] == [
            demonstration.text for demonstration in prompt.demonstrations
        ]
        assert all(
            demonstration.label != two.label
            for demonstration, two in zip(labels.demonstrations, prompt.demonstrations, strict=True)
        )
        assert same.answer == prompt.answer
        assert {of_other_class.answer, texts.answer, labels.answer} == {*prompt.labels} - {
            prompt.answer
        }
