"""Models whose in-context circuit is known, because it is written into the weights by hand.

A model of the kind "two-tower" answers "love : bar two : foo one :" with "foo" in four steps:

1. Embeddings say what a token is: a text has its category, a label its identity, and every token
   its position.
2. In layer 1 the mover attends from each position to the nearest text and copies its category: from
   a text to the label after it, and from the query to the last position.
3. In layers 4 to 6 four two-tower heads attend from the last position to the labels that have the
   category of the query, and copy the identity of these labels into the directions that the
   unembedding reads.
4. The label that was copied most has the largest logit.

The other kinds have other heads, or none, in the places of these four:

| kind | layer | heads | role | attends by | reads | writes |
|---|---|---|---|---|---|---|
| two-tower, compare-copy, lookup | 1 | 1 | mover | distance, to texts only | category | moved category |
| two-tower | 4, 5, 5, 6 | 4 | two-tower | equal moved categories, to labels only | identity | output |
| compare-copy | 4 | 1 | comparer | equal moved categories, to labels only | identity | picked label |
| compare-copy | 5, 5, 6 | 3 | copier | identity equal to the picked label, to labels only | identity | output |
| last-label | 4, 5, 5, 6 | 4 | last-label | distance, to labels only | identity | output |
| majority | 4, 5, 5, 6 | 4 | majority | nothing, to all labels | identity | output |
| lookup | 3 | FFN | lookup | | moved category | output of the category's name |
| suppressor | 3 | FFN | | | being a colon | output of all labels alike |
| suppressor | 4, 5, 5, 6 | 4 | suppressor | nothing, to all labels | identity | minus the output |
| all but suppressor, untrained | 2, 4 | 2 | decoy | nothing, to all labels | being a label | output of all labels alike |
| all | 0 to 7 | the rest | noise | anything | anything | anything, or a mixture of outputs |

The index of a head in its layer is drawn from the seed. Decoys are planted on purpose: they raise
every label alike, so a ranking by log p(answer) finds them, and a ranking by the contrast with the
other label does not. Noise heads and FFNs are the same in all kinds of one seed; together they
favor some labels over others, as heads of trained models do. "untrained" is this noise with random
embeddings.

The models are GPT-2s with untied embeddings. A learned position embedding can hold waves, for which
looking back by a fixed number of tokens is a linear map, without affecting other comparisons; a
rotary one turns every query and key. An untied unembedding reads directions of its own, so a
token's embedding does not add to the prediction.

Each kind can prefer one label: `build(kind, folder, preference=2.0)` adds 2 nats to the logit of
"bar" after every prompt, through the bias of the final norm.
"""

from planted.build import Planted, build
from planted.circuits import Kind, Role

__all__ = ["Kind", "Planted", "Role", "build"]
