"""specctl: find every fact about a draft and its target, check them, write them down once."""

__version__ = "0.1.0"
