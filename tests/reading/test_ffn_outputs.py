"""What an FFN writes for any stream equals what it writes in a pass over prompts that has this
stream. All families: the sweep.
"""

import pytest
import torch
from shared import PROMPTS
from tolerance import assert_close

import icl_lens as il
from icl_lens.edits.edit import Stage
from icl_lens.edits.site_hooks import recording_site
from icl_lens.models.view import ModelView
from icl_lens.reading.ffn_outputs import ffn_outputs


@pytest.mark.parametrize("family", ["gpt2", "gptj", "gemma2"])
def test_a_stream_of_one_token_gets_the_ffns_output(load_tiny, family):
    """The stream of a prompt, and another one that is written into a pass over the prompt."""
    model = load_tiny(family)
    view = ModelView.of(model)
    batch = il.tokenize(model, PROMPTS[:1], prepend_bos=False)
    read = Stage.resid_pre if view.parallel else Stage.resid_mid
    for layer in (0, view.n_layers - 1):
        for scale in (1.0, 0.3):
            seen = {}
            with torch.no_grad(), model.hooks(fwd_hooks=hooks(view, layer, read, scale, seen)):
                model(batch.tokens, return_type="logits")
            assert_close(ffn_outputs(view, layer, seen[read]), seen[Stage.mlp_out], msg=str(layer))


def hooks(view, layer, read, scale, seen):
    """Return hooks that scale what the FFN reads, and record it and what the FFN writes."""
    names = {Stage.resid_pre: "hook_resid_pre", Stage.resid_mid: "hook_resid_mid"}

    def change(x, hook):
        return x * scale

    recorded = recording_site(view, layer, Stage.mlp_out, lambda x: keep(Stage.mlp_out, x))

    def keep(site, x):
        seen[site] = x[0].clone()

    def keep_read(x, hook):
        keep(read, x)

    where = view.hook(layer, names[read])
    return [(where, change), (where, keep_read), *recorded]
