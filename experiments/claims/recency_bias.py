"""Published version: the bias towards the nearer label, before and after located heads lose the position term.

The true demonstrations come first instead of last: the true label's log-odds fall whichever class is asked, which is
the bias. Table, claim and figure: bias.py.
"""

from experiments.claims.bias import Bias

RECENCY = Bias(name="Recency bias", fix="recency", layouts=("order", "reorder"), paper=0.17)

EXPERIMENT = RECENCY.experiment(
    id="recency-bias",
    title="The nearer label's bias and its fix",
    source="Published version, section 4.2",
    claim="The position term of query-key products favours near labels; without it in located heads they win less.",
)
