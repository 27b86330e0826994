"""The similarity matrix as a figure and as an element: numbers, names and colours where they belong."""

import pytest
import torch

import icl_lens as il

SCORES = torch.tensor([[2.0, -1.0, 0.0], [0.5, 1.0, -2.0]])
QUERIES, KEYS = ["love", "a$b$"], ["foo", "<i>bar", "one"]


def test_the_figure_shows_every_score_where_it_belongs():
    figure = il.plots.similarity_matrix(SCORES, QUERIES, KEYS)
    image = figure.axes[0].images[0]
    assert image.get_array().tolist() == SCORES.tolist()
    assert image.get_clim() == (-2.0, 2.0)
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == KEYS
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["love", r"a\$b\$"]
    figure.canvas.draw()


def test_the_element_shows_every_score_in_its_cell():
    element = il.html.similarity_matrix(SCORES, QUERIES, KEYS, query_classes=[0, 1], key_classes=[0, 1, -1])
    assert '<td class="n p" style="--v:100%">+2.00</td><td class="n m" style="--v:50%">−1.00</td>' in element.body
    assert '<span class="tok l1"><bdi>a$b$</bdi></span>' in element.body
    assert "<i>bar" not in element.body
    # Reached by Tab, and scrolled from the keyboard where it is wider than the page.
    assert (
        '<div class="scroll" tabindex="0" role="region" aria-label="Similarity of queries and keys"><table'
        in element.body
    )
    assert element.body.count('scope="row"') == len(QUERIES)
    assert element.body.count('scope="col"') == len(KEYS)
    assert "&lt;i&gt;bar" in element.body
    # where scripts and styles are stripped: the same numbers, tinted
    twin = (
        element._repr_html_().rpartition("icl-lens-twin")[0]
        + il.html.similarity_matrix(SCORES, QUERIES, KEYS)._repr_html_()
    )
    assert "background-color: rgba(213,94,0,0.75)" in twin
    assert "−2.00" in repr(element)


@pytest.mark.parametrize("draw", [il.plots.similarity_matrix, il.html.similarity_matrix])
def test_sizes_that_do_not_fit_are_refused(draw):
    with pytest.raises(il.InputError, match="2 queries and 2 keys"):
        draw(SCORES, QUERIES, KEYS[:2])
