"""The pages of results: every number in a sentence is in one of the page's tables, which the docs
build inserts.
"""

import re
from itertools import chain
from pathlib import Path

import csv_tables
import pandas as pd
import publish
import pytest

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = sorted(
    path for path in RESULTS.glob("*.md") if "results-table" in path.read_text(encoding="utf-8")
)
NUMBER = re.compile(r"[−-]?\d+\.\d+(?![\dB])")
"""A number with decimals, but not a size of models, such as 0.5B."""


def prose(page):
    """The page's sentences: without tables, code, figures, addresses, what the paper says, and what
    is folded.
    """
    text = re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "!["))]
    return re.sub(r"\*\*The paper\.\*\*.*", "", "\n".join(lines))


def numbers_in(texts):
    numbers: set[str] = set()
    for text in texts:
        numbers.update(number.replace("-", "−") for number in NUMBER.findall(text))
    return numbers


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_numbers_in_sentences_are_in_the_tables(path):
    lines = chain.from_iterable(csv_tables.tables(path))
    table_numbers = numbers_in(chain.from_iterable(lines))
    cited = numbers_in([prose(path.read_text(encoding="utf-8"))])
    assert cited, "the page says no number"
    assert cited <= table_numbers, (
        f"{path.name} says numbers that its tables do not have: {sorted(cited - table_numbers)}"
    )


def test_a_number_that_no_table_has_is_reported(tmp_path):
    (tmp_path / "data.csv").write_text(
        "measure,quantity,control,low,high,unit\na,1.234,0,1,2,nats\nb,12.34,0,1,2,%\n"
    )
    page = tmp_path / "page.md"
    table = "```{results-table} data.csv\n:columns: measure, quantity, difference\n```\n"
    page.write_text(f"It costs 1.23 nats or 12.3%.\n\n{table}\n**The paper.** It says 5.55.\n")
    test_numbers_in_sentences_are_in_the_tables(page)
    page.write_text(f"It costs 1.24 nats.\n\n{table}")
    with pytest.raises(AssertionError, match=r"1\.24"):
        test_numbers_in_sentences_are_in_the_tables(page)


def test_a_table_of_claims_says_where_each_holds(tmp_path):
    (tmp_path / "data.csv").write_text(
        "script,claim,holds,model,measure,quantity,control,low,high,unit\n"
        "lu2022,Order decides,holds,small,a,12.34,0,1,2,%\n"
        "lu2022,,,small,b,5,0,1,2,%\n"
        "yin2025,Heads carry,not shown,small,a,1.2,0.3,-1,2,nats\n"
        "yin2025,Heads carry,not measured,large,a,,,,,\n"
        "min2022,Labels help,holds,large,accuracy lost,20,5,1,9,%\n"
    )
    lines = csv_tables.table(tmp_path / "data.csv", {"lines": "script, claim", "across": "model"})
    assert lines == [
        ["script", "claim", "small", "large"],
        ["lu2022", "Order decides", "holds: 12.3% (0.0)", "not measured"],
        ["yin2025", "Heads carry", "not shown: 1.20 nats (0.30)", "not measured"],
        ["min2022", "Labels help", "not measured", "holds: 20.0 points (5.0)"],
    ]


