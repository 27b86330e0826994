"""Defaults that functions and commands share: one number for each idea."""

N_LOCATED = 12
"""Heads to locate on many prompts, or all heads of a smaller model; at most half are removed."""
N_DESCRIBED = 10
"""Heads to describe on one prompt, of which a page or the live view shows attention and words."""
N_TOP = 20
"""Rows of a list of the best heads or of their parts, by one score."""
N_ABLATED = 4
"""Heads to zero jointly on one prompt."""
N_RANDOM_SETS = 20
"""Random sets, of heads or of edges, that a result is compared with."""
N_RANDOM_SETS_PER_GROUP = 10
"""Random sets in each group, where a call compares with several groups, so that it takes no longer:
`ablate_with_controls` draws a group from the same layers and one from all, and `head_atlas` one for
the first heads by each of its two dozen scores.
"""
