"""Text and chats to token ids and back: tokenizer, templates, tools, constraints, stop strings."""
