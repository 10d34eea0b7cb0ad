"""Shapes of rounds, by which captured graphs are made and found."""
