"""What commands say of a user's own file, and prompts that a model cannot choose between."""

import pytest

import icl_lens as il
from icl_lens.cli.head_options import head_names
from icl_lens.cli.options import TokenOptions
from icl_lens.cli.own_data import data_sentences

PAIRS = "input,output\n" + "\n".join(f"{n} of all,city {n}" for n in range(8))


def test_repeated_queries_of_a_file_are_counted(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text(PAIRS)
    task = il.PairTask("pairs", path)
    many, few = task.prompts(20), task.prompts(4)
    n_queries = len({prompt.query for prompt in many})
    assert data_sentences(task, many)[1] == (
        f"20 prompts are drawn from them, with {n_queries} different queries."
    )
    assert len(data_sentences(task, few)) == 1


def test_pairs_whose_answers_begin_alike_are_left_out(icl_mini, tmp_path, capsys):
    """icl-mini spells the words that it does not know, and Lima, London and Lisbon begin with L."""
    path = tmp_path / "pairs.csv"
    answers = ["Lima", "London", "Lisbon", "Lagos", "Riga", "Cairo"]
    inputs = ["happy", "sad", "joy", "love", "hate", "glad"]
    rows = [f"{text},{answer}" for text, answer in zip(inputs, answers, strict=True)]
    path.write_text("\n".join(["input,output", *rows]))
    prompts = il.PairTask("pairs", path).prompts(40, demonstrations=2)
    alike, told_apart = [], []
    for prompt in prompts:
        first_letters = {label[0] for label in prompt.labels}
        (alike if len(first_letters) == 1 else told_apart).append(prompt)
    assert alike
    assert told_apart
    batch = TokenOptions().tokenize(icl_mini, prompts)
    assert list(batch.prompts) == told_apart
    error = " ".join(capsys.readouterr().err.split())
    assert f"{len(alike)} prompts are left out, because the answers, such as 'L" in error
    assert error.endswith("begin with the same token.")
    with pytest.raises(il.InputError, match="cannot choose between answers of these prompts"):
        TokenOptions().tokenize(icl_mini, alike)


def test_pairs_of_numbers_are_no_heads():
    assert head_names("L3H1, L4H0") == ["L3H1", "L4H0"]
    with pytest.raises(il.InputError, match=r"names such as L1H2,L3H0, got '\(3,1\)'"):
        head_names("(3,1)")
