"""The embedded toy checkpoint `tiny`: synthetic clips, training from scratch, export, and a judge of pixels."""
