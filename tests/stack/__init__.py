"""The services of docker-compose.yml as processes of this machine: `python -m tests.stack`."""
