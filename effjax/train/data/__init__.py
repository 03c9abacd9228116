"""Data sets for training: image classification and text."""
