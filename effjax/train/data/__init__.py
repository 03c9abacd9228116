"""Data in memory: images and text, each read by one file."""
