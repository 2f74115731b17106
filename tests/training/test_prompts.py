"""Wording and reading back: the judge of a prompt must not misread what the training said."""

import random

import pytest

from training.wan_tiny.prompts import Attributes, canonical, grid, parse, reword
from training.wan_tiny.tokenizer import TEXT_LEN, build_tokenizer, encode, save_tokenizer


def test_the_grid_has_every_combination_once():
    assert len(grid()) == len(set(grid())) == 216


def test_the_plain_wording_is_the_documented_one():
    assert canonical(Attributes(0, 0, 1, 0)) == "a red circle moving right on a black background"
    assert canonical(Attributes(5, 1, 5, 1)) == "an orange square shrinking on a white background"


def test_every_wording_reads_back_as_what_was_meant():
    rng = random.Random(0)
    for attributes in grid():
        assert parse(canonical(attributes)) == attributes
        for _ in range(10):
            prompt = reword(attributes, rng)
            read = parse(prompt)
            assert read[:3] == attributes[:3], prompt
            assert read.background in (attributes.background, None), prompt


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("A RED ball, moving from left to right on black!", (0, 0, 1, 0)),
        ("crimson disc moves from right to left on white", (0, 0, 0, 1)),
        ("a violet pyramid is rising over a bright backdrop", (4, 2, 2, 1)),
        ("a house", (None, None, None, None)),
    ],
)
def test_prompts_by_hand(prompt, expected):
    assert tuple(parse(prompt)) == expected


def test_token_ids_follow_the_official_convention():
    tokenizer = build_tokenizer()
    assert tokenizer.encode("").ids == [1]
    ids = tokenizer.encode("a Shiny, RED-circle").ids
    assert ids[-1] == 1
    assert ids[1] == 2  # unknown
    assert [tokenizer.id_to_token(i) for i in ids[2:4]] == ["red", "circle"]


def test_all_wordings_fit_and_only_fillers_are_unknown():
    rng = random.Random(1)
    tokenizer = build_tokenizer()
    rows = encode([reword(attributes, rng) for attributes in grid() for _ in range(5)], tokenizer)
    assert all(len(row) == TEXT_LEN and row.count(1) == 1 and row.count(2) <= 1 for row in rows)
    plain = encode([canonical(attributes) for attributes in grid()], tokenizer)
    assert not any(2 in row for row in plain)


def test_a_text_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="text_len=32"):
        encode(["red " * 40], build_tokenizer())


def test_the_pipeline_reads_the_saved_tokenizer_alike(tmp_path):
    from telefuser.pipelines.prompt import PromptTokenizer

    prompt = "a red circle moving right on a black background"
    ids, mask = PromptTokenizer(save_tokenizer(tmp_path), TEXT_LEN)([prompt, ""])
    assert ids.tolist() == encode([prompt, ""], build_tokenizer())
    assert mask.sum(1).tolist() == [10, 1]
