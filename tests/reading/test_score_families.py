"""Scores of families that rotate, norm, clip, scale or share out attention in their own way,
against transformers.
"""

import html
import io
from functools import cache
from typing import Any

import families
import pytest
import torch
from cases import slow
from rich.console import Console
from tolerance import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

import icl_lens as il
from icl_lens.models import attention_scores
from icl_lens.models.loading.supported import tl_version
from icl_lens.models.view import ModelView

SIZES: dict[str, Any] = {
    "vocab_size": families.VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 40,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 24,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
MIXED = ["sliding_attention", "sliding_attention", "full_attention"]
TEXT = "sad : yes happy : no dog : no cat : yes France : no red"

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "adjacent pairs, ERNIE": ("ernie4_5", {"head_dim": 8, "use_bias": True}),
    "adjacent pairs, ERNIE, experts": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "use_bias": True},
    ),
    "YaRN, angles of half a head's width, sinks": (
        "gpt_oss",
        {"head_dim": 12, "rope_parameters": YARN, **EXPERTS},
    ),
    "YaRN": ("qwen3", {"head_dim": 12, "rope_parameters": YARN}),
    "clipped": ("olmo", {"clip_qkv": 0.7}),
    "normed jointly, then clipped": ("olmoe", {"clip_qkv": 0.7, **EXPERTS}),
    "window and rotation in some layers": ("exaone4", {"sliding_window": 5, "layer_types": MIXED}),
    "norms of every head, Cohere": ("cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "norms of every head, StableLM": ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
}
ROTATED = [kind for kind in KINDS if not kind.startswith("norms of every head")]


@pytest.fixture(scope="module")
def tiny_of(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that builds a random model of a kind: (Hugging Face model, the same in the
    package).
    """

    @cache
    def build(kind: str) -> tuple[Any, Any]:
        model_type, options = KINDS[kind]
        config = AutoConfig.for_model(model_type, **SIZES | options)
        hf: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        families.randomize(hf, seed=len(kind))
        for name, sinks in hf.named_parameters():
            if name.endswith(".sinks"):  # large enough to take attention away
                sinks.data += 10.0
        folder = tmp_path_factory.mktemp("model")
        hf.save_pretrained(folder)
        return hf, il.load_model(str(folder), tokenizer=families.tokenizer(), device="cpu")

    return build


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROTATED)
def test_scores_are_the_logarithm_of_transformers_attention(kind, tiny_of):
    """In the first layer, whose inputs transformers returns in every family, and in the last
    one.
    """
    hf, model = tiny_of(kind)
    view, ids = ModelView.of(model), families.tokenizer()(TEXT)["input_ids"]
    with torch.no_grad():
        out = hf(torch.tensor([ids]), output_attentions=True, output_hidden_states=True)
    for layer, head in ((0, 1), (2, 5)):
        x, attention = out.hidden_states[layer][0], out.attentions[layer][0, head, -1]
        last = len(x) - 1
        keys = [
            key for key in (0, 1, last // 2, last - 3, last - 1, last) if attention[key] > 1e-30
        ]  # in the window
        metrics = [il.query_key_metric(view, (layer, head), distance=last - key) for key in keys]
        scores = torch.cat(
            [
                metric.scores(x[last:], x[[key]])[0]
                for key, metric in zip(keys, metrics, strict=True)
            ]
        )
        expected = attention[keys].log()
        assert expected.std() > 0.1
        assert_close(scores - scores.mean(), expected - expected.mean())


@pytest.mark.parametrize("wrong", ["pairs", "scale", "sinks", "rotates_whole_heads"])
def test_scores_that_differ_from_the_models_attention_are_refused(wrong, tiny_of, monkeypatch):
    """Here, what a model states about its attention is read wrongly."""
    _, model = tiny_of("YaRN, angles of half a head's width, sinks")
    batch = il.tokenize(model, [il.Prompt.parse(f"{TEXT} :", answer="no")], prepend_bos=False)
    read = attention_scores.attention_scoring

    def misread(view: ModelView, layer: int) -> attention_scores.AttentionScoring:
        position_scheme = read(view, layer)
        changed = {
            "pairs": "adjacent",
            "scale": position_scheme.scale * 1.05,
            "sinks": None,
            "rotates_whole_heads": False,
        }
        return position_scheme._replace(**{wrong: changed[wrong]})

    monkeypatch.setattr(attention_scores, "attention_scoring", misread)
    for use in (
        lambda: il.query_key_metric(model, (0, 2)),
        lambda: il.query_key_metric(model, (0, 2), distance=4),
        lambda: il.label_similarity(model, batch, [(0, 2)]),
    ):
        with pytest.raises(
            il.InputError, match=r"attention scores of GptOssForCausalLM are not supported: in L0H2"
        ):
            use()


@pytest.mark.skipif(tl_version() < (4, 0), reason="TransformerLens 3 cannot load these models")
@pytest.mark.parametrize(
    "kind",
    [
        "norms of every head, Cohere",
        slow("norms of every head, StableLM"),
    ],
)
def test_a_section_that_a_family_does_not_support_is_left_out_and_named(kind, tiny_of, tmp_path):
    hf, model = tiny_of(kind)
    explanation = il.explain(
        model,
        il.Prompt.parse(f"{TEXT} :", answer="no"),
        prepend_bos=False,
        k=3,
        n_ablated=2,
        n_random=3,
    )
    reason = f"the query and key norm of {type(hf).__name__} is not supported"
    sections = [section.section for section in explanation.left_out]
    assert sections == [
        "attention scores without positions",
        "why heads attend where they do",
        "top words of queries",
    ]
    assert all(reason in section.reason for section in explanation.left_out)
    console = Console(file=io.StringIO(), width=1000)
    console.print(explanation)
    for page_text in (
        console.file.getvalue(),
        html.unescape(explanation.to_html()),
        explanation._repr_html_(),
    ):
        assert all(f"Left out: {section}. Reason: {reason}" in page_text for section in sections)
    assert "<b>Query</b>" not in explanation.to_html()
    assert set(explanation.to_frame("words")["kind"]) == {"value", "key"}
    explanation.save(tmp_path / "explanation.json")
    assert il.results.Explanation.load(tmp_path / "explanation.json") == explanation
    # The other sections are those of Hugging Face.
    ids = families.tokenizer()(f"{TEXT} :")["input_ids"]
    with torch.no_grad():
        out = hf(torch.tensor([ids]), output_attentions=True)
    log_probs = out.logits[0, -1].log_softmax(-1)
    expected = log_probs[[families.WORDS.index(label) for label in explanation.labels]]
    assert_close(torch.tensor(explanation.scores.log_probs), expected)
    for report in explanation.heads:
        assert_close(
            torch.tensor(report.attention),
            out.attentions[report.head.layer][0, report.head.head, -1],
        )


def test_a_complete_explanation_leaves_nothing_out(load_tiny):
    model = load_tiny("glm")
    explanation = il.explain(
        model,
        il.Prompt.parse(f"{TEXT} :", answer="no"),
        prepend_bos=False,
        k=3,
        n_ablated=2,
        n_random=3,
    )
    assert explanation.left_out == ()
    assert all(
        report.similarity and report.why and report.query_words for report in explanation.heads
    )
    assert "Left out" not in explanation.to_html()
