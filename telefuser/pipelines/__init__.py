"""From a prompt to a video file: the parts of a run and the pipeline that joins them."""
