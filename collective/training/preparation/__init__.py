"""A model is made ready to train, or refused: options, models and data that do not fit."""
