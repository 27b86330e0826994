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
    claim=(
        "There is a bias towards near labels; without the position term of located heads' scores it is a tenth "
        "smaller, at no class's cost."
    ),
    departs=(
        "The published version gives one number, bias reduced by 17 %, and finds the position term at work in "
        "shallow layers too; here it is taken out of located heads only. The position term of a score is what it "
        "owes to positions: in rotary "
        "models the rotation of q and k, with learned positions what their embeddings put into q and k. The bias is "
        "the tilt of log-odds over "
        "queries of both classes, and the fix, whose strength is chosen on held-out prompts, must beat random heads "
        "and cost no class its accuracy."
    ),
)
