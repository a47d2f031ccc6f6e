"""Training of models and drafters: one loop, and a recipe a file."""
