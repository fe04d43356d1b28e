"""What runs inside a sandbox: standard library and ptyprocess only, everything imported before the first fork."""
