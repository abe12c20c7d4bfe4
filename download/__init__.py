"""Fetches checkpoints from the Hugging Face hub into a folder: resumable, every file proved."""
