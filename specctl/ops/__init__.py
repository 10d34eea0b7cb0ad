"""Use cases: inspect, validate, convert, normalize, write a manifest, build a token map, explain.

They return values and print nothing.
"""
