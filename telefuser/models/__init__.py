"""The networks: one file a part of a model family, imported by its own name."""
