"""Prompt text to encoder rows: cleaning, counting, cutting, and what padding becomes."""

import logging

import pytest
import torch

from telefuser.models.wan_video_text_encoder import WanTextEncoder
from telefuser.pipelines.prompt import PromptTokenizer, clean_text, encode_rows
from tests.pipelines.conftest import TEXT_ENCODER, write_tokenizer


@pytest.fixture
def tokenizer(tmp_path) -> PromptTokenizer:
    write_tokenizer(tmp_path / "google" / "tokenizer.json")
    return PromptTokenizer(tmp_path / "google" / "tokenizer.json", max_length=12)


@pytest.fixture
def encoder() -> WanTextEncoder:
    torch.manual_seed(0)
    return WanTextEncoder.from_config(TEXT_ENCODER).eval()


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("  a \n\t red   cat ", "a red cat"),
        ("a &amp;amp; b &lt;c&gt;", "a & b <c>"),
        ("schÃ¶n", "schön"),
        ("it’s “red”", 'it\'s "red"'),
        ("", ""),
    ],
)
def test_text_is_repaired_unescaped_and_collapsed(text, clean):
    assert clean_text(text) == clean


def test_ids_end_with_the_end_token_and_are_padded(tokenizer):
    ids, mask = tokenizer(["a  red cat", ""])
    assert ids.shape == mask.shape == (2, 12)
    assert ids.dtype == mask.dtype == torch.int64
    assert ids[0].tolist() == [3, 6, 4, 1] + [0] * 8
    assert mask.tolist() == [[1] * 4 + [0] * 8, [1] + [0] * 11]
    assert ids[1, 0] == 1


def test_a_prompt_that_is_too_long_is_cut_counted_and_reported_once(tokenizer, caplog):
    text = "a red cat " * 10
    for _ in range(2):
        ids, mask = tokenizer([text])
        tokenizer(["a cat"])
    assert tokenizer.count(text) == 31
    assert mask.sum() == 12
    assert ids[0, -1] == 1
    assert ids[0, :11].tolist() == [3, 6, 4, 3, 6, 4, 3, 6, 4, 3, 6]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "31 tokens, the model reads 12" in caplog.text


def test_words_the_model_does_not_know_are_named_once(tokenizer, caplog):
    tokenizer(["a purple cat on a purple zebra"])
    tokenizer(["a purple cat on a purple zebra"])
    assert len(caplog.records) == 1
    assert "does not know: 'purple', 'zebra'" in caplog.text


def test_the_warning_about_unknown_words_is_short(tokenizer, caplog):
    tokenizer(["q" * 100_000])
    tokenizer([" ".join(f"word{i}" for i in range(50))])
    messages = [message for message in caplog.messages if "does not know" in message]
    assert [len(message) < 400 for message in messages] == [True, True]
    assert messages[1].endswith("'word9' and 40 more")


def test_settings_stored_in_the_file_do_not_pad_or_cut(tmp_path):
    """Files saved after enable_padding or enable_truncation carry those settings."""
    from tokenizers import Tokenizer

    path = tmp_path / "google" / "tokenizer.json"
    write_tokenizer(path)
    stored = Tokenizer.from_file(str(path))
    stored.enable_padding(length=8)
    stored.enable_truncation(3)
    stored.save(str(path))
    assert PromptTokenizer(path, 12)(["a red cat on black"])[1].sum() == 6


def test_files_that_are_no_tokenizer_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer at .*absent\.json"):
        PromptTokenizer(tmp_path / "absent.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        PromptTokenizer(tmp_path / "tokenizer.json")


def test_a_prompt_has_a_row_a_token_and_none_sees_the_padding(tokenizer, encoder):
    """B128."""
    texts = ["a cat", "a red circle moving right on a black background"]
    with torch.no_grad():
        rows = encode_rows(encoder, tokenizer, texts)
        assert [tuple(row.shape) for row in rows] == [(3, 32), (10, 32)]
        assert rows[0].abs().amin(dim=1).min() > 0
        encoder.token_embedding.weight[tokenizer.pad_id] = 1e3
        for row, again in zip(rows, encode_rows(encoder, tokenizer, texts)):
            assert torch.equal(again, row)


def test_a_prompt_is_encoded_the_same_alone_and_among_others(tokenizer, encoder):
    """B126."""
    with torch.no_grad():
        together = encode_rows(encoder, tokenizer, ["a cat", "a red circle moving right"])
        alone = encode_rows(encoder, tokenizer, ["a cat"])[0]
    assert [len(rows) for rows in together] == [3, 6]
    torch.testing.assert_close(together[0], alone, atol=2e-6, rtol=0)


def test_encoding_without_padding_matches_encoding_512_tokens(tmp_path, encoder):
    """B128: leaving padding out of the encoder changes nothing but its cost."""
    write_tokenizer(tmp_path / "google" / "tokenizer.json")
    tokenizer = PromptTokenizer(tmp_path / "google" / "tokenizer.json")
    with torch.no_grad():
        rows = encode_rows(encoder, tokenizer, ["a red cat"])[0]
        full = encoder(*tokenizer(["a red cat"]))
    assert full.shape == (1, 512, 32)
    torch.testing.assert_close(rows, full[0, :4], atol=2e-6, rtol=0)
