"""The page of `inspect --html`: one file, no script, no request to anywhere."""
