"""TeleFuser: fast video-generation transformers on NVIDIA, AMD, Ascend and CPU."""

__version__ = "0.1.0"
