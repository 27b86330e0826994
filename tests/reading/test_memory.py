"""What a call keeps beside its result: the attention of one layer and a few prompts."""

import gc
import os
import platform
from pathlib import Path

import families
import pytest
import torch
from cases import slow, slow_except
from same_values import tensors_of
from tolerance import assert_close
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import icl_lens as il
from icl_lens.analyses.atlas.task_scores import similarity_auroc
from icl_lens.analyses.explanation import explain
from icl_lens.analyses.explanation.compute_head_reports import head_reports
from icl_lens.edits.captured_writers import writer_means
from icl_lens.edits.head_reader import HeadReader
from icl_lens.edits.hugging_face_cache import new_cache
from icl_lens.edits.one_token_rows.prefix_cache import PrefixCache
from icl_lens.measures.saliency import KINDS
from icl_lens.models import freed_memory, sizes
from icl_lens.models.freed_memory import release_freed_memory
from icl_lens.models.loading import bridge_comparison
from icl_lens.models.readout import Readout
from icl_lens.models.sizes import key_bytes
from icl_lens.models.view import ModelView
from icl_lens.reading.last_logits import last_log_probs
from icl_lens.reading.recorder import Recorder
from icl_lens.reading.repeated_tokens import repeated_sequences
from icl_lens.reading.similarity import compared_positions, similarity_in
from icl_lens.reading.writers import Writers

N_LAYERS, N_HEADS = 10, 4
SEVERAL_LAYERS = N_LAYERS - 1
"""More attention matrices than one layer takes for a gradient, and fewer than all layers have."""
HEAD = il.Head(5, 2)


