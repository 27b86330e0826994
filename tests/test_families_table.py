"""docs/families.md says what the tests hold."""

import families
import families_table
import pytest


def test_the_page_is_up_to_date():
    text = families_table.PAGE.read_text()
    assert families_table.page(text) == text, "run python docs/families_table.py"


def test_every_family_has_a_row():
    assert set(families_table.NAMES) == set(families.FAMILIES)
    assert families_table.table().count("\n") == len(families.FAMILIES) + 1


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="has no <!-- table: begin -->"):
        families_table.page("# Families")
