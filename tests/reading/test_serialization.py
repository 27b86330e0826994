"""Captures load from disk unchanged, for the same weights only; no file is half-written; digests
are stable.
"""

import copy
import json
import os
import random
import stat

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from same_values import tensors_of
from tolerance import assert_close

import icl_lens as il
from icl_lens.foundation.digest import json_digest, weights_digest
from icl_lens.foundation.files import atomic_write, write_text
from icl_lens.prompts.batch import prompts_digest
from icl_lens.reading import serialization


def assert_same(first, second):
    expected, tensors = tensors_of(first), tensors_of(second)
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(tensors[name], value), name


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa", "gemma2"])
def test_a_capture_comes_back_as_it_was(load_tiny, gpt2_batch, tmp_path, name):
    model = load_tiny(name)
    batch = il.tokenize(model, list(gpt2_batch.prompts), prepend_bos=False)
    acts = il.capture(model, batch)
    acts.save(tmp_path / "acts.safetensors")
    again = il.Activations.load(tmp_path / "acts.safetensors", model)
    assert_same(acts, again)
    assert_same(acts.batch, again.batch)
    for plain in ("labels", "prompts", "template", "token_strings", "token_names", "texts"):
        assert getattr(again.batch, plain) == getattr(batch, plain)
    targets = batch.answer_tokens
    assert_close(
        il.head_log_prob_increase(again, targets), il.head_log_prob_increase(acts, targets)
    )


NAMES = {
    *("resid_pre", "attn_out", "mlp_out", "resid_final", "z", "pattern", "q", "mlp_post", "pass_v"),
    *("label_resid_pre", "label_attn_out", "batch.tokens", "batch.attention_mask", "batch.last"),
    *("batch.label_positions", "batch.label_ranges", "batch.label_index", "batch.label_mask"),
    *("batch.label_tokens", "batch.answer", "batch.text_ranges", "batch.demonstration_ranges"),
    *("batch.query_range", "batch.n_appended"),
}
"""The tensors of files of version 3."""
BATCH_VALUES = {
    *("labels", "token_strings", "token_names", "texts", "vocabulary", "prepend_bos", "template"),
    *("prompts", "whole_labels", "label_groups"),
}
"""What their metadata has of a batch."""