class LiveMemory(TorchDispatchMode):
    """The largest sum of the sizes of tensors that operations in the block made and that lived at
    the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.n_bytes = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.n_bytes += storage.nbytes()
        if (
            self.n_bytes > self.peak
        ):  # without those that have been freed since, and counting each once
            self.storages = {
                key: pair for key, pair in self.storages.items() if not pair[0].expired()
            }
            self.n_bytes = sum(size for _, size in self.storages.values())
            self.peak = max(self.peak, self.n_bytes)
        return result


@pytest.fixture(scope="module")
def model():
    """A model of many layers, and heads that attend to many tokens."""
    config = LlamaConfig(
        vocab_size=families.VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=N_HEADS,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf = LlamaForCausalLM(config)
    return il.load_model(hf_model=hf, tokenizer=families.tokenizer(), device="cpu")


def prompts_of(model, n, n_demonstrations=16):
    """Return a batch of n prompts of fifty tokens, or of three for each demonstration."""
    words = ("love", "like", "eight", "one")
    demonstrations = [
        il.Demonstration(words[i % 4], ("bar", "foo")[i // 2 % 2]) for i in range(n_demonstrations)
    ]
    prompts = [
        il.Prompt(demonstrations, words[row % 4], ("bar", "foo")[row // 2 % 2]) for row in range(n)
    ]
    return il.tokenize(model, prompts, prepend_bos=False)


# Functions that run passes, with what is compared.
CALLS = {}


def call(function):
    CALLS[function.__name__] = function
    return function


@call
def score(model, batch):
    return il.score(model, batch)


@call
def score_in_whole_passes(model, batch):
    edit = il.RemovePosition([HEAD], positions="all")
    return il.score(model, batch, [[edit]]).flatten(1)


@call
def score_from_a_layer(model, batch):
    return il.score(model, batch, [[il.Ablate([HEAD])]]).flatten(1)


HEADS = [il.Head(layer, 2) for layer in range(N_LAYERS)]
"""One head of every layer."""


@call
def score_in_a_block(model, batch):
    with il.edited(model, il.RemovePosition(HEADS), batch=batch):
        return il.score(model, batch)


@call
def patched_values(model, batch):
    patch = il.Patch(HEADS, batch[[1, 2, 3, 4, 5, 0]], activation="v", align="labels")
    with il.edited(model, patch, batch=batch):
        return il.score(model, batch)


@call
def sets_in_a_block(model, batch):
    edit = il.RemovePosition([HEAD], positions="all")
    with il.edited(model, il.AddVector(torch.ones(model.cfg.d_model), 2), batch=batch):
        return il.score(model, batch, [[edit]]).flatten(1)


@call
def whole_labels(model, batch):
    return il.whole_label_log_probs(model, batch)


@call
def mean(model, batch):
    edit = il.Ablate([HEAD], mode="mean", reference=batch)
    return il.score(model, batch, [[edit]]).flatten(1)


@call
def gradient(model, batch):
    return il.head_effects(model, batch, method="gradient").log_odds


@call
def saliency(model, batch):
    flow = il.saliency_flow(model, batch)
    return torch.stack([getattr(flow, kind) for kind in KINDS])


@call
def head_to_head(model, batch):
    return il.head_to_head_effects(model, batch, [HEAD], part="q", method="gradient").log_odds


BOUNDED = (
    "score score_in_whole_passes score_from_a_layer score_in_a_block patched_values "
    "sets_in_a_block whole_labels mean gradient saliency"
).split()
"""Without `head_to_head`, which keeps what every component wrote at all tokens."""


def test_the_first_batch_keeps_the_attention_of_one_layer(model, monkeypatch):
    """It is also run by the Hugging Face model itself, alone, whose settings a bridge changes."""
    monkeypatch.setattr(model.original_model.config, "_attn_implementation", "eager")
    monkeypatch.setattr(model.original_model.config, "output_attentions", True)
    batch = prompts_of(model, 1)
    with LiveMemory() as memory:
        il.score(model, batch)
    assert memory.peak < SEVERAL_LAYERS * 4 * N_HEADS * batch.tokens.shape[1] ** 2


def test_the_first_batch_is_compared_after_its_last_token_only(model, monkeypatch):
    """Logits after all tokens of a long prompt take more memory than the rest of the pass."""
    n_read, log_probs_of = [], bridge_comparison.log_probs_of

    def count(logits):
        n_read.append(len(logits))
        return log_probs_of(logits)

    monkeypatch.setattr(bridge_comparison, "log_probs_of", count)
    il.score(model, prompts_of(model, 1, n_demonstrations=4))
    assert n_read == [1, 1]  # of the Hugging Face model, and of the bridge


READ_OUT = {
    "describe": lambda readout, x: readout.describe(x, torch.zeros(len(x), dtype=torch.int64), k=2),
    "ranks": lambda readout, x: readout.ranks(x, torch.zeros(len(x), dtype=torch.int64)),
    "top_tokens": lambda readout, x: readout.top_tokens(x, 2),
    "token_log_probs": lambda readout, x: readout.token_log_probs(
        x[None], torch.zeros(1, dtype=torch.int64)
    ),
}


@pytest.mark.parametrize("name", READ_OUT)
def test_one_piece_of_logits_is_kept_at_a_time(name, monkeypatch):
    """A piece is forgotten before the next one is computed."""
    draw = torch.Generator().manual_seed(0)
    readout = Readout(
        W_U=torch.randn(4, 50_000, generator=draw),
        b_U=None,
        gain=None,
        shift=None,
        scale=torch.ones(1),
        eps=1e-5,
        center=False,
        decode=str,
    )
    piece_bytes = 2 * 4 * 50_000
    monkeypatch.setattr("icl_lens.models.readout.LOGIT_BYTES", piece_bytes)
    with LiveMemory() as memory:
        READ_OUT[name](readout, torch.randn(6, 4, generator=draw))
    assert piece_bytes <= memory.peak < 1.9 * piece_bytes


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries keep freed tensors differently"
)
def test_freed_tensors_go_back_to_the_system():
    """From the first free of a tensor of 30 MB on, glibc keeps smaller ones below the last that is in use."""
    torch.ones(30_000_000 // 4)
    tensors = [torch.ones(1_000_000 // 4) for _ in range(64)]
    n_bytes = resident_bytes()
    del tensors[:-1]
    release_freed_memory()
    assert resident_bytes() < n_bytes - 50_000_000


def test_a_gradient_gives_freed_memory_back_at_each_layer(model, monkeypatch):
    """What the FFN's graph took would otherwise stay beside the largest matrices."""
    n_released = []
    monkeypatch.setattr(
        "icl_lens.edits.gradients.release_freed_memory", lambda: n_released.append(1)
    )
    gradient(model, prompts_of(model, 1))
    assert len(n_released) >= N_LAYERS