CLAIMS = {
    "Models answer": ("behavior", "at == 'random order'", "low > 0"),
    "Queries and keys compare": ("two-towers", "measure == 'keys'", "low > 0"),
    "Values carry": ("two-towers", "measure == 'values'", "low > 0"),
    "12 heads carry": (
        "ablation",
        "measure == 'accuracy lost, heads zeroed' and ranking == 'contrast'",
        "low > 0",
    ),
    "One run finds": (
        "location",
        "measure == 'log-odds lost without heads by increase'",
        "low > 0",
    ),
    "Causal tracing": (
        "location",
        "measure == 'log-odds lost without heads by causal tracing'",
        "low > 0",
    ),
    "Almost all increases": (
        "location",
        "measure == 'share of deep attention layers' and ranking == 'increase'",
        "low > 0 and quantity > 80",
    ),
    "Important heads": (
        "location",
        "measure == 'share of the deeper half, heads' and ranking == 'contrast'",
        "low > 0",
    ),
    "All tasks share": (
        "shared-heads",
        "measure.str.contains('classification') and ranking != 'increase'",
        "low > 0",
    ),
    "Values rank": (
        "values",
        "measure.str.startswith('mean reciprocal rank of') and ranking == 'contrast'",
        "low > 0",
    ),
    "Values raise": (
        "values",
        "measure == 'log-odds of the label' and ranking == 'contrast'",
        "low > 0",
    ),
    "Words of keys": ("values", "measure == 'own text first in keys'", "low > 0"),
    "Words of queries": ("values", "measure == 'input first in the query'", "low > 0"),
    "Heads attend": ("label-attention", "versus == 'chance' and ranking == 'contrast'", "low > 0"),
    "More attention": (
        "label-attention",
        "measure.str.startswith('rank corr') and ranking == 'contrast'",
        "low > 0",
    ),
    "Attention moves": (
        "label-attention",
        "measure.str.contains('moves') and ranking == 'contrast'",
        "low > 0",
    ),
    "Heads collect": ("text-to-label", "measure == 'movers → keys'", "low > 0"),
    "Their values": ("text-to-label", "measure == 'label words → values'", "low > 0"),
    "The majority label": (
        "majority-bias",
        "measure.str.startswith('log-odds, favored')",
        "low > 0",
    ),
    "Dividing attention": (
        "majority-bias",
        "measure.str.startswith('share of') and ranking == 'contrast'",
        "low > 0",
    ),
    "Attention to true labels falls without": (
        "majority-bias",
        "measure.str.contains('true labels') and ranking == 'contrast' and at.str.contains('paper')",
        "high < 0",
    ),
    "The last label": ("recency-bias", "measure.str.startswith('log-odds, favored')", "low > 0"),
    "Removing the position": (
        "recency-bias",
        "measure.str.startswith('share of') and ranking == 'contrast'",
        "low > 0",
    ),
    "Attention to true labels falls when": (
        "recency-bias",
        "measure.str.contains('true labels') and ranking == 'contrast'",
        "high < 0",
    ),
    "A fifth": (
        "recency-bias",
        "measure.str.startswith('effect of the last') and ranking == 'contrast'",
        "low > 0",
    ),
}
"""Beginning of a claim -> the question's table, the rows, and what holds where the claim does."""


@pytest.mark.parametrize("claim", CLAIMS)
def test_claims_hold_as_often_as_the_page_says(claim):
    question, rows, holds = CLAIMS[claim]
    table = publish.read(RESULTS / "data" / f"{question}.csv").query(rows, engine="python")
    real = table.query("model in ('smollm2-135m', 'qwen2.5-coder-0.5b') and quantity == quantity")
    (line,) = [
        line
        for line in (RESULTS / "index.md").read_text(encoding="utf-8").splitlines()
        if f"| {claim}" in line
    ]
    assert f"| {len(real.query(holds))} of {len(real)}" in line


def test_the_page_of_planted_models_counts_outcomes_and_heads():
    page = (RESULTS / "ground-truth.md").read_text(encoding="utf-8")
    means = publish.read(RESULTS / "data" / "ground-truth-means.csv")
    outcomes = means["outcome"].value_counts()
    n_with_interval = len(means) - outcomes["no interval"]
    words = " ".join(page.split())
    assert (
        f"Of {n_with_interval} pairs of measure and setting that have an interval, "
        f"{outcomes['as predicted']} come out as predicted"
    ) in words
    assert f"We can explain {outcomes['explained afterwards']} of the others" in words
    not_predicted = means.query("outcome == 'not as predicted'")
    assert len(not_predicted) == 2
    assert "two remain" in words
    unexplained = re.search(r"Not explained: (.*)", page).group(1)
    for question, setting in zip(not_predicted["question"], not_predicted["setting"], strict=True):
        assert f"`{question}" in unexplained
        assert f"`{setting}`" in unexplained
    heads = pd.read_csv(RESULTS / "data" / "ground-truth-heads.csv").set_index("method")
    for method in ("contrast", "attention to labels", "causal tracing"):
        assert heads.loc[method].tolist()[1:] == ["12 of 12", "9 of 9"]
    assert heads.loc["increase"].tolist()[1:] == ["9 of 12, 3 decoys", "6 of 9, 3 decoys"]
