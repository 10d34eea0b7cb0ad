"""Use cases: inspect, validate, write a manifest, explain. They return values and print nothing."""
