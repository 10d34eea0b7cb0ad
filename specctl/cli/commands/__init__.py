"""One module for each command; `specctl.cli.registry` lists them."""
