"""Layers shared by target families and drafts."""
