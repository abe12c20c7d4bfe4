"""What is read from disk: files past the page cache, the resident trunk, the expert cache and its readers."""
