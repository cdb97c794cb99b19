"""Plain threads, a periodic thread, and the check for processes whose threads were replaced by greenlets."""
