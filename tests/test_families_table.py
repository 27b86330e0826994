"""docs/families.md says what the tests hold."""

import families
import families_table


def test_the_page_is_up_to_date():
    text = families_table.PAGE.read_text()
    assert families_table.page(text) == text, "run python docs/families_table.py"


def test_every_family_has_a_row():
    assert set(families_table.NAMES) == set(families.FAMILIES)
    assert families_table.table().count("\n") == len(families.FAMILIES) + 1
