"""`icl-lens ablate`: the printed numbers are those of ablate_heads; bad input is refused."""

import families
import pytest

import icl_lens as il
from icl_lens.cli.ablate import ablate


def shown(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_one_prompt(family_folder, load_tiny, capsys):
    ablate(families.PROMPT, model=str(family_folder("gpt2")), heads="L0H1,L2H3", draws=3, device="cpu")
    out = shown(capsys)
    model = load_tiny("gpt2")
    batch = il.tokenize(model, [il.Prompt.parse(families.PROMPT)])
    with il.ablate_heads(model, [(0, 1), (2, 3)]):
        foo = float(il.label_log_probs(model, batch)[0, batch.labels.index("foo")].exp())
    assert "chosen L0H1, L2H3" in out
    assert f"{foo:.1%}" in out
    assert "2 random heads, 3 draws" in out


def test_a_task_on_the_bundled_model(capsys):
    ablate(task="sentiment-number", n=10, k=2, draws=2, device="cpu")
    out = shown(capsys)
    assert "located L" in out
    assert "2 heads removed" in out


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "either a prompt or --task"),
        ({"prompt": families.PROMPT, "task": "sst2"}, "either a prompt or --task"),
        ({"prompt": families.PROMPT, "draws": 0}, "at least 1"),
        ({"prompt": families.PROMPT, "heads": "22,0"}, "'22' names no head"),
        ({"prompt": families.PROMPT, "k": 7}, "too few random ones"),
        ({"prompt": families.PROMPT, "k": 13}, "more than the 12 heads"),
    ],
)
def test_bad_arguments_are_refused(family_folder, arguments, match):
    with pytest.raises(il.InputError, match=match):
        ablate(model=str(family_folder("gpt2")), device="cpu", **arguments)
