"""How checkpoints of other people's making are read and written, one file for each kind of model."""
