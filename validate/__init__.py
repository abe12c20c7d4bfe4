"""Proof that a container is right: its structure, its weights against the checkpoint, its logits against PyTorch.

`python -m validate` is the command. `structure` reads every byte once, without torch; `weights` and `logits` use the
baseline in `validate.reference`, which shares no arithmetic with what it checks. `text` measures what quantisation does
to the model's predictions.
"""
