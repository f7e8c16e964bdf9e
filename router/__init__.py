"""The control of one request: front doors, dispatcher, placement, tokenizer, clients."""
