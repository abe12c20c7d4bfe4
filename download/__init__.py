"""Will hold the resumable download of checkpoints; until then any folder that `huggingface_hub` made will do."""
