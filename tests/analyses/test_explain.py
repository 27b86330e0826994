"""The explanation's numbers are the functions' numbers, and its tables and JSON carry them."""

import html
import io
import json
import math
import random
import re
from dataclasses import replace

import explanations as ex
import families
import pytest
import torch
from rich.console import Console
from tolerance import assert_close

import icl_lens as il
from icl_lens.analyses.explanation import sections
from icl_lens.analyses.explanation.reports import supports
from icl_lens.analyses.explanation.sentences import answer_notes, why_sentence
from icl_lens.analyses.explanation.tables import part_score
from icl_lens.reading.last_logits import last_log_probs
from icl_lens.reading.reasons import writer_in_words, writers_in_words
from icl_lens.report.html.section_contents import prompt_pieces
from icl_lens.result.number_format import percent, signed


@pytest.fixture(scope="module")
def explanation(gpt2):
    return il.explain(
        gpt2, il.Prompt.parse(families.PROMPT, answer="foo"), k=5, n_ablated=3, n_random=6
    )


@pytest.fixture(scope="module")
def acts(gpt2):
    """The activations that are explained."""
    return il.capture(gpt2, il.tokenize(gpt2, il.Prompt.parse(families.PROMPT, answer="foo")))


def check_largest_parts(explanation, parts):
    """The parts with the largest contrast, in order, with their contrast and increase."""
    largest = explanation.subheads.largest
    places = parts["contrast"].flatten().topk(10).indices
    heads_and_positions = [divmod(at, len(explanation.input.tokens)) for at in places.tolist()]
    for part, (head, position) in zip(largest, heads_and_positions, strict=True):
        assert (part.head, part.position) == (il.Head.from_index(head, 4), position)
    for score, values in parts.items():
        assert_close([getattr(part, score) for part in largest], values.flatten()[places])


def check_report(gpt2, acts, report, heads, parts, tokens):
    """A head's attention, scores and log-probabilities without it, from the public functions."""
    layer, head = report.head
    assert_close(report.attention, acts.pattern[0, layer, head])
    assert_close(report.increase, heads["increase"][layer, head])
    assert_close(report.position_increases, parts["increase"][layer, head])
    assert_close(report.contrast, heads["contrast"][layer, head])
    assert_close(report.position_contrasts, parts["contrast"][layer, head])
    with il.ablate_heads(gpt2, [report.head], positions="last"):
        assert_close(report.ablated, last_log_probs(gpt2, acts.batch)[0, tokens])


