"""Limits on memory and tokens at a time: one budget, and what each computation may take of it.

Results depend on these only by rounding. `Run.memory` replaces the budget for the batches of one
run; the others bound what is computed within a batch. docs/howto/machines.md says what a call may
take in all.
"""

BUDGET = 64 * 2**20
"""Activations of a batch of prompts, by `sizes.captured_bytes`; the default of `Run.memory`."""
MAX_ROWS = 64
"""Prompts per batch: above it, matrix products get no faster, and a lost chunk costs more to
recompute.
"""

# Bytes.
KEY_BYTES = BUDGET
"""Keys and values of the prompts cached at a time, where no `Run.memory` says otherwise."""
SCORE_BYTES = BUDGET // 8
"""Attention scores of rows that continue a prefix, per piece."""
ROTATED_BYTES = BUDGET // 8
"""Vectors rotated to positions at a time; a rotation needs several times their memory."""
LOG_PROB_BYTES = BUDGET // 4
"""Log-probabilities of rows, per piece."""
PIECE_BYTES = BUDGET
"""Vectors [row, variant, d_model] of rebuilt heads that are computed at once."""
LOGIT_BYTES = 3 * BUDGET // 2
"""Logits, per piece: about a hundred rows of the largest vocabularies, enough for an efficient
matrix product.
"""
WRITER_BYTES = 2 * BUDGET
"""Vectors [row, writer, d_model]; larger ones are not kept, and callers compute them in pieces."""
ROW_BYTES = 2 * BUDGET
"""Widest activations of one pass over single-token rows."""
PART_BYTES = 3 * BUDGET
"""Vectors [batch, part, d_model] that are computed and read out at a time."""
STREAM_BYTES = BUDGET
"""Stored residual streams, from which passes restart at a layer."""
PASS_BYTES = 3 * BUDGET // 2
"""Temporary tensors of one pass, by `sizes.pass_bytes`; a pass has one row at least."""
RESTART_BYTES = 3 * BUDGET
"""Temporary tensors of one pass that restarts at a layer, beside the stored streams; a pass has one
row at least.
"""
GRAPH_BYTES = 3 * BUDGET // 2
"""Activations stored for one backward pass, approximately; it runs one prompt at least."""

# Tokens per forward pass.
MIN_PASS_TOKENS = 512
"""Above it, larger passes are hardly faster: sets that start at another layer then get a separate
pass.
"""
CHECK_TOKENS = 1024
"""Passes that only score labels of short prompts (`task_check`)."""
CAPTURE_TOKENS = 2048
"""Passes of which everything is captured, or that ablate heads for one explanation."""
PASS_TOKENS = 4096
"""Passes under edits: enough for efficient matrix products, few enough to fit in small memory."""
LABEL_TOKENS = 8192
"""Passes that score labels of several tokens."""
