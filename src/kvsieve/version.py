"""The version of kvsieve, also that of its distribution."""

__version__ = "0.4.0.dev0"
