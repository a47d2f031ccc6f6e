"""Where the training of drafters will live; nothing is here yet."""
