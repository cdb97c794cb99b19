"""DigitalOcean. `provider` is the provider; the others are its parts. Importing the package imports nothing."""
