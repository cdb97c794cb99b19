"""What happens in a pool: the events, their queue, and the displays that show them."""
