"""Who rents us machines. One cloud, one file; none knows another."""
