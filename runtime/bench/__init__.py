"""Paired benchmark arms over one engine: speed, accept length and whether the answers are equal."""