@pytest.mark.parametrize("plain_text", [False, True])
def test_numbers_are_those_of_the_functions(gpt2, acts, explanation, plain_text):
    if plain_text:
        batch = il.tokenize(gpt2, il.Text("love like eight two one", answer=" foo", against=" bar"))
        explanation = il.explain(
            gpt2,
            il.Text(batch.texts[0], answer=" foo", against=" bar"),
            k=5,
            n_ablated=3,
            n_random=6,
        )
        acts = il.capture(gpt2, batch)
        assert_close(
            explanation.all_heads.attention,
            acts.pattern[0, ..., list(explanation.all_heads.positions)],
        )
    batch, targets = acts.batch, acts.batch.answer_tokens
    against = batch.against if plain_text else batch.other_label_tokens
    heads = {"increase": il.head_log_prob_increase(acts, targets)[0]}
    heads["contrast"] = il.head_log_prob_increase(acts, targets, against=against)[0]
    parts = {"increase": il.subhead_log_prob_increase(acts, targets)[0]}
    parts["contrast"] = il.subhead_log_prob_increase(acts, targets, against=against)[0]
    assert explanation.is_plain_text == plain_text
    assert_close(
        [explanation.layers.attn, explanation.layers.ffn],
        torch.cat([*il.layer_log_prob_increase(acts, targets)]),
    )
    added = torch.cat([*il.layer_log_prob_increase(acts, targets, against=against)])
    assert_close([explanation.layers.attn_contrast, explanation.layers.ffn_contrast], added)
    assert_close(explanation.all_heads.increase, heads["increase"])
    assert_close(explanation.all_heads.contrast, heads["contrast"])
    best = heads["contrast"].flatten().topk(5).indices.tolist()
    assert [report.head for report in explanation.heads] == [il.Head(i // 4, i % 4) for i in best]
    check_largest_parts(explanation, parts)
    assert [name.strip("␣") for name in explanation.scores.compared_with] == ["bar"]
    log_probs = last_log_probs(gpt2, batch)[0]
    tokens = torch.stack([targets[0], against[0, 0]]) if plain_text else batch.label_tokens
    assert_close([*explanation.scores.probs.values()], log_probs[tokens].exp())
    for report in explanation.heads:
        check_report(gpt2, acts, report, heads, parts, tokens)
        if plain_text:
            layer, head = report.head
            assert report.top_attended(1)[0][0] == int(acts.pattern[0, layer, head].argmax())
        else:
            assert report.value_ranks == tuple(acts.own_label_ranks(report.head)[0].tolist())


def test_ablations_are_those_of_the_context_manager(gpt2, acts, explanation):
    """The located set gives what a block gives that zeroes it at the last position, and random sets
    do, too.
    """
    batch, rng = acts.batch, random.Random(explanation.settings.seed)
    located = [report.head for report in explanation.heads[:3]]
    assert list(explanation.ablation.heads) == located
    with il.ablate_heads(gpt2, located, positions="last"):
        assert_close(explanation.ablation.located, il.score(gpt2, batch)[0])
    heads_not_located = [head for head in acts.view.heads() if head not in located]
    sets = [rng.sample(heads_not_located, 3) for _ in range(6)]
    assert_close(
        explanation.ablation.random,
        il.score(gpt2, batch, [[il.Ablate(heads, positions="last")] for heads in sets])[0],
    )


def test_without_an_answer_the_models_choice_is_explained(gpt2):
    explanation = il.explain(gpt2, families.PROMPT, k=2)
    assert explanation.input.prompt.answer is None
    assert explanation.target == explanation.predicted
    other_label = next(label for label in explanation.labels if label != explanation.predicted)
    against = il.explain(gpt2, il.Prompt.parse(families.PROMPT, answer=other_label), k=2)
    assert against.target == other_label
    assert against.all_heads.increase != explanation.all_heads.increase


def test_each_label_says_what_it_is(explanation):
    """The answer is what is explained; the model's label is named by how probable it is."""
    answer, wrong_label = "foo", "bar"
    assert explanation.target == explanation.answer == answer
    wrong = replace(explanation, scores=replace(explanation.scores, log_probs=(-3.0, -0.1)))
    if explanation.labels[0] == wrong_label:
        wrong = replace(explanation, scores=replace(explanation.scores, log_probs=(-0.1, -3.0)))
    assert wrong.predicted == wrong_label
    assert answer_notes(wrong, answer) == ["correct answer", "explained"]
    assert answer_notes(wrong, wrong_label) in (["predicted"], ["most probable label"])
    no_answer = replace(wrong, input=replace(wrong.input, prompt=il.Prompt.parse(families.PROMPT)))
    assert "correct answer" not in answer_notes(no_answer, answer)


def test_conventions_are_kept_in_the_result(gpt2, explanation):
    with_own_norm = il.explain(
        gpt2, il.Prompt.parse(families.PROMPT, answer="foo"), final_norm="own", bias=False, k=5
    )
    assert (
        with_own_norm.settings.final_norm,
        with_own_norm.settings.bias,
        with_own_norm.subheads.certified,
    ) == (
        "own",
        False,
        False,
    )
    assert with_own_norm.subheads.n_exact == with_own_norm.subheads.n_parts
    assert with_own_norm.layers.attn != explanation.layers.attn
    assert explanation.subheads.certified


def test_tables_hold_the_explanations_numbers(explanation):
    heads = explanation.to_frame()
    assert list(heads.columns) == ["name", "contrast", "increase", "layer", "head"]
    assert len(heads) == 12
    row = heads[heads["name"] == str(explanation.heads[0].head)].iloc[0]
    assert_close(row["increase"], explanation.heads[0].increase)
    layers = explanation.to_frame("layers")
    assert layers[layers["component"] == "ffn"]["increase"].tolist() == list(explanation.layers.ffn)
    subheads = explanation.to_frame("subheads")
    assert subheads["name"].tolist() == [str(part.head) for part in explanation.subheads.largest]
    labels = explanation.to_frame("labels")
    assert labels["log_prob_located_zeroed"].tolist() == list(explanation.ablation.located)
    mean = torch.tensor(explanation.ablation.random).exp().mean(0).log()  # of probabilities
    assert_close(labels["log_prob_random_zeroed"].to_numpy(), mean)
    words = explanation.to_frame("words")
    assert set(words["kind"]) == {"value", "key", "query"}
    assert len(words) == 5 * (4 + 4 + 1)


def test_without_random_sets_their_column_is_empty(gpt2):
    explanation = il.explain(gpt2, families.PROMPT, n_random=0, k=2, n_ablated=2)
    labels = explanation.to_frame("labels")
    assert labels["log_prob_random_zeroed"].isna().all()
    assert labels.drop(columns="log_prob_random_zeroed").notna().all(axis=None)
    assert len(explanation.to_html()) > 1000


def test_words_of_noise_are_gray(acts, explanation):
    """Standouts are the readout's, and words below the threshold are gray in the terminal and on
    the page.
    """
    words = explanation.to_frame("words")
    for report in explanation.heads:
        query = acts.last_query(report.head)
        vectors = torch.cat(
            [acts.label_values(report.head)[0], acts.label_keys(report.head)[0], query]
        )
        descriptions = acts.readout.describe(vectors, torch.full((9,), -1), keep="words")
        assert_close(
            words[words["name"] == str(report.head)]["standout"].tolist(), descriptions.standouts
        )
        assert (report.value_words, report.query_words) == (
            tuple(map(tuple, descriptions.tokens[:4])),
            tuple(descriptions.tokens[-1]),
        )
    report = replace(explanation.heads[0], why=None)
    with_noise = replace(
        explanation,
        heads=(
            replace(
                report,
                value_standouts=(1.9, 2.1, 9.0, -3.0),
                key_standouts=(5.0,) * 4,
                query_standout=1.0,
            ),
        ),
    )
    assert with_noise.to_html().count('class="noise"') == 3
    console = Console(width=120, force_terminal=True, color_system="standard", file=io.StringIO())
    console.print(with_noise)
    lines = [line for line in console.file.getvalue().splitlines() if " value " in line]
    assert [line.count("\x1b[2m") for line in lines] == [1, 0, 0, 1]
    old = replace(report, value_standouts=(), key_standouts=(), query_standout=None)
    assert 'class="noise"' not in replace(explanation, heads=(old,)).to_html()


@pytest.mark.parametrize(
    ("difference", "compared"),
    [(1.5, "above"), (-1.5, "below")],
)
def test_a_head_that_scores_the_other_label_higher_is_not_said_to_prefer_the_answer(
    explanation, difference, compared
):
    report = explanation.heads[0]
    made_up = replace(
        explanation, heads=(replace(report, why=replace(report.why, score_difference=difference)),)
    )
    terminal = " ".join(ex.terminal_text(made_up).split())
    assert re.search(rf"Why {report.head} scores foo@[^:]* {compared} ", terminal)
    page = re.sub("<[^>]*>", "", made_up.to_html())
    assert re.search(rf"Why {report.head} scores \s*foo@[^:]* {compared} ", page)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["contrast", "effect"])
def test_a_note_on_losses_stands_only_below_a_column_of_losses(gpt2, monkeypatch, by):
    """Not below every column that is no score; an effect is a score and says so itself."""
    explained = il.explain(gpt2, il.Prompt.parse(families.PROMPT, answer="foo"), by=by, k=5)
    new_column = sections.HeadColumn(None, "new", (0.0,) * len(explained.heads))
    columns = [*sections.head_columns(explained), new_column]
    monkeypatch.setattr(sections, "head_columns", lambda reports: columns)
    has_losses = sections.lost_note(explained) in sections.head_notes(explained)
    assert has_losses == (by == "contrast")


def test_labels_that_the_prompt_does_not_offer_are_refused(gpt2):
    text = "good : foo bad : bar love :"
    assert il.explain(gpt2, text, labels=("bar", "foo")).scores.labels == ("bar", "foo")
    with pytest.raises(il.InputError, match="labels has 'baz', which this prompt does not offer"):
        il.explain(gpt2, text, labels=("foo", "bar", "baz"))


def test_only_a_text_is_plain_text(gpt2):
    """A string is a prompt with demonstrations; a `Text` never is, even with a standalone colon."""
    assert not il.explain(gpt2, "love : bar one :", k=2).is_plain_text
    free = il.explain(gpt2, il.Text("love like", against=" foo"), k=2)
    assert free.settings.target is None
    assert free.target == free.scores.next_tokens[0][0], "the most probable token is explained"
    batch = il.tokenize(gpt2, il.Text("love : bar one :", answer=" foo"))
    with_colon = il.explain(gpt2, batch, k=2)
    again = il.explain(gpt2, il.Text("love : bar one :", answer=" foo"), k=2)
    assert again.all_heads.increase == with_colon.all_heads.increase
    assert il.explain(gpt2, il.Text("love like"), k=2).target == free.target
    assert (with_colon.is_plain_text, with_colon.target, with_colon.scores.compared_with) == (
        True,
        "foo",
        (),
    )
    assert with_colon.all_heads.contrast == ()
    assert with_colon.verdict == ""
    whole = il.explain(gpt2, il.tokenize(gpt2, families.PROMPT), k=2)
    assert whole.scores.log_probs == il.explain(gpt2, families.PROMPT, k=2).scores.log_probs


@pytest.mark.parametrize("by", ["increase", "effect"])
def test_heads_are_ranked_by_the_chosen_score(gpt2, acts, explanation, by):
    """Scores are those of the functions, and the heads with the largest scores are described and
    ablated.
    """
    batch, against = acts.batch, acts.batch.other_label_tokens
    ranked_explanation = il.explain(
        gpt2, il.Prompt.parse(families.PROMPT, answer="foo"), by=by, k=5, n_ablated=3, n_random=2
    )
    contrasts = il.head_log_prob_increase(acts, against=against)[0]
    scores = (
        il.head_log_prob_increase(acts)[0]
        if by == "increase"
        else il.head_effects(gpt2, batch).log_odds[0]
    )
    assert_close(ranked_explanation.all_heads.by(by), scores)
    assert_close(ranked_explanation.all_heads.contrast, contrasts)
    ranked = [il.Head(i // 4, i % 4) for i in scores.flatten().topk(5).indices.tolist()]
    assert (
        [report.head for report in ranked_explanation.heads]
        == ranked
        != [report.head for report in explanation.heads]
    )
    assert list(ranked_explanation.ablation.heads) == ranked[:3]
    assert_close(
        [report.scores[by] for report in ranked_explanation.heads],
        [scores[head] for head in ranked],
    )
    assert_close(ranked_explanation.to_frame("heads")[by], scores.flatten())
    parts = il.subhead_log_prob_increase(acts, against=None if by == "increase" else against)[0]
    assert part_score(ranked_explanation) == ("increase" if by == "increase" else "contrast")
    assert_close(
        [
            getattr(part, part_score(ranked_explanation))
            for part in ranked_explanation.subheads.largest
        ],
        parts.flatten().topk(10).values,
    )
    if by == "effect":
        alone = il.explain(gpt2, il.Text("love like", answer=" foo"), by=by, k=1)
        text = il.tokenize(gpt2, il.Text("love like", answer=" foo"))
        assert_close(alone.all_heads.effect, il.head_effects(gpt2, text).log_prob[0])


def test_labels_of_several_tokens_are_scored_by_one_and_shown_whole(ioi_pair):
    """One token, which is shown, scores a label; log-probabilities of full labels are computed by
    teacher forcing.
    """
    model, hf = ioi_pair
    with pytest.warns(UserWarning, match="'zoo' is scored by .*only white space"):
        explanation = il.explain(
            model, il.Prompt.parse("John : zoo store : Mary went :", answer="Mary"), k=2
        )
    assert explanation.scores.has_multi_token_labels
    assert "among the labels: 'zoo'" in repr(explanation)
    assert (
        dict(zip(explanation.labels, explanation.scores.scored_tokens, strict=True))["zoo"] == "␣"
    )
    batch = il.tokenize(model, "John : zoo store : Mary went :")
    tokenizer, prompt = model.tokenizer, batch.tokens[0].tolist()
    text = batch.texts[0]
    for label, ours in zip(explanation.labels, explanation.scores.whole_log_probs, strict=True):
        n = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        ids = tokenizer(f"{text} {label}", add_special_tokens=False)["input_ids"][n:]
        with torch.no_grad():
            log_probs = hf(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)
        theirs = sum(float(log_probs[len(prompt) - 1 + j, token]) for j, token in enumerate(ids))
        assert_close(ours, theirs)
        assert len(ids) == len(explanation.scores.spellings[explanation.labels.index(label)])
    zoo = explanation.labels.index("zoo")
    assert explanation.scores.whole_log_probs[zoo] < explanation.scores.log_probs[zoo]
    assert "whole" in str(explanation.to_frame("labels").columns)


def test_labels_that_begin_alike_are_explained(ioi_pair):
    model, _ = ioi_pair
    text = "John : zoo store : zed went :"
    explanation = il.explain(model, text, k=2)
    assert explanation.input.n_shared_tokens >= 2
    assert len(explanation.input.tokens) == il.tokenize(model, text).tokens.shape[1]
    assert set(explanation.scores.scored_tokens) == {"o", "e"}
    assert f"{text} z" in ex.terminal_text(explanation)
    assert "".join(piece for piece, _ in prompt_pieces(explanation)) == f"{text} z"


def test_plain_text_is_loaded_unchanged_and_sections_that_do_not_fit_are_refused(gpt2, tmp_path):
    """Sections are checked also in files without a digest. Other damage, and other results:
    test_results.py.
    """
    free = il.explain(gpt2, il.Text("love like", answer=" foo", against=[" bar", 4]), k=3)
    path = tmp_path / "free.json"
    free.save(path)
    assert il.results.Explanation.load(path) == free
    plain = json.loads(path.read_text())
    assert plain["heads"][0]["head"] == str(free.heads[0].head)
    assert plain["summary"]["predicted"] == free.predicted
    path.write_text(json.dumps(plain | {"heads": []}))
    with pytest.raises(il.InputError, match=r"is damaged .*not those that were written"):
        il.results.Explanation.load(path)
    del plain["digest"]
    path.write_text(json.dumps(plain))
    assert il.results.Explanation.load(path) == free
    for change, message in [
        (
            {"version": 3},
            "must be 5, got 3; load it with the icl-lens version that it lists under versions, or",
        ),
        ({"heads": 3}, "is damaged"),
        ({"input": plain["input"] | {"tokens": [1]}}, "is damaged"),
        (
            {"input": plain["input"] | {"tokens": [], "token_names": []}},
            "is damaged .*for 0 tokens",
        ),
        ({"layers": plain["layers"] | {"ffn": []}}, "is damaged .*layers.ffn must have .* got 0"),
        (
            {"layers": plain["layers"] | {"attn_contrast": []}},
            "is damaged .*layers.ffn_contrast must have",
        ),
        ({"scores": plain["scores"] | {"labels": []}}, "is damaged .*scores.log_probs must have"),
        ({"heads": [plain["heads"][0] | {"similarity": [[1.0, 2.0]]}]}, "is damaged"),
    ]:
        path.write_text(json.dumps(plain | change))
        with pytest.raises(il.InputError, match=message):
            il.results.Explanation.load(path)
    path.write_text("[" * 100_000)
    with pytest.raises(il.InputError, match="not valid JSON"):
        il.results.Explanation.load(path)


def test_two_explanations_are_compared_head_by_head(gpt2, explanation):
    of_other_answer = il.explain(gpt2, il.Prompt.parse(families.PROMPT, answer="bar"), k=5)
    comparison = il.compare(explanation, of_other_answer)
    frame = comparison.to_frame()
    assert frame["change"].abs().is_monotonic_decreasing
    row = frame.iloc[0]
    layer, head = row["layer"], row["head"]
    for score, prefix in (("contrast", ""), ("increase", "increase_")):
        a, b = (side.all_heads.by(score)[layer][head] for side in (explanation, of_other_answer))
        assert row[f"{prefix}a"] == a
        assert row[f"{prefix}change"] == b - a
    assert row["name"] in repr(comparison)
    assert 'data-page="&lt;!doctype html' in comparison._repr_html_()
    wide = il.compare(explanation, ex.changed(of_other_answer, increase=((0.0,),) * 3))
    with pytest.raises(il.InputError, match=r"same \(layers, heads\)"):
        wide.to_frame()
    assert repr(wide).startswith(f"A: {wide.a.headline}. B: {wide.b.headline}.")


def test_a_comparison_says_what_its_columns_are(icl_mini):
    prompt = il.Prompt.parse(families.PROMPT, answer="foo")
    both = [il.explain(icl_mini, prompt, k=2, by="exchange") for _ in range(2)]
    text = " ".join(il.compare(*both).to_markdown().split())
    assert "A: Exchange: log-odds that foo loses" in text
    assert "B: Exchange: log-odds that foo loses" in text
    text_of = [il.Text("love : eight :", answer="foo", against=["bar"])] * 2
    comparison = str(il.compare(*(il.explain(icl_mini, text, k=2) for text in text_of)))
    assert "contrast in A" not in comparison
    assert re.search(r"against \S+ in A", comparison)


def test_the_command_of_an_edited_model_says_that_it_has_no_edits(icl_mini):
    prompt = il.Prompt.parse(families.PROMPT, answer="foo")
    with il.ablate_heads(icl_mini, ["L4H0"]):
        edited = il.explain(icl_mini, prompt, k=2)
    plain = il.explain(icl_mini, prompt, k=2)
    assert "the command that reproduces them" in plain.to_html()
    assert "reproduces them" not in edited.to_html()
    assert "the command that explains the model without what edited it here" in edited.to_html()


def test_reasons_are_the_score_and_value_parts(icl_mini):
    """The panel's writers and pairs are those of `attention_score_parts` and `value_parts`, largest
    first.
    """
    explanation = il.explain(
        icl_mini, il.Prompt.parse(families.PROMPT, answer="foo"), k=3, why="L2H1"
    )
    batch = il.tokenize(icl_mini, [il.Prompt.parse(families.PROMPT, answer="foo")])
    acts = il.capture(icl_mini, batch, writers=True)
    assert str(explanation.heads[-1].head) == "L2H1"
    for report in explanation.heads:
        why = report.why
        parts = il.attention_score_parts(acts, report.head)
        expected = parts.contrast(parts.of_label(batch.answer))
        assert_close(why.score_difference, expected.value[0])
        frame = expected.to_frame().set_index("writer")
        for side in ("query", "key"):
            largest = frame[f"{side}_side"].abs().nlargest(len(getattr(why, side)))
            assert [name for name, _ in getattr(why, side)] == largest.index.tolist()
            assert_close(
                [value for _, value in getattr(why, side)],
                frame.loc[largest.index, f"{side}_side"].tolist(),
            )
        for query_writer, key_writer, value in why.pairs:
            at = parts.writers.index(query_writer), parts.writers.index(key_writer)
            assert_close(value, expected.pairs[0][at], scale=float(expected.pairs.abs().max()))
        rows, columns = (
            [parts.writers.index(name) for name, _ in side] for side in (why.query, why.key)
        )
        largest = expected.pairs[0][rows][:, columns].abs().flatten().topk(len(why.pairs)).values
        assert_close([abs(value) for *_, value in why.pairs], largest, scale=float(largest[0]))
        values = il.value_parts(
            acts, report.head, batch.answer_tokens, against=batch.other_label_tokens
        )
        assert_close(why.value_total, float(values.value[0][parts.of_label(batch.answer)[0]].sum()))
        assert why.value_is_exact
    assert {"query", "key", "value", "pair"} == set(explanation.to_frame("why")["side"])
    assert "L2H1" in explanation.figures["why"].get_supxlabel()
    assert 'class="why"' in explanation.to_html()


def test_reasons_are_decoded_into_words(icl_mini):
    """The first writers of each side are decoded: what they add to the query, write at the keys,
    add to values.
    """
    explanation = il.explain(
        icl_mini, il.Prompt.parse(families.PROMPT, answer="foo"), k=2, by="contrast"
    )
    batch = il.tokenize(icl_mini, [il.Prompt.parse(families.PROMPT, answer="foo")])
    acts = il.capture(icl_mini, batch, writers=True)
    same = batch.label_index[0] == batch.answer[0]
    grays = set()
    for report in explanation.heads:
        scores = il.attention_score_parts(acts, report.head)
        values = il.value_parts(
            acts, report.head, batch.answer_tokens, against=batch.other_label_tokens
        )
        for side in ("query", "key", "value"):
            words_by_writer = report.why.words(side)
            assert list(words_by_writer) == [name for name, _ in report.why.side(side)[:3]]
            for writer, (words, standout) in words_by_writer.items():
                if side == "query":
                    vector = scores.vectors(writer, "query")[0, 0]
                elif side == "key":
                    written = scores.vectors(writer, "key")[0]
                    vector = written[same].mean(0) - written[~same].mean(0)
                else:
                    vector = values.vectors(writer)[0, same].mean(0)
                descriptions = acts.readout.describe(
                    vector[None], torch.tensor([-1]), k=10, keep="words"
                )
                if standout > -2:  # a vector of rounding errors has no words of its own
                    assert list(words) == descriptions.tokens[0]
                    assert standout == pytest.approx(float(descriptions.standouts[0]), abs=0.02)
                grays.add(standout < 2)
                why = explanation.to_frame("why")
                row = why[
                    (why["name"] == str(report.head))
                    & (why["side"] == side)
                    & (why["writer"] == writer)
                ]
                assert row["words"].item() == " ".join(words)
    assert grays == {True, False}
    page = explanation.to_html()
    assert "Contributions of these writers, in words" in page
    assert 'class="noise"' in page.partition("Contributions of these writers, in words")[2]


def test_the_sentence_says_why(icl_mini):
    """It states attention, score difference and strongest writers, on the page, in its static
    version and terminal.
    """
    explanation = il.explain(
        icl_mini, il.Prompt.parse(families.PROMPT, answer="foo"), k=2, by="contrast"
    )
    report = explanation.heads[0]
    sentence = why_sentence(explanation, report)
    attention = sum(report.attention[position] for position in report.why.more)
    assert f"{attention:.0%} of its attention" in sentence
    assert f"{abs(report.why.score_difference):.2f}" in sentence
    strongest = max(
        report.why.query, key=lambda part_of_writer: part_of_writer[1] * report.why.score_difference
    )
    assert f"{writer_in_words(strongest[0])} ({signed(strongest[1], 2)})" in sentence
    assert sentence in ex.terminal_text(explanation)
    page = html.unescape(sentence)
    assert page in html.unescape(explanation.to_html())
    static = explanation._repr_html_().partition("icl-lens-twin")[2]
    assert page in html.unescape(static)


def test_writers_in_words():
    parts = [("F3", 1.0), ("L2H1", 0.6), ("embed", 0.2), ("bias", -0.7), ("pos_embed", -0.1)]
    assert (
        writers_in_words(parts, above=True)
        == "FFN 3 (+1.00) and L2H1 (+0.60), against biases (−0.70)"
    )
    assert writers_in_words(parts, above=False) == "biases (−0.70), against FFN 3 (+1.00)"


@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((-0.3, -0.2), "many small writers, against FFN 3 ({}0.30)"),
        ((-0.2, -0.3, 0.004), "many small writers, against L2H1 ({}0.30)"),
        ((-0.00501,), "many small writers, against FFN 3 ({}0.01)"),
        ((-0.00499, 0.004), "many small writers"),
        ((), "many small writers"),
    ],
)
def test_strong_writers_of_the_other_sign_are_named_beside_small_ones(values, expected, above):
    names = ("F3", "L2H1", "embed")
    sign = 1 if above else -1
    writers = [(names[place], sign * value) for place, value in enumerate(values)]
    assert writers_in_words(writers, above=above) == expected.format("−" if above else "+")


def test_reasons_of_plain_text_compare_the_two_most_attended_tokens(icl_mini):
    explanation = il.explain(icl_mini, il.Text("love bar love eight", answer=" bar"), k=2)
    for report in explanation.heads:
        (first, _), (second, _) = report.top_attended(2)
        assert report.why is not None
        assert (report.why.more, report.why.less) == ((first,), (second,))


def test_labels_that_are_all_the_same_have_no_reasons(icl_mini):
    explanation = il.explain(icl_mini, "love : bar like : bar eight :", k=1)
    assert explanation.heads[0].why is None
    explanation.to_html()


@pytest.mark.parametrize(
    ("increase", "contrast", "expected"),
    [
        (1.0, 0.25, "both"),  # answer +1, others +0.75
        (1.0, -0.25, "both"),
        (-1.0, 0.25, "neither"),
        (1.0, 0.6, "answer"),  # more than half of the larger change
        (0.5, -0.7, "others"),
        (8.0, 0.7, "answer"),  # far less than half, but a factor of two in the odds
        (8.0, -0.7, "others"),
        (8.0, 0.69, "both"),
    ],
)
def test_a_head_supports_both_if_it_hardly_tells_them_apart(increase, contrast, expected):
    assert supports(increase, contrast) == expected


def test_markdown_has_the_finding_and_the_numbers_of_the_tables(explanation):
    text = explanation.to_markdown()
    assert text.startswith(f"# {explanation.headline}\n\n{explanation.finding}")
    for label, row in explanation.to_frame("labels").set_index("label").iterrows():
        cells = [percent(math.exp(row[name])) for name in ("log_prob", "log_prob_located_zeroed")]
        assert f"| {label} | {cells[0]} | {cells[1]} |" in text
    for report in explanation.heads:
        cells = [
            signed(score) for score in (*report.scores.values(), explanation.lost(report.ablated))
        ]
        assert f"| {report.head} | {' | '.join(cells)} |" in text


@pytest.mark.parametrize(
    ("cost", "random_cost", "matters"),
    [
        (2.0, 0.0, True),
        (2.0, 2.0, False),
        (2.0, 3.0, False),
        (-2.0, 0.0, False),
        (-2.0, -3.0, False),
        (0.0, 0.0, False),
    ],
)
def test_heads_that_matter_on_the_prompt_that_located_them_are_said_to_be_so(
    explanation, cost, random_cost, matters
):
    """Said where the heads cost more than every random set, and not where they cost as much or less."""
    before = explanation.scores.log_probs
    target = explanation.labels.index(explanation.target)

    def lowered(nats):
        return tuple(value - nats * (index == target) for index, value in enumerate(before))

    spread = (-0.1, -0.05, 0.0, 0.05, 0.1, 0.0)
    random_scores = tuple(lowered(random_cost + nats) for nats in spread)
    ablation = replace(explanation.ablation, located=lowered(cost), random=random_scores)
    made_up = replace(explanation, ablation=ablation)
    assert made_up.shows_that_heads_matter == matters
    assert ("located on this prompt as well" in made_up.finding) == matters
