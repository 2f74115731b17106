"""Configuration and checkpoints: what every floor above may import."""
