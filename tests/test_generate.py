"""Names of outputs and files of prompts."""

from pathlib import Path

import pytest

from telefuser.generate import output_paths, read_prompts, slug

TWO = ["a red circle", "a blue square"]


def names(output, prompts=("a red circle",), seeds=None, overwrite=False):
    return [str(path) for path in output_paths(output, prompts, seeds or [5] * len(prompts), overwrite)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_prompt():
    assert names(None) == ["a-red-circle.mp4"]
    assert names("out.mkv") == ["out.mkv"]
    assert names("{prompt}-{seed}.mp4") == ["a-red-circle-5.mp4"]


def test_several_prompts_are_numbered():
    assert names(None, TWO) == ["001-a-red-circle.mp4", "002-a-blue-square.mp4"]
    assert names("out.mp4", TWO) == ["out-001.mp4", "out-002.mp4"]
    assert names("clip{n}.mp4", TWO) == ["clip001.mp4", "clip002.mp4"]
    assert names("{seed}.mp4", TWO, [8, 9]) == ["8-001.mp4", "9-002.mp4"]


def test_folders(here):
    (here / "old").mkdir()
    assert names("old") == [str(Path("old") / "a-red-circle.mp4")]
    assert names("new/", TWO)[1] == str(Path("new") / "002-a-blue-square.mp4")
    assert (here / "new").is_dir()
    (here / "file").write_text("")
    for impossible in ("file/", "no/such/parent/"):
        with pytest.raises(ValueError, match="cannot make the folder"):
            names(impossible)


def test_names_that_no_disk_takes_are_left_to_the_check_of_outputs():
    for name in ("x" * 300 + ".mp4", "~nobody-of-that-name/a.mp4", "a\0.mp4"):
        assert names(name) == [name]
    with pytest.raises(ValueError, match="cannot make the folder"):
        names("x" * 300 + "/")


def test_existing_files(here):
    for name in ("a-red-circle.mp4", "a-red-circle-2.mp4", "out.mp4", "out-002.mp4"):
        (here / name).write_text("")
    assert names(None) == ["a-red-circle-3.mp4"]
    assert names(None, overwrite=True) == ["a-red-circle.mp4"]
    assert names("out.mp4", overwrite=True) == ["out.mp4"]
    with pytest.raises(ValueError, match=r"out.mp4 exists.*--overwrite"):
        names("out.mp4")
    with pytest.raises(ValueError, match=r"out-002.mp4 exists"):
        names("out.mp4", TWO)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("A red circle, moving right!", "a-red-circle-moving-right"),
        ("../../etc/passwd", "etc-passwd"),
        ("一只猫 running", "一只猫-running"),
        ("?!", "video"),
        ("word " * 50, "word-word-word-word-word-word-word-word"),
        ("x" * 100, "x" * 40),
    ],
)
def test_slug(prompt, expected):
    assert slug(prompt) == expected


def test_prompts_file(here):
    file = here / "prompts.txt"
    file.write_bytes("\ufeff# header\r\na red circle\r\n\r\n  # indented\r\n一只猫\r\n".encode())
    assert read_prompts(file) == ["a red circle", "一只猫"]


@pytest.mark.parametrize(
    ("content", "reason"), [(b"# nothing\n\n", "holds no prompt"), (b"caf\xe9", "UTF-8"), (None, "No such file")]
)
def test_unusable_prompts_files(here, content, reason):
    file = here / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"prompts.txt.*{reason}"):
        read_prompts(file)