def contents(path):
    """Return a file's tensors and its header."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["icl_lens"])
        return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118


def test_files_have_the_entries_of_their_version(gpt2_acts, tmp_path):
    """Files of version 3 load as long as its names stay; other names need another version."""
    gpt2_acts.save(tmp_path / "acts.safetensors")
    tensors, header = contents(tmp_path / "acts.safetensors")
    assert header["version"] == 3
    assert tensors.keys() == NAMES
    assert header["about"]["batch"].keys() == BATCH_VALUES


def test_files_of_texts_that_were_saved_without_decisions_load(gpt2, tmp_path):
    """Texts had no `n_appended` before decisions were a value of their own."""
    path = tmp_path / "acts.safetensors"
    acts = il.capture(gpt2, il.tokenize(gpt2, [il.Text("love like bar", answer=" foo")] * 2))
    acts.save(path)
    tensors, header = contents(path)
    del header["digest"], tensors["batch.n_appended"]
    save_file(tensors, path, metadata={"icl_lens": json.dumps(header)})
    again = il.Activations.load(path, gpt2)
    assert_same(again.batch, acts.batch)
    assert again.batch.decisions.n_appended.tolist() == [0, 0]


def test_positions_of_free_prompts_come_back(gpt2, tmp_path):
    batch = il.PromptBatch.from_tokens(
        [[5, 6, 7, 8]], model=gpt2, against=[[3, 4]], positions=[1, 2]
    )
    acts = il.capture(gpt2, batch)
    acts.save(tmp_path / "acts.safetensors")
    again = il.Activations.load(tmp_path / "acts.safetensors", gpt2)
    assert_same(acts, again)
    assert again.batch.against.tolist() == [[3, 4], [3, 4]]
    assert again.values.pass_index.tolist() == [0, 0]


def test_a_part_of_a_capture_is_saved_as_that_part(gpt2, gpt2_acts, tmp_path):
    gpt2_acts[1:].save(tmp_path / "part.safetensors")
    assert_same(il.Activations.load(tmp_path / "part.safetensors", gpt2), gpt2_acts[1:])


def test_other_models_and_weights_are_refused(gpt2, gpt2_acts, load_tiny, tmp_path):
    path = tmp_path / "acts.safetensors"
    gpt2_acts.save(path)
    with pytest.raises(
        il.InputError, match=r"GPT2LMHeadModel of 3 layers × 4 heads in float32.* .LlamaForCausalLM"
    ):
        il.Activations.load(path, load_tiny("llama"))
    with pytest.raises(il.InputError, match=r"GPT2LMHeadModel of .* in float64"):
        il.Activations.load(path, load_tiny("gpt2", dtype=torch.float64))
    weight = gpt2.blocks[1].attn.W_O.detach()
    before = weight.clone()
    try:
        with torch.no_grad():
            weight.mul_(1.001)
        with pytest.raises(il.InputError, match="other weights"):
            il.Activations.load(path, gpt2)
    finally:
        with torch.no_grad():
            weight.copy_(before)
    il.Activations.load(path, gpt2)


def test_files_that_are_none_are_refused(gpt2, gpt2_acts, tmp_path):
    missing, other_file, older, newer = (
        tmp_path / name for name in ("missing", "other", "older", "newer")
    )
    save_file({"a": torch.ones(1)}, other_file)
    serialization.write_tensors(older, "activations", 1, {"a": torch.ones(1)}, {})
    serialization.write_tensors(newer, "activations", 99, {"a": torch.ones(1)}, {})
    (tmp_path / "text").write_text("no tensors")
    for path, message in [
        (missing, "cannot read"),
        (tmp_path / "text", "cannot read"),
        (other_file, "must hold activations"),
        (older, "must be 3, got 1"),
        (newer, "got 99"),
    ]:
        with pytest.raises(il.InputError, match=message):
            il.Activations.load(path, gpt2)
    with pytest.raises(il.InputError, match="cannot write"):
        gpt2_acts.save(tmp_path / "nowhere" / "acts")


def test_moved_activations_say_where_they_are_needed(gpt2_acts, gpt2_batch):
    away = gpt2_acts.to("meta")
    assert {away.z.device.type, away.batch.tokens.device.type, away.readout.scale.device.type} == {
        "meta"
    }
    targets = gpt2_batch.answer_tokens
    for ask in (
        lambda: il.head_log_prob_increase(away, targets),
        lambda: il.top_heads(away, targets, k=1),
        lambda: away.label_log_probs,
        lambda: away.token_log_probs(targets),
    ):
        with pytest.raises(il.InputError, match="device cpu, got meta"):
            ask()
    assert_same(gpt2_acts.to("cpu"), gpt2_acts)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "a.json"
    write_text(target, "old")

    def fail_halfway():
        with atomic_write(target) as beside:
            beside.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_new_files_have_the_mode_of_the_umask_which_no_thread_sees_changed(tmp_path, monkeypatch):
    """As files that Python itself opens; files that exist keep theirs."""

    def change(mask):
        raise AssertionError("the umask belongs to all threads")

    for mask in (0o022, 0o077, 0o002):
        before = os.umask(mask)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(os, "umask", change)
                write_text(tmp_path / f"{mask}.json", "new")
            (tmp_path / "plain").write_text("new")
            assert stat.S_IMODE((tmp_path / f"{mask}.json").stat().st_mode) == 0o666 & ~mask
            assert stat.S_IMODE((tmp_path / "plain").stat().st_mode) == 0o666 & ~mask
            (tmp_path / "plain").unlink()
        finally:
            os.umask(before)
    (tmp_path / "18.json").chmod(0o400)
    write_text(tmp_path / "18.json", "newer")
    assert stat.S_IMODE((tmp_path / "18.json").stat().st_mode) == 0o400
    assert {path.name for path in tmp_path.iterdir()} == {"18.json", "63.json", "2.json"}


TENSORS = {
    "b": torch.arange(1500, dtype=torch.float32).reshape(50, 30),
    # torch.linspace(-1, 1, 7), whose last bits depend on the processor
    "a": torch.tensor(
        [
            -1.0,
            -0.6666666666666667,
            -0.33333333333333337,
            2**-54,
            0.33333333333333337,
            0.6666666666666667,
            1.0,
        ],
        dtype=torch.float64,
    ),
}


def test_digests_are_those_of_earlier_versions():
    """Digests are those of earlier versions, so that runs can be resumed and results recognized."""
    assert weights_digest(TENSORS) == "5cbdf266ccd59412"
    assert json_digest([[1, 2], "x"]) == "0aa6a7ae8092abf5"


def test_digests_of_weights_change_with_values_names_and_shapes():
    changed = TENSORS | {"a": TENSORS["a"] + 1e-3}
    renamed = {"c": TENSORS["b"], "a": TENSORS["a"]}
    turned = TENSORS | {"b": TENSORS["b"].reshape(30, 50)}
    digests = {weights_digest(tensors) for tensors in (TENSORS, changed, renamed, turned)}
    assert len(digests) == 4
    assert weights_digest(dict(reversed(TENSORS.items()))) == weights_digest(TENSORS)


def test_half_precision_is_read_as_numbers():
    half = {"w": torch.randn(9, generator=torch.Generator().manual_seed(0)).bfloat16()}
    assert weights_digest(half) == weights_digest({"w": half["w"].float()})


def test_digests_of_prompts_change_with_words_order_and_answer(gpt2):
    prompts = [
        il.Prompt.parse(text, answer="foo")
        for text in ("cat : foo the : bar a :", "love : bar one : foo two :")
    ]
    digest = prompts_digest(il.tokenize(gpt2, prompts))
    assert digest == prompts_digest(il.tokenize(gpt2, prompts))
    assert digest != prompts_digest(il.tokenize(gpt2, prompts[::-1]))
    with_other_answer = [prompts[0], il.Prompt.parse("love : bar one : foo two :", answer="bar")]
    assert digest != prompts_digest(il.tokenize(gpt2, with_other_answer)), (
        "the same words, asked for another answer"
    )
    # Padding is not part of a prompt.
    longer = il.tokenize(
        gpt2, [*prompts, il.Prompt.parse("cat dog the a : foo the : bar a :", answer="foo")]
    )
    assert prompts_digest(longer[:2]) == digest


def damaged(tensors, metadata, rng):
    """Return tensors and metadata of a file with one of them changed."""
    tensors, metadata = dict(tensors), copy.deepcopy(metadata)
    kind = rng.choice(
        ["zeros", "exchange", "remove", "dtype", "cut", "not finite", "metadata", "large"]
    )
    name, second_name = rng.sample(sorted(tensors), 2)
    tensor = tensors[name]
    if kind == "zeros":
        tensors[name] = torch.zeros(1)
    elif kind == "exchange":
        tensors[name], tensors[second_name] = tensors[second_name], tensor
    elif kind == "remove":
        del tensors[name]
    elif kind == "dtype":
        tensors[name] = tensor.float() if not tensor.is_floating_point() else tensor.long()
    elif kind == "cut":
        tensors[name] = tensor[..., :-1].clone()
    elif kind == "not finite":
        tensors["resid_pre"] = tensors["resid_pre"] * torch.nan
    elif kind == "large":
        tensors["batch.last"] = tensors["batch.last"] + 1000
    else:
        holder = rng.choice([metadata, metadata["batch"]])
        key = rng.choice(sorted(holder))
        holder[key] = rng.choice([None, 3, "x", [], {}, ["x"], 10**400])
    return tensors, metadata


@pytest.mark.parametrize("has_digest", [True, False])
def test_damaged_files_are_refused_or_load_as_they_were(gpt2, gpt2_acts, tmp_path, has_digest):
    """Files of earlier versions have no digest; what loads of them can at least be used."""
    path, rng = tmp_path / "acts.safetensors", random.Random(0)
    gpt2_acts.save(path)
    tensors, header = contents(path)
    whole, sentences = path.read_bytes(), []
    for number in range(120):
        if number % 4:
            changed, about = damaged(tensors, header["about"], rng)
            changed_header = header | {"about": about}
            if not has_digest:
                del changed_header["digest"]
            save_file(changed, path, metadata={"icl_lens": json.dumps(changed_header)})
        else:
            place = rng.randrange(min(len(whole), 12_000))  # the header, mostly
            path.write_bytes(
                whole[:place] + bytes([rng.randrange(256)]) + whole[place + rng.choice([1, 1, 5]) :]
            )
        try:
            loaded = il.Activations.load(path, gpt2)
        except il.InputError as error:
            sentences.append(str(error))
            continue
        il.top_heads(loaded, loaded.batch.answer_tokens, k=2)
        if has_digest:
            assert_same(gpt2_acts, loaded)
            assert_same(gpt2_acts.batch, loaded.batch)
    assert len(sentences) > 60
    assert [sentence for sentence in sentences if "\n" in sentence] == []


def test_tensors_of_one_zero_are_refused(gpt2, gpt2_acts, tmp_path):
    """Files of earlier versions have no digest, so shapes are compared with the model and the
    batch.
    """
    path = tmp_path / "acts.safetensors"
    gpt2_acts.save(path)
    tensors, header = contents(path)
    del header["digest"]
    for name in [name for name in tensors if not name.startswith("batch.")]:
        save_file(tensors | {name: torch.zeros(1)}, path, metadata={"icl_lens": json.dumps(header)})
        with pytest.raises(
            il.InputError, match=rf"is damaged \(ValueError: {name} must be Float \["
        ):
            il.Activations.load(path, gpt2)
