"""Speculation: proposers, verification, sampling and the noise they share."""