def test_a_large_gradient_gives_freed_memory_back_before_each_layer_that_runs(model, monkeypatch):
    """Once forward, and again in the backward pass of each of the two scores."""
    layers_with_graph = []

    def record(x, hook):
        if x.requires_grad:  # the first layer's input has no graph, and that of other passes none
            layers_with_graph.append(hook.layer())

    monkeypatch.setattr(freed_memory, "PASS_BYTES", 1)
    monkeypatch.setattr(freed_memory, "_release_freed_memory", record)
    gradient(model, prompts_of(model, 1))
    assert sorted(layers_with_graph) == sorted(3 * [*range(1, N_LAYERS)])


@pytest.mark.parametrize(("share", "n_calls"), [(0.4, 0), (0.6, 1), (1.1, 1 + N_LAYERS)])
def test_freed_memory_is_given_back_before_a_large_pass_and_each_layer_of_a_larger_one(
    model, monkeypatch, share, n_calls
):
    """The share is the pass's of what a pass may take."""
    n_released = []
    n_bytes = sizes.pass_bytes(ModelView.of(model), prompts_of(model, 1).tokens.shape[1])
    monkeypatch.setattr(freed_memory, "PASS_BYTES", int(n_bytes / share))
    monkeypatch.setattr(freed_memory, "release_freed_memory", lambda: n_released.append(1))
    il.score(model, prompts_of(model, 1))
    assert len(n_released) == n_calls


def test_two_caches_of_a_pass_share_keys_from_layer_to_layer(model):
    """Hugging Face's cache, and that of single-token rows."""
    view, batch = ModelView.of(model), prompts_of(model, 2)
    PrefixCache.of(view, batch)  # the first batch is also run by the Hugging Face model
    with LiveMemory() as one:
        PrefixCache.of(view, batch)
    with LiveMemory() as both:
        PrefixCache.of(view, batch, past=new_cache(view))
    of_all_layers = len(batch) * key_bytes(view, batch.tokens.shape[1])
    assert both.peak < one.peak + of_all_layers / 2


def test_what_writers_wrote_is_kept_once(model):
    """Vectors of all writers are joined layer by layer, and their means need sums only."""
    batch = prompts_of(model, 2)
    acts = il.capture(model, batch, writers="all")
    with LiveMemory() as joined:
        vectors, bias = acts.writers._vectors
    with LiveMemory() as captured:
        il.capture(model, batch, writers="all")
    with LiveMemory() as averaged:
        writer_means(model, batch)
    assert joined.peak < 1.7 * (vectors.nbytes + bias.nbytes)  # instead of twice and more
    assert averaged.peak < captured.peak - _bytes_by_layer(acts)


def n_living(kind):
    """How many objects of a class there are."""
    gc.collect()
    return sum(isinstance(item, kind) for item in gc.get_objects())


@pytest.mark.parametrize("by", ["contrast", slow("effect"), slow("exchange")])
def test_an_explanation_keeps_what_writers_wrote_beside_no_cache(model, monkeypatch, by):
    """Nor beside the readouts that follow; a pass that captures again replaces what was captured."""
    batch = prompts_of(model, 1, n_demonstrations=4)
    n_writers, n_acts = n_living(Writers), n_living(il.Activations)
    n_beside_work, n_before_passes, cache_of = [], [], PrefixCache.of

    def counted_cache(*args, **kwargs):
        n_beside_work.append(n_living(Writers))
        return cache_of(*args, **kwargs)

    def counted_reports(*args, **kwargs):
        n_beside_work.append(n_living(Writers))
        return head_reports(*args, **kwargs)

    def counted_capture(*args, **kwargs):
        n_before_passes.append(n_living(il.Activations))
        return il.capture(*args, **kwargs)

    monkeypatch.setattr(PrefixCache, "of", counted_cache)
    monkeypatch.setattr(explain, "head_reports", counted_reports)
    monkeypatch.setattr(explain, "capture", counted_capture)
    il.explain(model, batch.prompts[0], by=by, k=2)
    assert len(n_beside_work) >= 2
    assert {*n_beside_work} == {n_writers}
    assert n_before_passes == [n_acts] * (1 if by == "contrast" else 2)


