"""Read a forward pass: record its activations, decompose them, and attribute the answer to their
parts.

Passes and what is kept of them:

1. `capture` runs prompts, and `recorder` keeps vectors at the last position and at labels, the last
   query's attention, and values (`pass_values`). `activations` is what users get;
   `saved_activations` are its files, which `serialization` reads and writes. Unless `check=False`,
   heads must sum to the attention output, sublayers to the residual stream, and the readout must
   give the model's logits. `cache_checks` compares a TransformerLens cache with its batch.
2. `last_logits` runs passes for the logits at the last position alone. `embeddings` is what enters the first layer;
   `layer_inputs` records what layers get as input, and begins passes there; `writers` records what
   each component wrote.

What the answer gets from each part:

3. `scored_tokens` chooses the tokens that are scored, `label_scores` are scores of labels, and
   `multi_token_labels` scores labels of several tokens whole. `answer_spacing` warns of an answer
   that lacks the space before it.
4. `head_parts` is what heads read and write. `decompose` splits what layers add into heads, (head,
   position) parts and neurons; `increases` is what each adds to log p(answer); `search` finds the
   largest without computing all.

What one head compares and carries:

5. `queries_keys_values` computes a head's; `head_projection` splits one of them by what wrote the
   layer's input (`writer_groups` has the groups). `attention_score_parts` splits its attention
   scores so, and `value_parts` what its values add to the answer; `reasons` finds the largest parts
   of both.
6. `qk_metric` is what a head compares in general, `similarity` on a prompt; `copying` is what it
   writes about what it reads; `repeated_tokens` is where it attends in random repeated tokens.
7. `ffn_outputs` computes what an FFN writes for any input.
"""
