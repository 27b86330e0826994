"""Files appear whole or not at all."""

import pytest

from icl_lens.errors import InputError
from icl_lens.files import atomic_write, configuration_mismatch_error, write_text


def test_a_failed_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "a.json"
    write_text(target, "old")

    def fail_halfway():
        with atomic_write(target) as beside:
            beside.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="choose an existing, writable folder"):
        write_text(tmp_path / "no" / "a.json", "x")


def test_another_configuration_is_told_by_every_value_that_differs():
    theirs = {"n": 24, "heads": [1, 2], "gone": 1}
    error = configuration_mismatch_error(
        "out", theirs, {"n": 26, "heads": (1, 2), "new": "x"}, remedy="choose another folder"
    )
    for words in ("gone: 1 stored, None requested", "n: 24 stored, 26 requested", "new: None stored, 'x' requested"):
        assert words in str(error)
    assert str(error).endswith("; choose another folder")
    assert configuration_mismatch_error("out", {"heads": [1, 2]}, {"heads": (1, 2)}, remedy="") is None
