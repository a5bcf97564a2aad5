"""What `zaya generate` and `zaya chat` are made of: prompts, batches, sampling, streamed text, conversations."""
