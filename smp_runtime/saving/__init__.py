"""Files: training state that any layout of ranks can resume from, and folders for transformers."""
