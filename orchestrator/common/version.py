"""The version of this package, for those who must not import the package's front."""

__version__ = "0.2.0.dev0"
