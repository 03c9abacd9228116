"""Compile a program for a device that is not attached."""
