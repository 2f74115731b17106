"""The toy checkpoint's word-level tokenizer, a `tokenizers` file that the loader reads like the official one."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from training.wan_tiny.prompts import vocabulary

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
VOCAB_SIZE = 128
TEXT_LEN = 32


def build_tokenizer() -> Tokenizer:
    """Lower-cased words without punctuation; ids as in the official file: pad 0, end 1 (appended), unknown 2."""
    vocab = {word: index for index, word in enumerate([PAD, EOS, UNK, *vocabulary()])}
    if len(vocab) > VOCAB_SIZE:
        raise ValueError(
            f"the wording uses {len(vocab)} tokens, over the text encoder's {VOCAB_SIZE}; raise VOCAB_SIZE"
        )
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=UNK))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex(r"[^\w\s]"), " ")])
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, vocab[EOS])])
    return tokenizer


def encode(texts: list[str], tokenizer: Tokenizer, text_len: int = TEXT_LEN) -> list[list[int]]:
    """Token ids, each row padded with 0 to `text_len`; ValueError for a text that does not fit."""
    rows = []
    for text, encoding in zip(texts, tokenizer.encode_batch(texts)):
        if len(encoding.ids) > text_len:
            raise ValueError(f"{text!r} takes {len(encoding.ids)} tokens, over text_len={text_len}")
        rows.append(encoding.ids + [0] * (text_len - len(encoding.ids)))
    return rows


def save_tokenizer(folder: str | Path) -> Path:
    """Write `google/wan-tiny/tokenizer.json` under the checkpoint folder and return its path."""
    path = Path(folder) / "google" / "wan-tiny" / "tokenizer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(path))
    return path