def test_a_block_without_its_prompts_runs_the_whole_batch(model, monkeypatch):
    """Its edits may count on all rows, as `Patch` does on one source prompt for each."""
    monkeypatch.setattr(sizes, "pass_bytes", lambda *_: 2**40)
    batch = prompts_of(model, 2, n_demonstrations=4)
    n_rows = []

    class Count(il.Edit):
        heads = (HEAD,)

        def write_z(self, z, at, layer):
            n_rows.append(len(z))

    for prompts, of_passes in ((None, [2]), (batch, [1, 1])):
        n_rows.clear()
        with il.edited(model, Count(), batch=prompts):
            il.score(model, batch)
        assert n_rows == of_passes
    with (
        il.edited(model, Count(), batch=batch[[0, 0]]),
        pytest.raises(il.InputError, match="row 1 is a different prompt"),
    ):
        il.score(model, batch)


@pytest.mark.parametrize(
    "activation", slow_except(["k", "pattern"], ["q", "k", "v", "pattern", "z"])
)
def test_patched_activations_of_several_passes_are_those_of_one(activation, model, monkeypatch):
    batch, source = prompts_of(model, 3, 4), prompts_of(model, 3, 4)[[2, 0, 1]]
    patch = il.Patch(HEADS, source, activation=activation, align="labels")
    together = il.score(model, batch, [[patch]])
    monkeypatch.setattr(sizes, "pass_bytes", lambda *_: 2**40)
    assert_close(il.score(model, batch, [[patch]]), together)


def prompts_of_several_lengths(model):
    """Return prompts of which the second is the longest."""
    prompts = [*prompts_of(model, 1, 3).prompts, *prompts_of(model, 2, 6).prompts]
    prompts += prompts_of(model, 1, 4).prompts
    return il.tokenize(model, prompts)


def recorded_tensors(acts):
    """Return all tensors of activations and of their writers by name."""
    return tensors_of(acts) | tensors_of(acts.writers, "writers.")


CAPTURES = {
    "last": {},
    "writers": {"writers": True},
    "all writers": {"writers": "all"},
    "positions": {"positions": [-3, -1], "writers": [0, -1]},
}


@pytest.mark.parametrize("name", CAPTURES)
@pytest.mark.parametrize("is_edited", [False, slow(True)])
def test_captures_of_several_passes_are_those_of_one(name, is_edited, model, monkeypatch):
    batch = prompts_of_several_lengths(model)
    edits = [il.Ablate([HEAD])] if is_edited else []
    n_rows = []
    recording = Recorder.start_pass

    def count(recorder, passed):
        n_rows.append(len(passed))
        recording(recorder, passed)

    monkeypatch.setattr(Recorder, "start_pass", count)
    with il.edited(model, *edits, batch=batch):
        together = il.capture(model, batch, **CAPTURES[name])
        monkeypatch.setattr(sizes, "pass_bytes", lambda *_: 2**40)
        n_rows.clear()
        alone = il.capture(model, batch, **CAPTURES[name])
    assert n_rows[1:] == [1] * len(batch)
    expected = recorded_tensors(together)
    assert expected.keys() == recorded_tensors(alone).keys()
    length = (batch.last + 1).tolist()
    for key, tensor in recorded_tensors(alone).items():
        if not tensor.is_floating_point():
            assert torch.equal(tensor, expected[key])
            continue
        if key not in ("values.pass_v", "writers.k"):
            assert_close(tensor, expected[key])
            continue
        for row, n_tokens in enumerate(length):  # values and keys of padding mean nothing
            assert_close(tensor[row, :, :n_tokens], expected[key][row, :, :n_tokens])


