"""A small Kimi K3 that has really been trained, in the release's layout, and what made it.

setting     the model's shape and the training's numbers
topics      Python's own documentation, split into training text and held-out text
vocabulary  byte-pair training, the tiktoken rank file and its special tokens
delta       the delta rule by pieces of 16 tokens instead of token by token
batches     the reference on several sequences at once
parameters  initial values, and how the reference finds them by name
rounding    MXFP4 and bf16 rounding that gradients pass through
training    the loop: batches, loss, router balance, learning rate
writing     the checkpoint folder
measuring   loss of a checkpoint folder on a text, by the reference
continuing  text continued by a container and by a checkpoint
train       `python -m tests.trained.train OUT`
checkpoint  what that command wrote
"""
