"""Transport to one node: on this machine or over SSH, and the upload of our own code.

Importing the package imports no SSH.
"""
