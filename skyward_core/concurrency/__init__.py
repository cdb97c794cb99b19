"""Plain threads: several things at once, one thing again and again; and processes whose threads were replaced by
greenlets.
"""
