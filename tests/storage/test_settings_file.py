"""A setting is put into a YAML file, and every other character stays."""

import os

import pytest
import yaml

from trl_quant.storage.settings_file import check_setting, write_setting


BEFORE_AND_AFTER = {
    "replaced": ("a: 1\nprecision: auto\nb: 2\n", "a: 1\nprecision: fp8\nb: 2\n"),
    "with its comment": ("precision:   'auto'   # by speed\r\nb: 2\r\n", "precision:   fp8   # by speed\r\nb: 2\r\n"),
    "empty": ("precision:\nb: 2", "precision: fp8\nb: 2"),
    "empty with a comment": ("precision: # none yet\n", "precision: fp8 # none yet\n"),
    "quoted": ('"precision" : !!str int8\n', '"precision" : fp8\n'),
    "in braces": ("{a: 1, precision: auto, b: {precision: x}}\n", "{a: 1, precision: fp8, b: {precision: x}}\n"),
    "at a level below": ("a:\n  precision: auto\n", "a:\n  precision: auto\nprecision: fp8\n"),
    "in a text": ("a: |\n  precision: auto\n", "a: |\n  precision: auto\nprecision: fp8\n"),
    "in a comment": ("# precision: auto\na: 1", "# precision: auto\na: 1\nprecision: fp8\n"),
    "appended": ("a: ä  # é\n\n", "a: ä  # é\n\nprecision: fp8\n"),
    "appended to lines of Windows": ("a: 1\r\nb: 2", "a: 1\r\nb: 2\r\nprecision: fp8\r\n"),
    "in an empty file": ("", "precision: fp8\n"),
    "after comments alone": ("# nothing yet\n", "# nothing yet\nprecision: fp8\n"),
    "the last of two": ("precision: a\nprecision: b\n", "precision: a\nprecision: fp8\n"),
}


@pytest.mark.parametrize("case", BEFORE_AND_AFTER)
def test_one_setting_changes(tmp_path, case):
    before, after = BEFORE_AND_AFTER[case]
    path = tmp_path / "run.yaml"
    path.write_bytes(before.encode())
    check_setting(path, "precision")
    assert path.read_bytes() == before.encode()  # a check writes nothing
    write_setting(path, "precision", "fp8")
    assert path.read_bytes() == after.encode() and os.listdir(tmp_path) == ["run.yaml"]
    assert yaml.safe_load(after) == (yaml.safe_load(before) or {}) | {"precision": "fp8"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n", "must contain a YAML mapping"),
        ("a: [1\nb: }", "is damaged"),
        ("{a: 1}\n", "Add `precision: fp8` by hand"),
        ("a: 1\n...\n", "Add `precision: fp8` by hand"),
        ("a: &x auto\nprecision: *x\n", "Add `precision: fp8` by hand"),  # `a` must not change
        ("a: 1\n---\nb: 1\n", "is damaged"),
    ],
)
def test_what_takes_no_setting_is_left_alone(tmp_path, text, says):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        write_setting(path, "precision", "fp8")
    with pytest.raises(ValueError, match=says.replace("fp8", "value")):
        check_setting(path, "precision")
    assert path.read_text() == text


def test_places(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml"):
        check_setting(tmp_path / "nowhere.yaml", "precision")
    (tmp_path / "target").mkdir()
    target, link = tmp_path / "target" / "run.yaml", tmp_path / "link.yaml"
    target.write_text("a: 1\n")
    link.symlink_to(target)
    write_setting(link, "precision", "fp8")
    assert link.is_symlink() and target.read_text() == "a: 1\nprecision: fp8\n"
    monkeypatch.setattr(os, "access", lambda path, mode: path != target.parent)
    with pytest.raises(ValueError, match=r"link\.yaml cannot be written"):
        check_setting(link, "precision")
