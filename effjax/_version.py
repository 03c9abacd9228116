"""The version of effjax, for the package, its commands and the build."""

__version__ = "0.1.0"
