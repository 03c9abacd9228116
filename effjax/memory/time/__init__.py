"""The modelled time of a compiled program."""
