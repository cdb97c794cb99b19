"""Programs of a command line on a pool: what runs, how it runs, and what is shown of it."""
