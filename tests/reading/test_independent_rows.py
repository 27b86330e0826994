"""A prompt has the numbers that Hugging Face gives it alone: beside longer prompts, in pieces and
after longer ones.
"""

from collections.abc import Callable
from typing import Any

import pytest
import sweep
import torch
from families import N_CTX, VOCAB_SIZE, randomize, tokenizer
from sweep import assert_same
from tolerance import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

import icl_lens as il
from icl_lens.reading.last_logits import last_log_probs

NEAR = 12
"""Length from which rotations change: between the prompts, and the length of one of them."""
PROMPTS = [
    il.Prompt.parse("cat : foo the red : bar a blue :", answer="bar"),
    il.Prompt.parse("happy : bar sad : bar three : foo the nine :", answer="foo"),
    il.Prompt.parse("love : bar like : bar eight : foo two : foo one :", answer="foo"),
    il.Prompt.parse(
        "dog : bar cat : bar two : foo hate : bar one : foo red : bar nine : foo blue : bar three :",
        answer="foo",
    ),
]
"""10, 12, 14 and 26 tokens."""
HEADS = [(0, 1), (1, 2), (2, 0)]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
_LONG = {
    "short_factor": [1.0, 1.2, 1.0, 2.0],
    "long_factor": [2.5, 5.0, 3.0, 9.0],
    "original_max_position_embeddings": NEAR,
}
_BY_LAYER = ["sliding_attention", "full_attention", "sliding_attention"]
ROTATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 500.0, **_LONG},
            "max_position_embeddings": N_CTX,
            "original_max_position_embeddings": NEAR,
        },
    ),
    "dynamic": (
        "qwen2",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 6.0},
            "max_position_embeddings": NEAR,
        },
    ),
    "longrope in some layers": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "longrope",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    **_LONG,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "layer_types": _BY_LAYER,
            "sliding_window": 5,
            "head_dim": 8,
            "max_position_embeddings": N_CTX,
        },
    ),
}


@pytest.fixture(scope="module")
def build() -> Callable[..., Any]:
    """Return a function that builds a new Hugging Face model, always with the same weights."""

    def new(name: str, dtype: torch.dtype = torch.float32) -> Any:
        kind, options = ROTATIONS[name]
        config = AutoConfig.for_model(kind, **SIZES | options)
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        randomize(model, seed=5)
        model.config.architectures = [type(model).__name__]  # as in a saved model
        return model.to(dtype).eval()

    return new


@pytest.fixture(scope="module")
def load(build) -> Callable[..., Any]:
    def new(name: str) -> Any:
        model = il.load_model("any", hf_model=build(name), tokenizer=tokenizer(), device="cpu")
        model.cfg.n_ctx = N_CTX
        return model

    return new


def _in_block(block):
    """Return what a pass that the user runs in a block gives."""

    def run(model, batch):
        with block(model, batch):
            logits = model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits")
        return logits[torch.arange(len(batch)), batch.last].log_softmax(-1)

    return run


