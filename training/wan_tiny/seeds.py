"""Random streams that depend on (seed, purpose, index) only, so that a resumed run sees what an unbroken one sees."""

import hashlib

import torch


def generator_for(device: torch.device, seed: int, purpose: str, index: int) -> torch.Generator:
    """A generator on `device`, seeded by a hash so that neighbouring steps and stages share no stream."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