def test_a_capture_keeps_its_result_and_the_attention_of_one_prompt(model, monkeypatch):
    monkeypatch.setattr(sizes, "pass_bytes", lambda *_: 2**40)
    batch = prompts_of(model, 4)
    with LiveMemory() as of_one:
        first = il.capture(model, batch[:1])
    with LiveMemory() as of_all:
        acts = il.capture(model, batch)
    result, of_first = (
        sum(x.nbytes for x in recorded_tensors(recorded).values()) for recorded in (acts, first)
    )
    assert of_all.peak - result < of_one.peak - of_first + 0.1 * of_one.peak


@pytest.mark.parametrize("part", ["k", "v"])
def test_keys_and_values_are_rebuilt_for_a_few_positions_at_a_time(part, model, monkeypatch):
    """Without each writer, those of all positions would be the largest tensors."""
    batch = prompts_of(model, 2, 4)
    options = {"part": part, "at": "label"}
    together = il.head_to_head_effects(model, batch, [HEAD], method="gradient", **options)
    monkeypatch.setattr("icl_lens.edits.head_reader.PIECE_BYTES", 1)
    pieces = []
    rebuild = HeadReader.rebuild

    def count(reader, rebuilt_part, *removed, columns=slice(None)):
        if rebuilt_part == part:
            pieces.append(str(columns))
        return rebuild(reader, rebuilt_part, *removed, columns=columns)

    monkeypatch.setattr(HeadReader, "rebuild", count)
    alone = il.head_to_head_effects(model, batch, [HEAD], method="gradient", **options)
    assert len(set(pieces)) == batch.tokens.shape[1]
    assert_close(alone.log_odds, together.log_odds)


EDGES = {
    "removed": lambda model, batch: il.score(
        model, batch, [[il.WithoutEdges([il.Edge(EARLY, "k", "embed", "label")])]]
    ),
    "one by one": lambda model, batch: il.head_to_head_effects(
        model, batch, [EARLY], part="k", writers=["embed"]
    ),
    "estimated": lambda model, batch: il.head_to_head_effects(
        model, batch, [EARLY], part="k", writers=["embed"], at="label", method="gradient"
    ),
}
EARLY = il.Head(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", EDGES)
def test_edges_keep_what_the_readers_layer_reads_of_one_prompt(name, model, monkeypatch):
    """What all layers read of the prompts that run would take several times as much."""
    monkeypatch.setattr(sizes, "pass_bytes", lambda *_: 2**40)
    batch = prompts_of(model, 3)
    with LiveMemory() as captured:
        acts = il.capture(model, batch[0], writers="all")
    with LiveMemory() as edges:
        EDGES[name](model, batch)
    assert edges.peak < captured.peak - _bytes_by_layer(acts) / 2


def test_edits_of_last_queries_copy_the_pattern_once(model):
    """The pattern of all queries is the largest tensor of a pass over a long prompt."""
    batch = prompts_of(model, 1, 64)
    pattern_bytes = 4 * N_HEADS * batch.tokens.shape[1] ** 2
    other = prompts_of(model, 2, 64)[[1]]
    il.score(model, batch)  # the first batch also runs the Hugging Face model
    with LiveMemory() as plain:
        il.score(model, batch)
    patch = il.Patch(HEADS, other, activation="q", positions="last")
    with il.edited(model, patch, batch=batch), LiveMemory() as edited:
        il.score(model, batch)
    assert edited.peak < plain.peak + 1.9 * pattern_bytes


def test_scores_of_repeated_tokens_keep_one_heads_attention_in_float64(model):
    """That of all heads would take more than the pass itself."""
    n_tokens = 40
    batch = repeated_sequences(model, n=1, n_tokens=n_tokens, seed=0)
    pattern_bytes = 4 * N_HEADS * batch.tokens.shape[1] ** 2
    last_log_probs(model, batch)  # the first batch also runs the Hugging Face model
    with LiveMemory() as plain:
        last_log_probs(model, batch)
    with LiveMemory() as scored:
        il.repeated_token_scores(model, n=1, n_tokens=n_tokens)
    assert scored.peak < plain.peak + pattern_bytes


def test_an_atlas_compares_labels_with_the_last_query_only(model):
    """The queries of all labels, of which it uses none, take the square of the demonstrations."""
    batch = prompts_of(model, 1, 100)
    acts = il.capture(model, batch, writers=compared_positions(batch))
    heads = acts.view.heads()
    of_all = similarity_in(acts, heads)
    with LiveMemory() as memory:
        similarity_auroc(acts)
    assert memory.peak < of_all.nbytes
    assert_close(similarity_in(acts, heads, "last"), of_all[:, :, -1:])


def _bytes_by_layer(acts):
    """Return the bytes of what writers wrote in each layer."""
    writers = acts.writers
    return sum(x.nbytes for x in (writers.resid_pre, writers.z, writers.mlp_out))


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDED)
def test_a_call_keeps_the_attention_of_one_layer_and_one_prompt(name, model, monkeypatch):
    """One prompt is the least that runs, with the numbers of all prompts together."""
    batch = prompts_of(model, 6)
    together = CALLS[name](model, batch)
    monkeypatch.setattr(sizes, "pass_bytes", lambda *_: 2**40)
    monkeypatch.setattr("icl_lens.edits.gradients.GRAPH_BYTES", 1)
    with LiveMemory() as memory:
        alone = CALLS[name](model, batch)
    assert memory.peak < SEVERAL_LAYERS * 4 * N_HEADS * batch.tokens.shape[1] ** 2
    assert_close(alone, together)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradient", "saliency", "head_to_head"])
