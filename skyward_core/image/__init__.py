"""What a machine must have before it is a node: packages, environment variables, volumes."""
