"""Text to tokens and back: tokenizer, chat formats, sampling, generation."""
