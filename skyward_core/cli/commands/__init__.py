"""The commands: each reads its options and finds the data. The module of the same name in `views` makes tables and
JSON.
"""