def test_gradients_of_blocks_that_run_again_are_those_of_the_whole_graph(name, model):
    """A hook of a user, which may count on running once, keeps the whole graph."""
    batch = prompts_of(model, 2)
    again = CALLS[name](model, batch)
    seen = []
    with model.hooks(fwd_hooks=[("blocks.3.hook_out", lambda x, hook: seen.append(hook))]):
        whole = CALLS[name](model, batch)
    torch.testing.assert_close(again, whole, rtol=0, atol=0)
    assert seen


def test_similarities_of_several_passes_are_those_of_one(model, monkeypatch):
    batch, heads = prompts_of_several_lengths(model), [HEAD, il.Head(2, 1)]
    edit = il.Ablate([il.Head(1, 0)], positions="labels")
    similarity = {}
    for n_bytes in (0, 2**40):  # all prompts in one pass, and one prompt a pass
        monkeypatch.setattr(sizes, "pass_bytes", lambda *_, size=n_bytes: max(size, 1))
        intact = il.label_similarity(model, batch, heads)
        with il.edited(model, edit, batch=batch):
            similarity[n_bytes] = torch.cat([intact, il.label_similarity(model, batch, heads)])
    by_edit = (similarity[0][:4] - similarity[0][4:]).abs().max()
    by_passes = (similarity[2**40] - similarity[0]).abs().max()
    assert by_passes < by_edit / 1000


@pytest.mark.slow
def test_similarities_keep_what_was_captured_of_one_pass(model, monkeypatch):
    monkeypatch.setattr(sizes, "pass_bytes", lambda *_: 2**40)
    peaks = []
    for n_prompts in (1, 6):
        batch = prompts_of(model, n_prompts)
        il.label_similarity(model, batch, [HEAD])
        with LiveMemory() as memory:
            il.label_similarity(model, batch, [HEAD])
        peaks.append(memory.peak)
    assert peaks[1] < 1.3 * peaks[0]


@pytest.mark.slow
def test_saliency_is_written_where_it_is_returned(model, monkeypatch):
    """It is the largest tensor of many layers, and would be copied twice to be joined."""
    monkeypatch.setattr("icl_lens.measures.saliency.prompts_at_once", lambda *_: 1)
    with LiveMemory() as memory:
        saliency = il.attention_saliency(model, prompts_of(model, 8))
    assert memory.peak < 1.5 * saliency.nbytes
