"""`icl-lens ablate`: the printed numbers are those of ablate_heads; bad input is refused."""

import re

import families
import pytest

import icl_lens as il
from icl_lens.cli.ablate import ablate


def shown(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_one_prompt(family_folder, load_tiny, capsys):
    ablate(families.PROMPT, model=str(family_folder("gpt2")), heads="L0H1,L2H3", random_sets=3, device="cpu")
    out = shown(capsys)
    model = load_tiny("gpt2")
    batch = il.tokenize(model, [il.Prompt.parse(families.PROMPT)])
    with il.ablate_heads(model, [(0, 1), (2, 3)]):
        foo = float(il.label_log_probs(model, batch)[0, batch.labels.index("foo")].exp())
    assert "selected L0H1, L2H3" in out
    assert f"{foo:.1%}" in out
    assert "2 random heads zeroed, 3 sets" in out


def test_a_task_on_the_bundled_model(capsys):
    ablate(task="sentiment-number", check=False, n=10, k=2, random_sets=2, device="cpu")
    out = shown(capsys)
    assert "located L" in out
    assert "2 heads zeroed" in out


def test_a_task_is_balanced_and_scored_both_ways(capsys):
    """Without the heads of layer 0 icl-mini says neither label; of the two, it still leans to the right one."""
    ablate(
        task="sentiment-number",
        check=False,
        n=40,
        layout="order",
        heads="L0H0 L0H1 L0H2 L0H3 L0H4 L0H5",
        random_sets=1,
        device="cpu",
    )
    row = re.search(r"6 heads zeroed\W+([\d.]+)%\W+([\d.]+)%", shown(capsys))
    assert 60 < float(row[1]) < 100
    assert float(row[2]) < 10


def test_an_odd_number_of_prompts_and_heads_named_twice(capsys):
    ablate(task="sentiment-number", check=False, n=1, heads="L1H2,L1H2", random_sets=1, device="cpu")
    assert "1 heads zeroed" in shown(capsys)


def test_your_own_sentences(tmp_path, capsys):
    path = tmp_path / "notes.csv"
    words = {"animal": ["cat", "dog", "horse", "cow"], "country": ["France", "Spain", "Italy", "Peru"]}
    lines = [
        f"{word} {other},{kind}" for kind, some in words.items() for word in some for other in some if word != other
    ]
    path.write_text("note,kind\n" + "\n".join(lines))
    with pytest.raises(il.InputError, match="with columns="):
        ablate(task="notes", path=path, n=4, device="cpu")
    ablate(task="notes", path=path, columns="note,kind", check=False, n=4, k=1, random_sets=1, device="cpu")
    assert "1 heads zeroed" in shown(capsys)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "either a prompt or --task"),
        ({"prompt": families.PROMPT, "task": "sst2"}, "either a prompt or --task"),
        ({"task": "sentiment-number", "answer": "foo"}, "--answer has no effect"),
        ({"prompt": families.PROMPT, "heads": "L0H1", "k": 3}, "not both"),
        ({"prompt": families.PROMPT, "heads": " "}, "--heads must name at least one head"),
        ({"prompt": families.PROMPT, "labels": "yes,no"}, "--labels has no effect here"),
        ({"task": "sentiment-number", "labels": "yes"}, "labels must be 2 different words"),
        ({"task": "x", "columns": "a"}, "--columns must name .* got 'a'"),
        ({"prompt": families.PROMPT, "heads": "22,0"}, "invalid head '22'"),
        ({"prompt": families.PROMPT, "k": 7}, "12 heads.* got 7"),
        ({"prompt": families.PROMPT, "k": 13}, "at most 12, .* got 13"),
    ],
)
def test_bad_arguments_are_refused(family_folder, arguments, match):
    with pytest.raises(il.InputError, match=match):
        ablate(model=str(family_folder("gpt2")), device="cpu", **arguments)