BLOCKS: dict[str, Callable[[Any, il.PromptBatch], torch.Tensor]] = {
    "a pass in ablate_heads": _in_block(lambda model, batch: il.ablate_heads(model, HEADS)),
    "a pass in remove_position": _in_block(
        lambda model, batch: il.edited(model, il.RemovePosition(HEADS, strength=0.5))
    ),
    "a pass in add_vector": _in_block(
        lambda model, batch: il.edited(
            model, il.AddVector(torch.linspace(-1, 1, model.cfg.d_model), 1), batch=batch
        )
    ),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_log_probabilities_are_those_of_hugging_face_alone(build, load, name):
    model = load(name)
    batch = sweep.tokenized(model, PROMPTS)
    want = []
    for tokens, last in zip(batch.tokens, batch.last.tolist(), strict=True):
        want.append(build(name)(tokens[None, : last + 1]).logits[0, -1].log_softmax(-1))
    want = torch.stack(want)
    assert_close(last_log_probs(model, batch), want)
    assert_close(
        torch.cat([last_log_probs(model, batch[[row]]) for row in (3, 1, 0, 2)]), want[[3, 1, 0, 2]]
    )
    plain = build(name)(batch.tokens, attention_mask=batch.attention_mask).logits
    plain = plain[torch.arange(len(batch)), batch.last].log_softmax(-1)
    assert (plain - want).abs().max() > 0.05, (
        "a batch must change the numbers of plain Hugging Face here"
    )


OF_PROMPTS = [
    name
    for name, call in sweep.CALLS.items()
    if call.of_prompts and name != "Activations.from_cache"
]
"""Functions that run a batch whose prompts have different rotations; caches of such a batch are
refused, see below.
"""
QUICK = {"head_log_prob_increase", "head_effects", "debias_edits", "a pass in remove_position"}
REPEATED = [pytest.mark.slow, pytest.mark.rotating]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        pytest.param(name, what, marks=() if what in QUICK and name == "longrope" else REPEATED)
        for number, what in enumerate((*sorted(OF_PROMPTS), *BLOCKS))
        for name in dict.fromkeys(
            [*(["longrope"] if what in QUICK else []), ("longrope", "dynamic")[number % 2]]
        )
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_every_function_gives_a_prompt_the_numbers_it_has_alone(load, name, what):
    def numbers_of_rows(model, rows):
        case = sweep.Case(model, sweep.PROMPTS[rows], sweep.OTHERS[rows])
        return (
            BLOCKS[what](model, case.batch) if what in BLOCKS else sweep.CALLS[what].function(case)
        )

    model = load(name)
    together = numbers_of_rows(model, slice(None))
    for row in range(
        2
    ):  # shorter than the length from which rotations change; the third prompt is longer
        alone = numbers_of_rows(load(name), slice(row, row + 1))
        assert_same(together, alone, row=row, msg=f"row {row}")
        assert_same(
            numbers_of_rows(model, slice(row, row + 1)),
            alone,
            msg=f"row {row} after a longer prompt",
        )


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
@torch.inference_mode()
def test_rows_that_end_early_have_the_numbers_of_their_text_alone(load, name):
    model = load(name)
    batch = sweep.tokenized(model, PROMPTS[3:])
    for positions in ([4, 11, 12, 25], "all"):
        rows = batch.at(positions)
        want = last_log_probs(model, rows)
        for acts in (
            il.capture(model, batch, positions=positions),
            il.capture(model, rows, writers=True),
        ):
            assert_close(acts.readout.log_probs(acts.resid_final), want)
    with (
        il.ablate_heads(model, [(0, 0)]),
        pytest.raises(il.InputError, match="positions must be 'last' while hooks"),
    ):
        il.capture(model, batch, positions=[4, 25])


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_a_cache_with_another_rotation_is_refused(load, name):
    model = load(name)
    batch = sweep.tokenized(model, PROMPTS)
    alone = batch[[2]]
    _, cache = model.run_with_cache(alone.tokens)
    assert_close(il.Activations.from_cache(model, cache, alone).z, il.capture(model, alone).z)
    _, cache = model.run_with_cache(batch.tokens, attention_mask=batch.attention_mask)
    with pytest.raises(il.InputError, match="cache must have the rotation that prompt 0 has alone"):
        il.Activations.from_cache(model, cache, batch)


@pytest.mark.parametrize("name", ROTATIONS)
def test_passes_leave_the_state_of_the_model_as_it_was(build, load, name):
    model = load(name)
    il.score(model, sweep.tokenized(model, PROMPTS))
    new = dict(build(name).named_buffers())
    for key, buffer in model.original_model.named_buffers():
        if key.endswith("inv_freq"):
            assert torch.equal(buffer, new[key.replace("_original_component.", "")]), key
    rotations = [
        rotation
        for rotation in model.original_model.modules()
        if "max_seq_len_cached" in vars(rotation)
    ]
    assert rotations
    assert all(
        "forward" not in vars(rotation)
        and rotation.max_seq_len_cached == rotation.original_max_seq_len
        for rotation in rotations
    )


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3"])
def test_padding_longer_than_a_sliding_window_is_finite_in_float64(family_folder, name):
    folder = family_folder(name)
    model = il.load_model(str(folder), tokenizer=tokenizer(), dtype=torch.float64, device="cpu")
    batch = sweep.tokenized(model, PROMPTS)
    alone = torch.cat([last_log_probs(model, batch[[row]]) for row in range(len(batch))])
    assert_close(last_log_probs(model, batch).float(), alone.float())
    with il.edited(model, il.RemovePosition(HEADS, strength=0.0)):
        assert_close(last_log_probs(model, batch).float(), alone.float())


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_a_metric_at_a_distance_is_refused_where_rotations_depend_on_the_length(load, name):
    with pytest.raises(
        il.InputError,
        match=r"distance must be None for .* depends on the length of the prompt, got 3",
    ):
        il.query_key_metric(load(name), (1, 2), distance=3)
