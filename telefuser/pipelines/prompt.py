"""From prompt text to the text encoder's rows; used by the pipeline and by training."""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import ftfy
import torch
from tokenizers import Tokenizer

logger = logging.getLogger(__name__)


def clean_text(text: str) -> str:
    """Broken encodings repaired, HTML entities resolved (twice: scraped text often needs it), white space collapsed."""
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()


class PromptTokenizer:
    """Token ids of prompts, from a `tokenizer.json` of the `tokenizers` library.

    Args:
        path: the file.
        max_length: tokens a prompt is padded or cut to, the end token included.

    Raises:
        ValueError: the file is absent or no tokenizer.
    """

    def __init__(self, path: str | Path, max_length: int = 512):
        self.path, self.max_length = Path(path), max_length
        if not self.path.is_file():
            raise ValueError(f"no tokenizer at {self.path}: a Wan folder keeps it in google/umt5-xxl/tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(self.path))
        except Exception as error:  # the library raises plain Exception for a bad file
            raise ValueError(f"{self.path} is not a tokenizer the `tokenizers` library can read: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.pad_id = self._tokenizer.token_to_id("<pad>") or 0
        self.unknown_id = self._tokenizer.token_to_id("<unk>")
        self._warned: set[int] = set()

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def count(self, text: str) -> int:
        """Tokens of the whole cleaned text, the end token included, before any cut."""
        return len(self._tokenizer.encode(clean_text(text)).ids)

    def __call__(self, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokenize prompts.

        Returns:
            ids and mask, both int64 [B, max_length]; the mask is 1 on tokens and 0 on padding. A prompt that is too
            long is cut (the end token stays) and reported once, as are words that the tokenizer does not know.
        """
        ids = torch.full((len(texts), self.max_length), self.pad_id, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            tokens = self._tokens(clean_text(text))
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            mask[row, : len(tokens)] = 1
        return ids, mask

    def _tokens(self, text: str) -> list[int]:
        encoding = self._tokenizer.encode(text)
        unknown = [text[a:b] for token, (a, b) in zip(encoding.ids, encoding.offsets) if token == self.unknown_id]
        length = len(encoding.ids)
        if length > self.max_length:
            self._tokenizer.enable_truncation(self.max_length)
            try:
                encoding = self._tokenizer.encode(text)
            finally:
                self._tokenizer.no_truncation()
        self._report(text, length, unknown)
        return encoding.ids

    def _report(self, text: str, length: int, unknown: list[str]) -> None:
        if (length <= self.max_length and not unknown) or hash(text) in self._warned:
            return
        self._warned.add(hash(text))
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        if length > self.max_length:
            logger.warning(
                "the prompt %r has %d tokens, the model reads %d: the rest is ignored", shown, length, self.max_length
            )
        if unknown:
            words = _listed(list(dict.fromkeys(unknown)))
            logger.warning("the prompt %r has words this model does not know: %s", shown, words)


def _listed(words: list[str]) -> str:
    """At most ten words of 40 characters, so that a pasted page does not fill the screen."""
    shown = [repr(word if len(word) <= 40 else f"{word[:37]}...") for word in words[:10]]
    return ", ".join(shown) + (f" and {len(words) - 10} more" if len(words) > 10 else "")


def encode_rows(encoder: torch.nn.Module, tokenizer: PromptTokenizer, texts: Sequence[str]) -> list[torch.Tensor]:
    """Text features of prompts without padding: one [tokens, C] each, on the encoder's device and in its dtype."""
    device = next(encoder.parameters()).device
    ids, mask = tokenizer(texts)
    lengths = mask.sum(dim=1).tolist()
    # Padding is masked and dropped anyway: 20 tokens instead of 512 cost the encoder a twenty-fifth.
    longest = max(*lengths, 1)
    encoded = encoder(ids[:, :longest].to(device), mask[:, :longest].to(device))
    return [rows[:length] for rows, length in zip(encoded, lengths)]
