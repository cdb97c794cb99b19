"""The commands: each reads its options and looks up. The module of the same name in `views` makes tables and JSON."""
