"""Published version: the bias towards the frequent label, before and after weighting label attention against it.

One true demonstration is left out: the true label's log-odds fall whichever class is asked, which is the bias; what the
model loses in telling classes apart is evidence. Table, claim and figure: bias.py.
"""

from experiments.claims.bias import Bias

MAJORITY = Bias(name="Majority bias", fix="majority", layouts=("order", "imbalanced"), paper=0.22)

EXPERIMENT = MAJORITY.experiment(
    id="majority-bias",
    title="The majority label's bias and its fix",
    source="Published version, section 4.1",
    claim="There is a bias towards the frequent label; weighting attention against frequency in located heads takes "
    "a tenth of it away, at no class's cost.",
    departs=(
        "That attention sums over labels is looked at in imbalance, not here. The published version gives one number, "
        "bias reduced by 22 %. Here the bias is the tilt of log-odds over "
        "queries of both classes, so that evidence lost with a demonstration does not count as bias; the fix's "
        "strength is chosen on held-out prompts; and it must beat random heads and cost no class its accuracy."
    ),
)
