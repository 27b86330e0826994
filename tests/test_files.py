"""Files appear whole or not at all."""

import pytest

from icl_lens.files import atomic_write, write_text


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
