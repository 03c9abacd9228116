"""Errors that the user can mend: one line that names what is wrong and the remedy."""


class TrainError(Exception):
    """A run that cannot start, or cannot go on, as it was asked for."""


class DataError(TrainError):
    """Images or labels that cannot be read or cannot be right."""
